// A program with a Compute Sanitizer API and a driver of its own, so that the library of the engine `warps` can be
// tried without a GPU: it is linked to warps.cpp, and its libcuda.so.1 is driver_standin.cpp. It has a context and a
// module. It does what the lines of its input say, and answers each with a line, after those of what happened:
//
//     launch       a call of cuLaunchKernel, as its callbacks show it
//     kernel:NAME  a launch of the kernel of that name begins, as the callbacks show it; its warp runs at once
//     module:NAME  another module is loaded, whose kernel has that name; `other:NAME` is a launch of it
//     return       a call of cuInit returns that was under way when the library was loaded
//     ask          calls of cudaGetDevice, as their callbacks show them, until there are none any more
//     stay         another thread begins a call of cuMemAlloc and does not return from it; `leave` ends it, and is answered when it has
//     wait         another thread begins a call of cuStreamSynchronize; `leave` ends it
//     capture      a stream's capture begins; `captured` ends it; `refused` is one that cannot begin
//     apart:NAME   as `module`, and it is loaded on another thread
//     unload       another thread unloads a module, and says `unloaded`
//     allocated    waits until the library has memory on the GPU, and says how it asked for it: `relaxed`, or
//                  `in a mode that invalidates captures`
//     busy         the GPU has something to do; `idle` says when its driver was asked for that, and it has nothing more
//     load         a module with marks is loaded; `mark` launches its kernel, and `unload` unloads it
//     functions    a module is loaded whose kernel calls functions; `call` launches it
//     marks        says whether the module has a buffer for its marks, `recorded` or `free`
//     callbacks    waits until there are no callbacks any more
//     kernels N    N launches of one kernel, whose warps run at once; `queued N`: whose warps do not run
//     sync         the program waits for all of them
//     end HOW      ends as ends_standin.h says
//     quit         returns from main
//
// To unpatch while a call is under way or the GPU has something to do, to ask whether it has while a stream is captured,
// or to patch or unload while another thread captures one, is what NVIDIA's own does not survive: a line says it.
#include <atomic>
#include <cstdio>
#include <functional>
#include <string>
#include <thread>

#include <sanitizer.h>
#include <unistd.h>

#include "calling_standin.h"
#include "cubin_standin.h"
#include "ends_standin.h"
#include "marking_standin.h"
#include "warp_record.h"

extern "C" int InitializeInjection() __attribute__((weak));  // a library that has this as its own has none
extern "C" tracepipe_mark::MarkBuffer standin_marks;
tracepipe_mark::MarkBuffer standin_marks{};

namespace {

std::atomic<Sanitizer_CallbackFunc> subscriber{nullptr};
void *subscribed;
std::atomic<bool> domains[64];
const auto CONTEXT = reinterpret_cast<CUcontext>(0x100);
const auto MODULE = reinterpret_cast<CUmodule>(0x200), OTHER_MODULE = reinterpret_cast<CUmodule>(0x300);

void call_back(Sanitizer_CallbackDomain domain, Sanitizer_CallbackId id, const void *data) {
    auto function = subscriber.load();
    if (function && domains[domain]) function(subscribed, domain, id, data);
}
std::atomic<bool> is_busy{false}, is_captured{false}, is_asked{false}, is_left{false}, is_gone{true};
constexpr Sanitizer_CallbackId ASKS = 19;
std::atomic<bool> is_asking_seen{true};
std::atomic<int> calls{0};
std::atomic<const char *> allocated{nullptr};

void site(Sanitizer_ApiCallbackSite site, const char *function, Sanitizer_CallbackId id,
          Sanitizer_CallbackDomain domain = SANITIZER_CB_DOMAIN_DRIVER_API, uint32_t result = 0) {
    Sanitizer_CallbackData data{};
    data.functionName = function, data.context = CONTEXT, data.callbackSite = site, data.functionReturnValue = &result;
    call_back(domain, id, &data);
}
void call(const char *function, Sanitizer_CallbackId id) {
    site(SANITIZER_API_ENTER, function, id);
    calls++;
    usleep(100);
    calls--;
    site(SANITIZER_API_EXIT, function, id);
}
void stay(const char *function, Sanitizer_CallbackId id, bool counts) {
    is_left = is_gone = false;
    std::atomic<bool> has_begun{false};
    std::thread([&, function, id, counts] {
        site(SANITIZER_API_ENTER, function, id);
        calls += counts;
        has_begun = true;
        while (!is_left) usleep(100);
        calls -= counts;
        site(SANITIZER_API_EXIT, function, id);
        is_gone = true;
    }).detach();
    while (!has_begun) usleep(100);
}
void load(const std::string &kernel) {
    CubinStandin<2> cubin(kernel.c_str(), kernel.size() + 1);
    cubin.symbols[1].st_info = STT_FUNC, cubin.symbols[1].st_other = 0x10;
    Sanitizer_ResourceModuleData data{};
    data.context = CONTEXT, data.module = OTHER_MODULE;
    data.pCubin = reinterpret_cast<const char *>(&cubin), data.cubinSize = sizeof cubin;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CBID_RESOURCE_MODULE_LOADED, &data);
}
void launch(const char *kernel, CUmodule module = MODULE) {
    Sanitizer_LaunchData data{};
    data.gridDim_x = data.gridDim_y = data.gridDim_z = data.blockDim_x = data.blockDim_y = data.blockDim_z = 1;
    data.functionName = kernel, data.module = module, data.context = CONTEXT;
    data.function = reinterpret_cast<CUfunction>(std::hash<std::string>{}(kernel));
    call_back(SANITIZER_CB_DOMAIN_LAUNCH, SANITIZER_CBID_LAUNCH_BEGIN, &data);
}
const auto MARKED = reinterpret_cast<CUmodule>(0x500), CALLING = reinterpret_cast<CUmodule>(0x600);
const void *launch_data;
bool is_marking = false, is_queued = false;

