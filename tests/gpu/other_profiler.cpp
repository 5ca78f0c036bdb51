// Another profiler in a program, linked to CUPTI as PyTorch's is: it registers callbacks for buffers of its own, and
// knows no others.
#include <cstdlib>
#include <dlfcn.h>
#include <set>

#include <cupti.h>

static std::set<uint8_t *> &own = *new std::set<uint8_t *>;
static unsigned unknown = 0;

static void gives(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = 1 << 16, *records_max = 0;
    *buffer = static_cast<uint8_t *>(aligned_alloc(8, *bytes));
    own.insert(*buffer);
}
static void takes(CUcontext, uint32_t, uint8_t *buffer, size_t, size_t) { unknown += own.erase(buffer) == 0; }

extern "C" void profiler_starts() { cuptiActivityRegisterCallbacks(gives, takes); }
// Buffers that it was given and that are not its own.
extern "C" unsigned profiler_unknown_buffers() { return cuptiActivityFlushAll(0), unknown; }
// Whether what it is linked to is what it finds by its name.
extern "C" int profiler_is_redirected() {
    return reinterpret_cast<void *>(&cuptiActivityRegisterCallbacks) !=
           dlsym(RTLD_DEFAULT, "cuptiActivityRegisterCallbacks");
}
