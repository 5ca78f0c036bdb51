// CUPTI as `--gpu kernels` asks it for kernels, copies, memsets, allocations and calls, and with the clock and the buffers
// that it has there; nobody looks into these. What is left of a capture's cost is tracepipe's own.
#include <cstdlib>
#include <ctime>
#include <cupti.h>
#include <mutex>
#include <vector>

#include "call_choice.h"

namespace {

constexpr size_t BUFFER_BYTES = 1 << 20;
constexpr CUpti_ActivityKind WORK[] = {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, CUPTI_ACTIVITY_KIND_MEMCPY,
                                       CUPTI_ACTIVITY_KIND_MEMCPY2, CUPTI_ACTIVITY_KIND_MEMSET,
                                       CUPTI_ACTIVITY_KIND_MEMORY2};
constexpr CUpti_ActivityKind CALLS[] = {CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER};

std::mutex spare_mutex;
std::vector<uint8_t *> spare;

void CUPTIAPI give(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES, *records_max = 0;
    std::lock_guard lock(spare_mutex);
    if (spare.empty()) spare.push_back(static_cast<uint8_t *>(aligned_alloc(8, BUFFER_BYTES)));
    *buffer = spare.back();
    spare.pop_back();
}
void CUPTIAPI take(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t) {
    std::lock_guard lock(spare_mutex);
    spare.push_back(buffer);
}
uint64_t CUPTIAPI monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}
void choose(const tracepipe::CallChoice &choice, CUpti_CallbackDomain domain, uint32_t functions) {
    for (uint32_t cbid = 1; cbid < functions; cbid++) {
        const char *name = nullptr;
        if (cuptiGetCallbackName(domain, cbid, &name) == CUPTI_SUCCESS && name && choice.takes(name)) continue;
        domain == CUPTI_CB_DOMAIN_DRIVER_API ? cuptiActivityEnableDriverApi(cbid, 0)
                                             : cuptiActivityEnableRuntimeApi(cbid, 0);
    }
}

}  // namespace

extern "C" void cupti_begin(const char *calls) {
    setenv("TRACEPIPE_GPU_CALLS", calls, 1);
    tracepipe::CallChoice choice;
    choice.read_settings();
    cuptiActivityRegisterTimestampCallback(monotonic_ns);
    cuptiActivityRegisterCallbacks(give, take);
    for (CUpti_ActivityKind kind : WORK) cuptiActivityEnable(kind);
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityEnable(kind);
    choose(choice, CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_SIZE);
    choose(choice, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_SIZE);
}
extern "C" void cupti_end() {
    tracepipe::CallChoice nothing;
    setenv("TRACEPIPE_GPU_CALLS", "none", 1);
    nothing.read_settings();
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityDisable(kind);
    choose(nothing, CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_SIZE);
    choose(nothing, CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_SIZE);
    for (CUpti_ActivityKind kind : WORK) cuptiActivityDisable(kind);
    cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
}