template <typename Cubin> void module_is(Sanitizer_CallbackIdResource what, CUmodule handle) {
    static const Cubin cubin;
    Sanitizer_ResourceModuleData module{};
    module.context = CONTEXT, module.module = handle;
    module.pCubin = reinterpret_cast<const char *>(&cubin), module.cubinSize = sizeof cubin;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, what, &module);
}
void launch_marked(CUmodule module) {
    site(SANITIZER_API_ENTER, "cuLaunchKernel", 307);
    Sanitizer_LaunchData launch{};
    launch.context = CONTEXT, launch.module = module, launch.function = reinterpret_cast<CUfunction>(module);
    launch.functionName = module == MARKED ? "k" : "_Z1kv", launch.gridId = 1;
    launch.gridDim_x = launch.gridDim_y = launch.gridDim_z = launch.blockDim_y = launch.blockDim_z = 1;
    launch.blockDim_x = 32;
    launch_data = nullptr, is_marking = true;
    call_back(SANITIZER_CB_DOMAIN_LAUNCH, SANITIZER_CBID_LAUNCH_BEGIN, &launch);
    is_marking = false;
    auto data = reinterpret_cast<uint64_t>(launch_data);
    if (module == MARKED) run_marking_warp(data, standin_marks);
    if (module == CALLING && data) run_calling_warp(data, 5000);
    site(SANITIZER_API_EXIT, "cuLaunchKernel", 307);
}
// The main thread captures.
bool is_captured_by_another() { return is_captured && gettid() != getpid(); }
SanitizerResult printed(const char *what) {
    puts(what), fflush(stdout);
    return SANITIZER_SUCCESS;
}

}  // namespace

