// Only NVIDIA's own cost: CUPTI records kernels from the program's start, into buffers that nobody reads, and with
// CUPTI_ALONE=calls it calls back for each CUDA call that is not a query, for nothing.
#include <cstdlib>
#include <cstring>
#include <cupti.h>
#include <initializer_list>

static void CUPTIAPI give(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = 1 << 20, *records_max = 0;
    *buffer = static_cast<uint8_t *>(aligned_alloc(8, *bytes));
}
static void CUPTIAPI take(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t) { free(buffer); }
static void CUPTIAPI nothing(void *, CUpti_CallbackDomain, CUpti_CallbackId, const void *) {}

extern "C" int InitializeInjection() {
    cuptiActivityRegisterCallbacks(give, take);
    cuptiActivityEnable(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL);
    CUpti_SubscriberHandle handle;
    const char *asked = getenv("CUPTI_ALONE"), *name = nullptr;
    if (!asked || strcmp(asked, "calls") || cuptiSubscribe(&handle, nothing, nullptr) != CUPTI_SUCCESS) return 1;
    for (auto domain : {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API})
        for (uint32_t id = 1; cuptiGetCallbackName(domain, id, &name) == CUPTI_SUCCESS; id++)
            if (name && !strstr(name, "Get") && !strstr(name, "Query")) cuptiEnableCallback(1, handle, domain, id);
    return 1;
}
