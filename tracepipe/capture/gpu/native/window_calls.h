// Calls of the program that begin and end windows, seen by CUPTI's callbacks: of the profiler's functions, as
// torch.cuda.profiler makes them, and launches of kernels whose name fits. The program goes on when the turn is done.
//
// CUPTI lets one client of a process have callbacks. They are asked for where a window waits for such calls alone, so
// that no other profiler is kept out without need.
#pragma once
#include <cupti.h>
#include <mutex>
#include <regex>
#include <unordered_map>
#include <utility>
#include <vector>

#include "demangle.h"
#include "windows.h"

namespace tracepipe {

class WindowCalls {
  public:
    WindowCalls(Windows &windows, void (*follow)()) : windows_(windows), follow_(follow) {}

    // With the windows open: whether all is there that they wait for.
    bool open() {
        bool by_profiler = windows_.begins.is("profiler") || windows_.ends.is("profiler");
        bool by_kernel = fits_begin_.open(windows_.begins) | fits_end_.open(windows_.ends);
        if (!by_profiler && !by_kernel) return true;
        if (cuptiSubscribe(&subscriber_, &WindowCalls::called_back, this) != CUPTI_SUCCESS) return false;
        if (by_profiler)
            for (uint32_t id : {CUPTI_DRIVER_TRACE_CBID_cuProfilerStart, CUPTI_DRIVER_TRACE_CBID_cuProfilerStop})
                enable(id);
        for (uint32_t id = 1; by_kernel && id < CUPTI_DRIVER_TRACE_CBID_SIZE; id++) {
            const char *name = nullptr;
            if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, id, &name) == CUPTI_SUCCESS && name &&
                (strncmp(name, "cuLaunchKernel", 14) == 0 || strncmp(name, "cuLaunchCooperativeKernel", 25) == 0))
                enable(id);
        }
        is_at_launches_ = by_kernel;
        return true;
    }
    // From our own thread: there are no callbacks any more. Where launches had them the subscription stays, as threads
    // may be in one: the program died when callbacks of all calls were unsubscribed in the midst of launches.
    void close() {
        if (!subscriber_) return;
        for (uint32_t id : enabled_) cuptiEnableCallback(0, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id);
        if (!is_at_launches_) cuptiUnsubscribe(std::exchange(subscriber_, nullptr));
    }

  private:
    void enable(uint32_t id) {
        cuptiEnableCallback(1, subscriber_, CUPTI_CB_DOMAIN_DRIVER_API, id);
        enabled_.push_back(id);
    }
    // Whether the name of a kernel, mangled or not, has what a trigger names.
    class Fits {
      public:
        bool open(const Trigger &trigger) {
            if (!trigger.is("kernel")) return false;
            try {
                pattern_ = std::regex(trigger.name, std::regex::ECMAScript | std::regex::optimize);
                return is_open_ = true;
            } catch (const std::regex_error &) {
                return false;  // the capture process has tried it
            }
        }
        bool operator()(const char *name) {
            if (!is_open_ || !name) return false;
            std::lock_guard<std::mutex> lock(mutex_);
            auto [place, is_new] = known_.try_emplace(name, false);
            if (is_new) place->second = std::regex_search(name, pattern_) || std::regex_search(demangled(name), pattern_);
            return place->second;
        }

      private:
        std::regex pattern_;
        bool is_open_ = false;
        std::mutex mutex_;
        std::unordered_map<std::string, bool> known_;
    };

    static void CUPTIAPI called_back(void *self, CUpti_CallbackDomain, CUpti_CallbackId id, const void *given) {
        auto &calls = *static_cast<WindowCalls *>(self);
        auto &data = *static_cast<const CUpti_CallbackData *>(given);
        bool is_entry = data.callbackSite == CUPTI_API_ENTER;
        if (id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStart)
            calls.profiler_starts(is_entry);
        else if (id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStop)
            calls.profiler_stops(is_entry);
        else
            calls.launches(is_entry, data.symbolName);
    }
    void profiler_starts(bool is_entry) {
        if (is_entry && windows_.begins.is("profiler") && windows_.begin()) follow_();
    }
    void profiler_stops(bool is_entry) {
        if (!is_entry && windows_.ends.is("profiler") && windows_.is_last_hit() && windows_.end()) follow_();
    }
    void launches(bool is_entry, const char *kernel) {
        thread_local bool is_last = false;
        if (is_entry) {
            if (fits_begin_(kernel) && windows_.begin()) follow_();
            is_last = fits_end_(kernel) && windows_.is_last_hit();
        } else if (is_last) {
            is_last = false;
            if (windows_.end()) follow_();
        }
    }

    Windows &windows_;
    void (*follow_)();
    CUpti_SubscriberHandle subscriber_ = nullptr;
    std::vector<uint32_t> enabled_;
    bool is_at_launches_ = false;
    Fits fits_begin_, fits_end_;
};

}  // namespace tracepipe
