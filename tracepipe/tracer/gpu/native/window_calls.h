// SPDX-License-Identifier: MIT
// Calls of the program that begin and end windows, which CUPTI's callbacks report: profiler functions, as
// torch.cuda.profiler calls them, and launches of kernels whose name fits. The program continues after the
// turn.
//
// CUPTI gives callbacks to only one client of a process. They are requested only if a window waits for such
// calls, so that other profilers are not excluded without need.
#pragma once
#include <algorithm>
#include <cupti.h>
#include <mutex>
#include <regex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "demangle.h"
#include "windows.h"

namespace tracepipe {

class WindowCalls {
  public:
    WindowCalls(Windows &windows, void (*follow)()) : windows_(windows), follow_(follow) {}

    // Call it when the windows are open. Whether the triggers can be seen.
    bool open() {
        bool by_profiler = windows_.begins.is("profiler") || windows_.ends.is("profiler");
        bool by_kernel = fits_begin_.open(windows_.begins) | fits_end_.open(windows_.ends);
        if (!by_profiler && !by_kernel) return true;
        if (cuptiSubscribe(&subscriber_, &WindowCalls::called_back, this) != CUPTI_SUCCESS) return false;
        if (by_profiler)
            for (uint32_t id : {CUPTI_DRIVER_TRACE_CBID_cuProfilerStart, CUPTI_DRIVER_TRACE_CBID_cuProfilerStop})
                enable(CUPTI_CB_DOMAIN_DRIVER_API, id);
        if (by_kernel) {
            enable_launches(CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_SIZE);
            enable_launches(CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_SIZE);
        }
        is_at_launches_ = by_kernel;
        return true;
    }
    // From the library's own thread: disables the callbacks. If launches had some, the subscription stays, as
    // threads may be in one: programs died when callbacks of all calls were unsubscribed during launches.
    void close() {
        if (!subscriber_) return;
        for (auto [domain, id] : enabled_) cuptiEnableCallback(0, subscriber_, domain, id);
        if (!is_at_launches_) cuptiUnsubscribe(std::exchange(subscriber_, nullptr));
    }

  private:
    void enable(CUpti_CallbackDomain domain, uint32_t id) {
        cuptiEnableCallback(1, subscriber_, domain, id);
        enabled_.emplace_back(domain, id);
    }
    void enable_launches(CUpti_CallbackDomain domain, uint32_t functions) {
        for (uint32_t id = 1; id < functions; id++) {
            const char *given = nullptr;
            if (cuptiGetCallbackName(domain, id, &given) != CUPTI_SUCCESS || !given) continue;
            std::string_view name = given;
            name.remove_prefix(std::min<size_t>(name.size(), domain == CUPTI_CB_DOMAIN_DRIVER_API ? 2 : 4));
            if (name.rfind("LaunchKernel", 0) == 0 || name.rfind("LaunchCooperativeKernel", 0) == 0) enable(domain, id);
        }
    }
    // Whether a kernel's name, mangled or demangled, matches a trigger's pattern.
    class Fits {
      public:
        bool open(const Trigger &trigger) {
            if (!trigger.is("kernel")) return false;
            try {
                pattern_ = std::regex(trigger.name, std::regex::ECMAScript | std::regex::optimize);
                return is_open_ = true;
            } catch (const std::regex_error &) {
                return false;  // cannot happen, as the capture process has checked it
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

    static void CUPTIAPI called_back(void *self, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *given) {
        auto &calls = *static_cast<WindowCalls *>(self);
        auto &data = *static_cast<const CUpti_CallbackData *>(given);
        bool is_entry = data.callbackSite == CUPTI_API_ENTER;
        if (domain == CUPTI_CB_DOMAIN_RUNTIME_API)
            calls.runtime_launches(is_entry);
        else if (id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStart)
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
    // A thread's state. The runtime's function calls the driver's, which has the kernel's name, and a window
    // ends only when the outer one returns: CUPTI records no call that returns later.
    struct Launching {
        bool is_in_runtime = false, is_last = false;
    };
    static Launching &launching() {
        static thread_local Launching launching;
        return launching;
    }
    void runtime_launches(bool is_entry) {
        launching().is_in_runtime = is_entry;
        if (!is_entry) end_if_last();
    }
    void launches(bool is_entry, const char *kernel) {
        if (is_entry) {
            if (fits_begin_(kernel) && windows_.begin()) follow_();
            launching().is_last |= fits_end_(kernel) && windows_.is_last_hit();
        } else if (!launching().is_in_runtime) {
            end_if_last();
        }
    }
    void end_if_last() {
        if (std::exchange(launching().is_last, false) && windows_.end()) follow_();
    }

    Windows &windows_;
    void (*follow_)();
    CUpti_SubscriberHandle subscriber_ = nullptr;
    std::vector<std::pair<CUpti_CallbackDomain, uint32_t>> enabled_;
    bool is_at_launches_ = false;
    Fits fits_begin_, fits_end_;
};

}  // namespace tracepipe
