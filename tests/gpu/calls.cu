// Kernels that call device functions, to be recorded: `calls NAME` prints what it computed, and on standard error how
// many warps it launched and how often each function was begun, by a warp or by lanes of one that had parted.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

enum Function { OUTER, INNER, TREE, LOW, HIGH, SOME, POINTED, LEAVES, FUNCTIONS };
const char *const NAMES[] = {"outer", "inner", "tree", "low", "high", "some", "pointed", "leaves"};

__device__ unsigned long long called[FUNCTIONS];

// The lowest lane of those that are there counts.
__device__ __forceinline__ void count(Function function) {
    unsigned mask = __activemask();
    if (threadIdx.x % 32 == __ffs(mask) - 1) atomicAdd(&called[function], 1ull);
}
__device__ __noinline__ float inner(float x) {
    count(INNER);
    return x * 0.5f + 1.0f;
}
__device__ __noinline__ float outer(float x) {
    count(OUTER);
    for (int k = 0; k < 3; k++) x = inner(x) + k;
    return x;
}
// Each lane goes as deep as it should.
__device__ __noinline__ float tree(float x, int depth) {
    count(TREE);
    if (depth == 0) return x;
    return tree(x + 1, depth - 1) + tree(x * 0.5f, depth - 1);
}
__device__ __noinline__ float low(float x) {
    count(LOW);
    return inner(x) + 1;
}
__device__ __noinline__ float high(float x) {
    count(HIGH);
    return x > 1e30f ? 0 : x * 3;
}
// Lanes come back on their own.
__device__ __noinline__ float some(float x, int rounds) {
    count(SOME);
    for (int k = 0; k < rounds; k++) {
        x = x * 0.5f + 1;
        if (x < k) return inner(x);
    }
    if (rounds % 2) return x;
    return inner(x + 1);
}
__device__ __noinline__ float pointed(float x) {
    count(POINTED);
    return x + 7;
}
__device__ __noinline__ void leaves(float *out, float x) {
    count(LEAVES);
    *out = x;
    if (threadIdx.x % 32 >= 24) asm volatile("exit;");
}
__device__ float (*pointers[2])(float) = {pointed, high};

__global__ void nested(float *out) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    out[at] = outer(at) + inner(at);
}
__global__ void recursive(float *out) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    out[at] = tree(at, threadIdx.x % 4);
}
__global__ void apart(float *out) {
    int at = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x % 32;
    float x = at;
    if (lane < 12) x = low(x);
    else if (lane < 20) x = high(x);
    for (int k = 0; k < lane % 3; k++) x = inner(x);
    out[at] = some(x, lane % 5);
}
__global__ void pointing(float *out, int which) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    out[at] = pointers[(which + at / 32) % 2](at);
}
__global__ void leaving(float *out) {
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    leaves(out + at, at);
    out[at] += 1;
}
__device__ __noinline__ float plain(float x) { return x > 1e30f ? 0 : x * 3; }
constexpr int CALLS = 128;
__global__ void many_calls(float *out, long long *cycles) {
    float x = threadIdx.x;
    __syncthreads();
    long long begun = clock64();
#pragma unroll 1
    for (int k = 0; k < CALLS; k++) x = plain(x);
    if (threadIdx.x % 32 == 0) cycles[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = clock64() - begun;
    out[blockIdx.x * blockDim.x + threadIdx.x] = x;
}
// Cycles of a call and its return, where a warp is alone on its SM and where there are 64.
static void cost() {
    for (int threads : {32, 1024}) {
        int blocks = threads == 32 ? 132 : 264, warps = blocks * threads / 32;
        long long *cycles;
        float *out;
        cudaMallocManaged(&cycles, warps * sizeof *cycles);
        cudaMallocManaged(&out, blocks * threads * sizeof *out);
        for (int round = 0; round < 3; round++) {
            many_calls<<<blocks, threads>>>(out, cycles);
            cudaDeviceSynchronize();
        }
        std::vector<long long> values(cycles, cycles + warps);
        std::nth_element(values.begin(), values.begin() + warps / 2, values.end());
        fprintf(stderr, "cycles a call, %d on an SM: %.1f\n", threads / 32 * blocks / 132, double(values[warps / 2]) / CALLS);
    }
}
static void cases(const char *name) {
    const int blocks = 4, threads = 80, all = blocks * threads;
    float *out;
    cudaMallocManaged(&out, all * sizeof *out);
    memset(out, 0, all * sizeof *out);
    auto is = [&](const char *what) { return !strcmp(name, what); };
    for (int launch = 0; launch < 2; launch++) {
        if (is("nested")) nested<<<blocks, threads>>>(out);
        if (is("recursive")) recursive<<<blocks, threads>>>(out);
        if (is("apart")) apart<<<blocks, threads>>>(out);
        if (is("pointing")) pointing<<<blocks, threads>>>(out, launch);
        if (is("leaving")) leaving<<<blocks, threads>>>(out);
    }
    cudaDeviceSynchronize();
    double sum = 0;
    for (int at = 0; at < all; at++) sum += out[at];
    unsigned long long counts[FUNCTIONS];
    cudaMemcpyFromSymbol(counts, called, sizeof counts);
    printf("%.9g %s\n", sum, cudaGetErrorString(cudaGetLastError()));
    for (int at = 0; at < FUNCTIONS; at++)
        if (counts[at]) fprintf(stderr, "%s=%llu ", NAMES[at], counts[at]);
    fprintf(stderr, "warps %d\n", 2 * blocks * ((threads + 31) / 32));
}
int main(int, char **arguments) {
    strcmp(arguments[1], "cost") ? cases(arguments[1]) : cost();
}
