// SPDX-License-Identifier: MIT
// Calls of the program that begin and end windows, which CUPTI's callbacks report: profiler functions, as
// torch.cuda.profiler calls them, and launches of kernels whose name fits. The program continues after the
// turn.
#pragma once
#include <algorithm>
#include <cupti.h>
#include <mutex>
#include <regex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "demangle.h"
#include "subscription.h"
#include "windows.h"

namespace tracepipe {

class WindowCalls {
  public:
    WindowCalls(Windows &windows, Subscription &subscription, void (*follow)())
        : windows_(windows), subscription_(subscription), follow_(follow) {}

    // Call it when the windows are open.
    void open() {
        bool by_profiler = windows_.begins.is("profiler") || windows_.ends.is("profiler");
        bool by_kernel = fits_begin_.open(windows_.begins) | fits_end_.open(windows_.ends);
        if (by_profiler)
            for (uint32_t id : {CUPTI_DRIVER_TRACE_CBID_cuProfilerStart, CUPTI_DRIVER_TRACE_CBID_cuProfilerStop})
                enable(CUPTI_CB_DOMAIN_DRIVER_API, id);
        if (by_kernel) {
            enable_launches(CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_SIZE);
            enable_launches(CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_SIZE);
        }
    }
    void take(CUpti_CallbackDomain domain, CUpti_CallbackId id, const CUpti_CallbackData &data) {
        bool is_entry = data.callbackSite == CUPTI_API_ENTER;
        bool is_runtime = domain == CUPTI_CB_DOMAIN_RUNTIME_API;
        if (!is_runtime && id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStart)
            profiler_starts(is_entry);
        else if (!is_runtime && id == CUPTI_DRIVER_TRACE_CBID_cuProfilerStop)
            profiler_stops(is_entry);
        else
            launches(is_runtime, is_entry, data.symbolName);
    }

  private:
    void enable(CUpti_CallbackDomain domain, uint32_t id) { subscription_.set(Subscription::TRIGGERS, domain, id, true); }
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

    void profiler_starts(bool is_entry) {
        if (is_entry && windows_.begins.is("profiler") && windows_.begin()) follow_();
    }
    void profiler_stops(bool is_entry) {
        if (!is_entry && windows_.ends.is("profiler") && windows_.is_last_hit() && windows_.end()) follow_();
    }
    // A thread's state. The runtime's function calls the driver's, and it is the outer one that turns windows.
    struct Launching {
        bool is_in_runtime = false, is_last = false;
    };
    static Launching &launching() {
        static thread_local Launching launching;
        return launching;
    }
    void launches(bool is_runtime, bool is_entry, const char *kernel) {
        if (is_runtime)
            launching().is_in_runtime = is_entry;
        else if (launching().is_in_runtime)
            return;
        if (!is_entry) return end_if_last();
        if (fits_begin_(kernel) && windows_.begin()) follow_();
        launching().is_last |= fits_end_(kernel) && windows_.is_last_hit();
    }
    void end_if_last() {
        if (std::exchange(launching().is_last, false) && windows_.end()) follow_();
    }

    Windows &windows_;
    Subscription &subscription_;
    void (*follow_)();
    Fits fits_begin_, fits_end_;
};

}  // namespace tracepipe