extern "C" {
SanitizerResult sanitizerSubscribe(Sanitizer_SubscriberHandle *, Sanitizer_CallbackFunc function, void *data) {
    subscribed = data, subscriber = function;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerUnsubscribe(Sanitizer_SubscriberHandle) { return printed("unsubscribed"); }
SanitizerResult sanitizerEnableDomain(uint32_t enable, Sanitizer_SubscriberHandle, Sanitizer_CallbackDomain domain) {
    domains[domain] = enable != 0;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerEnableCallback(uint32_t enable, Sanitizer_SubscriberHandle, Sanitizer_CallbackDomain domain,
                                        Sanitizer_CallbackId id) {
    if (domain == SANITIZER_CB_DOMAIN_RUNTIME_API && id == ASKS) is_asking_seen = enable != 0;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerAddPatches(const void *, CUcontext) { return SANITIZER_SUCCESS; }
SanitizerResult sanitizerPatchInstructions(Sanitizer_InstructionId what, CUmodule, const char *) {
    return what == SANITIZER_INSTRUCTION_CALL ? printed("calls patched") : SANITIZER_SUCCESS;
}
SanitizerResult sanitizerPatchModule(CUmodule) {
    return printed(is_captured_by_another() ? "a capture is invalidated" : "patched");
}
SanitizerResult sanitizerUnpatchModule(CUmodule) {
    return printed(calls ? "unpatched in a call" : is_busy ? "unpatched while the GPU is busy" : "unpatched");
}
SanitizerResult sanitizerSetLaunchCallbackData(Sanitizer_LaunchHandle, CUfunction, Sanitizer_StreamHandle,
                                               const void *given) {
    launch_data = given;
    auto data = uint64_t(given) << 16 >> 16 & ~(tracepipe::REGION_ALIGNMENT - 1);
    if (!data || is_marking || is_queued) return SANITIZER_SUCCESS;
    auto &warp = *reinterpret_cast<tracepipe::Warp *>(data + sizeof(tracepipe::Region));
    warp.entry_mask = 1, warp.entry_ns = 1000, warp.exit_ns = 2000;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerMemcpyHostToDeviceAsync(void *to, void *from, size_t bytes, Sanitizer_StreamHandle) {
    memcpy(to, from, bytes);
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerGetFunctionPcAndSize(CUmodule, const char *name, uint64_t *pc, uint64_t *) {
    if (strcmp(name, "_Z1kv") != 0) return SANITIZER_ERROR_UNKNOWN;
    return *pc = CALLING_PC, SANITIZER_SUCCESS;
}
}

extern "C" void standin_asked_for_idle() {
    if (is_captured) printed("a capture is invalidated");
    is_asked = true;
}
extern "C" int standin_is_idle() { return !is_busy; }
extern "C" void standin_allocates(bool is_relaxed) {
    allocated = is_relaxed ? "relaxed" : "in a mode that invalidates captures";
}

void synchronize() {
    site(SANITIZER_API_ENTER, "cuCtxSynchronize", 17);
    Sanitizer_SynchronizeData data{};
    data.context = CONTEXT;
    call_back(SANITIZER_CB_DOMAIN_SYNCHRONIZE, SANITIZER_CBID_SYNCHRONIZE_CONTEXT_SYNCHRONIZED, &data);
    site(SANITIZER_API_EXIT, "cuCtxSynchronize", 17);
}
void unload() {
    std::thread([] {
        site(SANITIZER_API_ENTER, "cuModuleUnload", 16);
        printed(is_captured_by_another() ? "a capture is invalidated" : "unloaded");
        site(SANITIZER_API_EXIT, "cuModuleUnload", 16);
    }).detach();
}
// A context, and a module in it.
void make_context() {
    Sanitizer_ResourceContextData context{};
    context.context = CONTEXT;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CBID_RESOURCE_CONTEXT_CREATION_FINISHED, &context);
    Sanitizer_ResourceModuleData module{};
    module.context = CONTEXT, module.module = MODULE;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CBID_RESOURCE_MODULE_LOADED, &module);
}
#include "node_launches_standin.h"

// For a program that loads this as a library.
extern "C" void standin_launch() { call("cuLaunchKernel", 307); }
extern "C" void standin_begin() { node_launches.begin(); }
extern "C" void standin_apply(const char *line) { node_launches.apply(line); }

int main() {
    InitializeInjection();
    make_context();
    printed("begun");
    char word[64];
    while (scanf("%63s", word) == 1) {
        std::string what = word;
        if (what.rfind("kernel:", 0) == 0) launch(word + 7);
        if (what.rfind("other:", 0) == 0) launch(word + 6, OTHER_MODULE);
        if (what.rfind("module:", 0) == 0) load(word + 7);
        if (what.rfind("apart:", 0) == 0) std::thread(load, word + 6).join();
        if (what == "unload") unload();
        if (what == "refused")
            for (auto at : {SANITIZER_API_ENTER, SANITIZER_API_EXIT})
                site(at, "cuStreamBeginCapture_v2", 539, SANITIZER_CB_DOMAIN_DRIVER_API, CUDA_ERROR_ILLEGAL_STATE);
        if (what == "launch") call("cuLaunchKernel", 307);
        if (what == "return") site(SANITIZER_API_EXIT, "cuInit", 1);
        while (what == "ask" && is_asking_seen) {
            for (auto at : {SANITIZER_API_ENTER, SANITIZER_API_EXIT})
                site(at, "cudaGetDevice", ASKS, SANITIZER_CB_DOMAIN_RUNTIME_API);
            usleep(1000);
        }
        if (what == "stay") stay("cuMemAlloc_v2", 243, true);
        if (what == "wait") stay("cuStreamSynchronize", 126, false);
        if (what == "leave") is_left = true;
        while (what == "leave" && !is_gone) usleep(100);
        if (what == "capture") call("cuStreamBeginCapture_v2", 539), is_captured = true;
        if (what == "captured") is_captured = false, call("cuStreamEndCapture", 497);
        if (what == "allocated") {
            while (!allocated) usleep(100);
            what = allocated.load();
        }
        if (what == "load") module_is<MarkedCubin>(SANITIZER_CBID_RESOURCE_MODULE_LOADED, MARKED);
        if (what == "mark") launch_marked(MARKED);
        if (what == "unload") module_is<MarkedCubin>(SANITIZER_CBID_RESOURCE_MODULE_UNLOAD_STARTING, MARKED);
        if (what == "functions") module_is<CallingCubin>(SANITIZER_CBID_RESOURCE_MODULE_LOADED, CALLING);
        if (what == "call") launch_marked(CALLING);
        if (what == "marks") what = standin_marks.slots ? "recorded" : "free";
        if (what == "busy") is_busy = true;
        if (what == "idle") {
            while (!is_asked) usleep(100);
            is_busy = false;
        }
        while (what == "callbacks" && domains[SANITIZER_CB_DOMAIN_DRIVER_API]) usleep(100);
        int count = 0;
        if ((what == "kernels" || what == "queued") && scanf("%d", &count) != 1) return 2;
        is_queued = what == "queued";
        for (; count; count--) launch("kernel");
        if (what == "sync") synchronize();
        if (what == "end" && scanf("%63s", word) == 1) end_by(word, [] {});
        if (what == "quit") break;
        printed(what.c_str());
    }
}
