// A program with a Compute Sanitizer API and a driver of its own, so that the library of the engine `warps` can be
// tried without a GPU: it is linked to warps.cpp, and its libcuda.so.1 is driver_standin.cpp. It has a context and a
// module. It does what the lines of its input say, and answers each with a line, after those of what happened:
//
//     launch       a call of cuLaunchKernel, as its callbacks show it
//     graph        a graph is made
//     wait         waits until nothing is subscribed
//     quit         returns from main
#include <atomic>
#include <cstdio>
#include <string>

#include <sanitizer.h>
#include <unistd.h>

extern "C" int InitializeInjection();

namespace {

std::atomic<Sanitizer_CallbackFunc> subscriber{nullptr};
void *subscribed;
std::atomic<bool> domains[64];
const auto CONTEXT = reinterpret_cast<CUcontext>(0x100);
const auto MODULE = reinterpret_cast<CUmodule>(0x200);

void call_back(Sanitizer_CallbackDomain domain, Sanitizer_CallbackId id, const void *data) {
    auto function = subscriber.load();
    if (function && domains[domain]) function(subscribed, domain, id, data);
}
void launch() {
    Sanitizer_CallbackData data{};
    data.functionName = "cuLaunchKernel", data.context = CONTEXT;
    for (auto site : {SANITIZER_API_ENTER, SANITIZER_API_EXIT}) {
        data.callbackSite = site;
        call_back(SANITIZER_CB_DOMAIN_DRIVER_API, 307, &data);
    }
}
SanitizerResult said(const char *what) {
    puts(what), fflush(stdout);
    return SANITIZER_SUCCESS;
}

}  // namespace

extern "C" {
SanitizerResult sanitizerSubscribe(Sanitizer_SubscriberHandle *, Sanitizer_CallbackFunc function, void *data) {
    subscribed = data, subscriber = function;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerUnsubscribe(Sanitizer_SubscriberHandle) {
    subscriber = nullptr;
    return said("unsubscribed");
}
SanitizerResult sanitizerEnableDomain(uint32_t enable, Sanitizer_SubscriberHandle, Sanitizer_CallbackDomain domain) {
    domains[domain] = enable != 0;
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerAddPatches(const void *, CUcontext) { return SANITIZER_SUCCESS; }
SanitizerResult sanitizerPatchInstructions(Sanitizer_InstructionId, CUmodule, const char *) {
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerPatchModule(CUmodule) { return said("patched"); }
SanitizerResult sanitizerUnpatchModule(CUmodule) { return said("unpatched"); }
SanitizerResult sanitizerSetLaunchCallbackData(Sanitizer_LaunchHandle, CUfunction, Sanitizer_StreamHandle,
                                               const void *) {
    return SANITIZER_SUCCESS;
}
SanitizerResult sanitizerGetFunctionPcAndSize(CUmodule, const char *, uint64_t *, uint64_t *) {
    return SANITIZER_ERROR_UNKNOWN;
}
}

int main() {
    InitializeInjection();
    Sanitizer_ResourceContextData context{};
    context.context = CONTEXT;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CBID_RESOURCE_CONTEXT_CREATION_FINISHED, &context);
    Sanitizer_ResourceModuleData module{};
    module.context = CONTEXT, module.module = MODULE;
    call_back(SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CBID_RESOURCE_MODULE_LOADED, &module);
    said("begun");
    char word[32];
    while (scanf("%31s", word) == 1) {
        std::string what = word;
        if (what == "launch") launch();
        if (what == "graph") {
            Sanitizer_GraphExecData graph{};
            call_back(SANITIZER_CB_DOMAIN_GRAPHS, SANITIZER_CBID_GRAPHS_GRAPHEXEC_CREATED, &graph);
        }
        while (what == "wait" && domains[SANITIZER_CB_DOMAIN_DRIVER_API]) usleep(1000);
        if (what == "quit") break;
        said(word);
    }
}
