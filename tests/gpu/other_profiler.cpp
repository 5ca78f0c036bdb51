// Another profiler in a program: it has buffers of its own, and knows no others. It calls CUPTI as it is linked to it, or
// by addresses that it looks up, as Python's ctypes does.
#include <cstdlib>
#include <dlfcn.h>
#include <set>

#include <cupti.h>

static std::set<uint8_t *> &own = *new std::set<uint8_t *>;
static unsigned unknown = 0;

static void gives(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = 1 << 16, *records_max = 0;
    *buffer = static_cast<uint8_t *>(calloc(1, *bytes));
    own.insert(*buffer);
}
static void takes(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t) { unknown += own.erase(buffer) == 0; }
static void called(void *, CUpti_CallbackDomain, CUpti_CallbackId, const void *) {}

extern "C" int profiler_registers() { return cuptiActivityRegisterCallbacks(gives, takes); }
extern "C" int profiler_subscribes() {
    CUpti_SubscriberHandle handle;
    auto subscribe = reinterpret_cast<decltype(&cuptiSubscribe)>(dlsym(RTLD_DEFAULT, "cuptiSubscribe"));
    int result = subscribe(&handle, called, nullptr);
    return result ? result : profiler_registers();
}
extern "C" int profiler_subscribes_v2() {
    CUpti_SubscriberHandle handle;
    auto subscribe = reinterpret_cast<decltype(&cuptiSubscribe_v2)>(dlsym(RTLD_DEFAULT, "cuptiSubscribe_v2"));
    int result = subscribe(&handle, called, nullptr, nullptr);
    return result ? result : profiler_registers();
}
// Buffers that it was given and that are not its own.
extern "C" unsigned profiler_unknown_buffers() { return cuptiActivityFlushAll(0), unknown; }
