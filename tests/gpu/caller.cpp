// Makes the records of API calls as the injection library does, without a GPU: the structs of parameters are those
// of CUDA's own headers, filled as a tool gets them.
//
//   caller calls          one call of each kind; see main
//   caller cost N         N entries and returns of cuLaunchKernel; ns of each on standard output
#include <cstddef>
#include <cstdio>
#include <sys/mman.h>

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <generated_cuda_meta.h>
#include <generated_cuda_runtime_api_meta.h>

#include "call_arguments.h"

using namespace tracepipe;

static Channel channel;
static CallTable table;
static unsigned functions = 0;

template <typename Handle> static Handle handle(uintptr_t value) { return reinterpret_cast<Handle>(value); }

struct Call {
    const CallLayout *layout;
    uint64_t name;
    const void *parameters;

    Call(const char *function, const void *parameters, uint64_t launch = 0, const char *kernel = nullptr)
        : layout(table.find(function)), parameters(parameters) {
        name = function_name(strncmp(function, "cu", 2) != 0 || function[2] == 'd', ++functions, layout);
        channel.put(KIND_NAME, &name, sizeof name, function);
        uint64_t kernel_name = 0;
        if (kernel) {
            kernel_name = functions;
            channel.put(KIND_NAME, &kernel_name, sizeof kernel_name, kernel);
        }
        put_call_enter(channel, name, launch, kernel_name, 0, layout, parameters);
    }
    void leave(uint32_t result = 0) { put_call_exit(channel, name, result, layout, parameters); }
};

static void launches() {
    auto function = handle<CUfunction>(0x7f01);
    cuLaunchKernel_params driver{function, 4, 5, 6, 128, 2, 1, 49152, handle<CUstream>(0x9000), nullptr, nullptr};
    Call("cuLaunchKernel", &driver, 7, "void f<int>(int*)").leave();
    CUlaunchConfig config{7, 8, 9, 64, 2, 3, 1024, handle<CUstream>(0x9001), nullptr, 0};
    cuLaunchKernelEx_params extended{&config, function, nullptr, nullptr};
    Call("cuLaunchKernelEx", &extended, 8).leave();
    cuLaunchKernelEx_params without{nullptr, function, nullptr, nullptr};
    Call("cuLaunchKernelEx", &without).leave(CUDA_ERROR_INVALID_VALUE);
    cudaLaunchKernel_v7000_params runtime{handle<void *>(0x7f02), {10, 11, 12}, {32, 4, 8}, nullptr, 1ull << 33,
                                          handle<cudaStream_t>(0x9002)};
    Call("cudaLaunchKernel", &runtime, 0, "void f<int>(int*)").leave();
    cudaLaunchConfig_t runtime_config{{13, 14, 15}, {16, 2, 1}, 2048, handle<cudaStream_t>(0x9003), nullptr, 0};
    cudaLaunchKernelExC_v11060_params runtime_extended{&runtime_config, handle<void *>(0x7f03), nullptr};
    Call("cudaLaunchKernelExC", &runtime_extended).leave();
}

static void memory() {
    CUdeviceptr address = 0;
    void *runtime_address = nullptr;
    cudaMalloc_v3020_params outer{&runtime_address, 4000};
    Call around("cudaMalloc", &outer);
    cuMemAlloc_v2_params inner{&address, 4096};
    Call alloc("cuMemAlloc_v2", &inner);
    address = 0x7f0000001000;
    alloc.leave();
    runtime_address = handle<void *>(address);
    around.leave();
    address = 0xbad;
    Call("cuMemAlloc_v2", &inner).leave(CUDA_ERROR_OUT_OF_MEMORY);
    cuMemAlloc_v2_params nowhere{nullptr, 64};
    Call("cuMemAlloc_v2", &nowhere).leave();
    cuMemcpyHtoDAsync_v2_params copy{0x7f0000001000, handle<void *>(0x5000), 4096, handle<CUstream>(0x9000)};
    Call("cuMemcpyHtoDAsync_v2", &copy).leave();
    cudaMemcpy2DAsync_v3020_params rows{handle<void *>(0x5000), 512, handle<void *>(0x7f0000001000), 256, 200, 3,
                                        cudaMemcpyDeviceToHost, handle<cudaStream_t>(0x9004)};
    Call("cudaMemcpy2DAsync", &rows).leave();
    cuMemsetD2D16Async_params set{0x7f0000001000, 512, 0xabcd, 10, 3, handle<CUstream>(0x9000)};
    Call("cuMemsetD2D16Async", &set).leave();
    cuMemFree_v2_params release{0x7f0000001000};
    Call("cuMemFree_v2", &release).leave();
}

static void texts() {
    CUfunction found = handle<CUfunction>(0x7f01);
    cuModuleGetFunction_params named{&found, handle<CUmodule>(0x3000), "_Z1fPi"};
    Call("cuModuleGetFunction", &named).leave();
    // The text's last byte is the last of a page, with nothing behind it.
    char *pages = static_cast<char *>(mmap(nullptr, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    munmap(pages + 4096, 4096);
    std::string longest(299, 'x');
    memcpy(pages + 4096 - 7, "at_end", 7);
    named.name = pages + 4096 - 7;
    Call("cuModuleGetFunction", &named).leave();
    named.name = longest.c_str();
    Call("cuModuleGetFunction", &named).leave();
    named.name = handle<const char *>(1);
    Call("cuModuleGetFunction", &named).leave(CUDA_ERROR_INVALID_VALUE);
}

static void cost(unsigned count) {
    cuLaunchKernel_params driver{handle<CUfunction>(0x7f01), 4, 5, 6, 128, 2, 1, 0, nullptr, nullptr, nullptr};
    for (const CallLayout *layout : {static_cast<const CallLayout *>(nullptr), table.find("cuLaunchKernel")}) {
        uint64_t begun_ns = monotonic_ns();
        for (unsigned at = 0; at < count; at++) {
            put_call_enter(channel, 1, 0, 0, 0, layout, &driver);
            put_call_exit(channel, 1, 0, layout, &driver);
        }
        printf("%.1f\n", double(monotonic_ns() - begun_ns) / count);
    }
}

int main(int count, char **arguments) {
    if (count < 2 || !channel.open() || !table.read()) return 3;
    if (strcmp(arguments[1], "cost") == 0) return cost(unsigned(atoi(arguments[2]))), 0;
    launches();
    memory();
    texts();
    int version = 0;
    cuDriverGetVersion_params unknown{&version};
    Call("cuFunctionOfTheFuture", &unknown).leave();
    cuInit_params init{3};
    Call("cuInit", &init).leave(CUDA_ERROR_NO_DEVICE);
}
