// Captures streams while other threads use CUDA, and counts the captures that fail.
//
//     captures MODE WITH SECONDS CUBIN
//
// MODE: global, thread or relaxed. WITH has a letter for each other thread: `l` launches, `m` allocates, `u` loads the
// cubin, launches its kernel and unloads it, in relaxed mode as all these threads are, and `U`
// in the mode that a thread has at first. What a thread's own calls return then is counted, and not taken for a
// failure of the captures. Prints `captures N failed N first ERROR modules N refused N`.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda.h>
#include <dlfcn.h>
#include <thread>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(check_status));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

__global__ void add(unsigned *count) { atomicAdd(count, 1); }

static std::atomic<bool> is_over{false};
static std::atomic<unsigned> modules{0}, refused{0};

static cudaStream_t stream() {
    cudaStream_t made;
    CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
}
static void try_to(cudaError_t status) { refused += status != cudaSuccess; }
static void try_to(CUresult status) { refused += status != CUDA_SUCCESS; }

static void launches(unsigned *count) {
    for (cudaStream_t on = stream(); !is_over;) {
        for (int k = 0; k < 100; k++) add<<<1, 32, 0, on>>>(count);
        try_to(cudaStreamSynchronize(on));
    }
}
static void allocates() {
    while (!is_over) {
        void *memory = nullptr;
        try_to(cudaMalloc(&memory, 1 << 16));
        try_to(cudaFree(memory));
    }
}
// A function of the driver, which is not linked to: a machine may have it without the file that a linker needs.
#define FOUND(function) reinterpret_cast<decltype(&function)>(dlsym(dlopen("libcuda.so.1", RTLD_NOW), #function))
static void loads(const char *cubin, unsigned *count) {
    auto load = FOUND(cuModuleLoad);
    auto get = FOUND(cuModuleGetFunction);
    auto launch = FOUND(cuLaunchKernel);
    auto synchronize = FOUND(cuStreamSynchronize);
    auto unload = FOUND(cuModuleUnload);
    for (cudaStream_t on = stream(); !is_over;) {
        CUmodule module;
        CUfunction function;
        CUresult status = load(&module, cubin);
        try_to(status);
        if (status != CUDA_SUCCESS) continue;
        modules++;
        void *arguments[] = {&count};
        try_to(get(&function, module, "other"));
        try_to(launch(function, 1, 1, 1, 32, 1, 1, 0, on, arguments, nullptr));
        try_to(synchronize(on));
        try_to(unload(module));
    }
}

int main(int argument_count, char **arguments) {
    if (argument_count != 5) return 2;
    const char *mode = arguments[1], *cubin = arguments[4];
    cudaStreamCaptureMode capture_mode = strcmp(mode, "global") == 0   ? cudaStreamCaptureModeGlobal
                                         : strcmp(mode, "thread") == 0 ? cudaStreamCaptureModeThreadLocal
                                                                       : cudaStreamCaptureModeRelaxed;
    unsigned *count;
    CHECK(cudaMalloc(&count, sizeof *count));
    add<<<1, 32>>>(count);
    CHECK(cudaDeviceSynchronize());
    std::vector<std::thread> threads;
    for (const char *with = arguments[2]; *with; with++)
        threads.emplace_back([=] {
            CHECK(cudaSetDevice(0));
            cudaStreamCaptureMode relaxed = cudaStreamCaptureModeRelaxed;
            if (*with != 'U') CHECK(cudaThreadExchangeStreamCaptureMode(&relaxed));
            if (*with == 'l') launches(count);
            if (*with == 'm') allocates();
            if (*with == 'u' || *with == 'U') loads(cubin, count);
        });
    unsigned captures = 0, failed = 0;
    cudaError_t first = cudaSuccess;
    cudaStream_t on = stream();
    auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(int(1000 * atof(arguments[3])));
    for (; std::chrono::steady_clock::now() < end; captures++) {
        cudaGraph_t graph = nullptr;
        CHECK(cudaStreamBeginCapture(on, capture_mode));
        for (int k = 0; k < 8; k++) add<<<1, 32, 0, on>>>(count);
        cudaError_t launched = cudaGetLastError(), status = cudaStreamEndCapture(on, &graph);
        if (status == cudaSuccess) CHECK(cudaGraphDestroy(graph));
        if (launched == cudaSuccess) launched = status;
        if (launched == cudaSuccess) continue;
        failed++;
        if (first == cudaSuccess) first = launched;
        cudaGetLastError();
    }
    is_over = true;
    for (auto &thread : threads) thread.join();
    printf("captures %u failed %u first %d modules %u refused %u\n", captures, failed, int(first), modules.load(),
           refused.load());
}
