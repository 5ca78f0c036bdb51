// Kernels whose counters or stalls are known, for benchmarks/gpu_known.py.
//
//     gpu_known copy N       N copies of 4 GiB from one buffer to another: what DRAM reads and writes
//     gpu_known pulses N     N kernels of 0.1 to 0.2 ms on all SMs, with pauses: the edges of `SM active %`
//     gpu_known chase        loads that depend on one another, with 128 and with 512 multiplications after each
//     gpu_known barrier      blocks whose warps wait for one of them that works longer, by much and by little
//
// The last two print `KERNEL PERCENT`, the share of the warps' lives that they wait: by how much less they live without
// the load or the barrier.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(check_status));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

using Cycles = unsigned long long;
constexpr size_t COPIED = size_t(4) << 30;
constexpr int TURNS = 3, THREADS = 128;
constexpr unsigned WORDS = 1u << 28;  // of the chain of loads, 1 GiB: few are in a cache

__device__ Cycles now() {
    Cycles time;
    asm volatile("mov.u64 %0, %%clock64;" : "=l"(time)::"memory");
    return time;
}
// Adds a warp's life.
__device__ void lived(Cycles begin, Cycles *cycles) {
    if (threadIdx.x % 32 == 0) atomicAdd(cycles, now() - begin);
}
// Never so, which the compiler does not know.
__device__ void keep(float value, float *out) {
    if (value == -1.0f) *out = value;
}

__global__ void copy(float4 *to, const float4 *from, size_t count) {
    size_t stride = size_t(gridDim.x) * blockDim.x;
    for (size_t at = size_t(blockIdx.x) * blockDim.x + threadIdx.x; at < count; at += stride) to[at] = from[at];
}

__global__ void pulse(long cycles, float *out) {
    Cycles begin = now();
    float value = 1;
    while (long(now() - begin) < cycles) value = fmaf(value, 1.0001f, 1.0f);
    keep(value, out);
}

template <int MULTIPLICATIONS, bool LOADS>
__global__ void chase(const unsigned *next, int rounds, Cycles *cycles, float *out) {
    unsigned at = (blockIdx.x * blockDim.x + threadIdx.x) * 977u % WORDS;
    float value = at;
    Cycles begin = now();
    for (int round = 0; round < rounds; round++) {
        if (LOADS)
            asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(at) : "l"(next + at) : "memory");
        else
            asm volatile("mad.lo.u32 %0, %1, 1664525, 7;" : "=r"(at) : "r"(at));
        value += __uint_as_float(at & 0xffff);  // the multiplications wait for the load
#pragma unroll 16
        for (int step = 0; step < MULTIPLICATIONS; step++) value = fmaf(value, 1.0001f, 0.5f);
    }
    lived(begin, cycles);
    keep(value, out);
}

// The other warps do `SHORTER` multiplications, the first one 256.
template <int SHORTER, bool WAITS> __global__ void barrier(int rounds, Cycles *cycles, float *out) {
    float value = threadIdx.x;
    Cycles begin = now();
    for (int round = 0; round < rounds; round++) {
        int steps = threadIdx.x < 32 ? 256 : SHORTER;
#pragma unroll 8
        for (int step = 0; step < steps; step++) value = fmaf(value, 1.0001f, 0.5f);
        asm volatile("" : "+f"(value)::"memory");
        if (WAITS) __syncthreads();
    }
    lived(begin, cycles);
    keep(value, out);
}

static Cycles *cycles;
static float *out;
static int sms;

static void copies(int count) {
    float4 *from, *to;
    CHECK(cudaMalloc(&from, COPIED));
    CHECK(cudaMalloc(&to, COPIED));
    CHECK(cudaMemset(from, 1, COPIED));
    CHECK(cudaMemset(to, 1, COPIED));
    CHECK(cudaDeviceSynchronize());
    usleep(50'000);
    for (int turn = 0; turn < count; turn++) {
        copy<<<sms * 8, 512>>>(to, from, COPIED / sizeof *from);
        CHECK(cudaDeviceSynchronize());
        usleep(2000);
    }
}

static void pulses(int count) {
    for (int turn = 0; turn < count; turn++) {
        pulse<<<sms, 32>>>(1000 * (200 + turn % 7 * 30), out);
        CHECK(cudaDeviceSynchronize());
        usleep(1500 + turn % 11 * 37);
    }
}

template <typename Launch> static Cycles sum_of(Launch launch) {
    CHECK(cudaMemset(cycles, 0, sizeof *cycles));
    for (int turn = 0; turn < TURNS; turn++) launch();
    Cycles sum;
    CHECK(cudaMemcpy(&sum, cycles, sizeof sum, cudaMemcpyDeviceToHost));
    return sum;
}
template <typename With, typename Without> static void compare(const char *name, With with, Without without) {
    Cycles waiting = sum_of(with), not_waiting = sum_of(without);
    printf("%s %.2f\n", name, 100 - 100.0 * not_waiting / waiting);
}
template <int MULTIPLICATIONS> static void chases(const char *name, const unsigned *next, int rounds) {
    compare(
        name, [=] { chase<MULTIPLICATIONS, true><<<sms, THREADS>>>(next, rounds, cycles, out); },
        [=] { chase<MULTIPLICATIONS, false><<<sms, THREADS>>>(next, rounds, cycles, out); });
}
template <int SHORTER> static void barriers(const char *name) {
    compare(
        name, [] { barrier<SHORTER, true><<<sms, THREADS>>>(300'000, cycles, out); },
        [] { barrier<SHORTER, false><<<sms, THREADS>>>(300'000, cycles, out); });
}

int main(int count, char **arguments) {
    const char *what = count > 1 ? arguments[1] : "";
    int times = count > 2 ? atoi(arguments[2]) : 1;
    CHECK(cudaMalloc(&cycles, sizeof *cycles));
    CHECK(cudaMalloc(&out, sizeof *out));
    CHECK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    if (!strcmp(what, "copy")) copies(times);
    if (!strcmp(what, "pulses")) pulses(times);
    if (!strcmp(what, "chase")) {
        std::vector<unsigned> chain(WORDS);
        unsigned random = 1;
        for (unsigned &word : chain) random = random * 1664525u + 1013904223u, word = random >> 4;
        unsigned *next;
        CHECK(cudaMalloc(&next, WORDS * sizeof *next));
        CHECK(cudaMemcpy(next, chain.data(), WORDS * sizeof *next, cudaMemcpyHostToDevice));
        chases<128>("chase<128, true>", next, 300'000);
        chases<512>("chase<512, true>", next, 150'000);
    }
    if (!strcmp(what, "barrier")) {
        barriers<64>("barrier<64, true>");
        barriers<192>("barrier<192, true>");
    }
    CHECK(cudaDeviceSynchronize());
    return 0;
}
