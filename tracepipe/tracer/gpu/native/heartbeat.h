// SPDX-License-Identifier: MIT
// Notices when another profiler in the process takes over CUPTI's records.
#pragma once
#include <atomic>
#include <cupti.h>
#include <dlfcn.h>
#include <string_view>

#include "transport.h"

namespace tracepipe {

// Another client of CUPTI takes over all records when it registers callbacks for its own buffers, and CUPTI
// does not report that. So this thread makes a call that CUPTI records, and checks whether the record comes.
class Heartbeat {
  public:
    static bool is_call(std::string_view name) { return name == "cuDriverGetVersion"; }
    // `is_only`: only this call is recorded.
    void start(bool is_only) {
        sent_ = missed_from_ = seen_until_ns_ = 0, is_only_ = is_only;
        void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        if (driver) call_ = reinterpret_cast<Call>(dlsym(driver, "cuDriverGetVersion"));
        if (call_ && is_only) cuptiActivityEnableDriverApi(CUPTI_DRIVER_TRACE_CBID_cuDriverGetVersion, 1);
    }
    void stop() {
        if (is_only_) cuptiActivityEnableDriverApi(CUPTI_DRIVER_TRACE_CBID_cuDriverGetVersion, 0);
    }
    void beat() {
        int version;
        if (!call_) return;
        sent_++;
        call_(&version);
    }
    // Whether a record is of such a call. One that the program made itself proves as much.
    bool take(const CUpti_ActivityAPI &call) {
        if (call.kind != CUPTI_ACTIVITY_KIND_DRIVER || call.cbid != CUPTI_DRIVER_TRACE_CBID_cuDriverGetVersion)
            return false;
        missed_from_ = sent_.load();
        seen_until_ns_ = monotonic_ns();
        return true;
    }
    // Beats since the last recorded one; 0 if none was ever recorded, as CUPTI does not record them then.
    uint64_t missed() const { return seen_until_ns() ? sent_ - missed_from_ : 0; }
    uint64_t seen_until_ns() const { return seen_until_ns_; }

  private:
    using Call = CUresult (*)(int *);
    Call call_ = nullptr;
    bool is_only_ = false;
    std::atomic<uint64_t> sent_{0}, missed_from_{0}, seen_until_ns_{0};
};

}  // namespace tracepipe
