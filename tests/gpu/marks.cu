// Kernels with marks, to be recorded: `marks NAME` prints what it computed, and on standard error how many warps
// it launched and what a mark took.
#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include <tracepipe/mark.h>

// The next file's kernels, which are a module of their own.
void second_module(float *out);

__device__ float spin(long long cycles, float x) {
    long long until = clock64() + cycles;
    while (clock64() < until) x = x * 0.5f + 1.0f;
    return x;
}
// Of each warp: a load of 2000 cycles, three products of 1000 with a wait of 500 in each, a store of 1000 from which
// its odd warps return early.
__global__ void marked(float *out) {
    float x = threadIdx.x;
    TRACEPIPE_MARK_BEGIN(load);
    x = spin(2000, x);
    TRACEPIPE_MARK_END(load);
    for (int k = 0; k < 3; k++) {
        TRACEPIPE_MARK_SCOPE(mma);
        x = spin(500, x);
        TRACEPIPE_MARK_BEGIN(wait);
        x = spin(500, x);
        TRACEPIPE_MARK_END(wait);
    }
    TRACEPIPE_MARK_SCOPE(Store_0123456);
    out[blockIdx.x * blockDim.x + threadIdx.x] = x * 0 + 1;
    if (threadIdx.x / 32 % 2) return;
    spin(1000, x);
}
// Lanes of a warp that mark on their own.
__global__ void apart(float *out) {
    if (threadIdx.x % 32 < 16) {
        TRACEPIPE_MARK_SCOPE(low);
        out[threadIdx.x] = spin(1000, 1) * 0 + 1;
    } else {
        TRACEPIPE_MARK_SCOPE(high);
        out[threadIdx.x] = spin(3000, 1) * 0 + 2;
    }
}
constexpr int MARKS = 256;
__global__ void many_marks(long long *cycles) {
    __syncthreads();
    long long begun = clock64();
#pragma unroll 1
    for (int k = 0; k < MARKS / 2; k++) {
        TRACEPIPE_MARK_BEGIN(one);
        TRACEPIPE_MARK_END(one);
    }
    if (threadIdx.x % 32 == 0)
        cycles[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = clock64() - begun;
}
__global__ void no_marks(long long *cycles) {
    __syncthreads();
    long long begun = clock64();
#pragma unroll 1
    for (int k = 0; k < MARKS / 2; k++) asm volatile("" ::: "memory");
    if (threadIdx.x % 32 == 0)
        cycles[(blockIdx.x * blockDim.x + threadIdx.x) / 32] = clock64() - begun;
}
static double median(std::vector<long long> values) {
    std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
    return double(values[values.size() / 2]);
}
// Cycles of a mark, where a warp is alone on its SM and where there are 64.
static void cost() {
    for (int threads : {32, 1024}) {
        int blocks = threads == 32 ? 132 : 264, warps = blocks * threads / 32;
        long long *cycles;
        cudaMallocManaged(&cycles, warps * sizeof *cycles);
        double took[2];
        for (int marked = 0; marked < 2; marked++) {
            for (int round = 0; round < 3; round++) {
                marked ? many_marks<<<blocks, threads>>>(cycles) : no_marks<<<blocks, threads>>>(cycles);
                cudaDeviceSynchronize();
            }
            took[marked] = median({cycles, cycles + warps});
        }
        fprintf(stderr, "cycles a mark, %d on an SM: %.2f\n", threads / 32 * blocks / 132, (took[1] - took[0]) / MARKS);
    }
}
static void ranges() {
    const int blocks = 264, threads = 256, launches = 5, count = blocks * threads;
    float *out, sum = 0;
    cudaMallocManaged(&out, count * sizeof *out);
    for (int launch = 0; launch < launches; launch++) marked<<<blocks, threads>>>(out);
    cudaDeviceSynchronize();
    for (int at = 0; at < count; at++) sum += out[at];
    apart<<<1, 64>>>(out);
    second_module(out);
    cudaDeviceSynchronize();
    printf("%g %g %g %s\n", sum, out[0], out[63], cudaGetErrorString(cudaGetLastError()));
    fprintf(stderr, "warps %d\n", launches * count / 32 + 2 + 1);
}
// The kernel's first launch is by a graph.
static void graph() {
    const int blocks = 4, threads = 64, launches = 2, count = blocks * threads;
    float *out, sum = 0;
    cudaMallocManaged(&out, count * sizeof *out);
    cudaStream_t stream;
    cudaGraph_t made;
    cudaGraphExec_t graph;
    cudaStreamCreate(&stream);
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed);
    marked<<<blocks, threads, 0, stream>>>(out);
    cudaStreamEndCapture(stream, &made);
    cudaGraphInstantiate(&graph, made, 0);
    for (int launch = 0; launch < launches; launch++) cudaGraphLaunch(graph, stream);
    cudaDeviceSynchronize();
    for (int at = 0; at < count; at++) sum += out[at];
    printf("%g %s\n", sum, cudaGetErrorString(cudaGetLastError()));
    fprintf(stderr, "warps %d\n", launches * count / 32);
}
int main(int, char **arguments) {
    if (!strcmp(arguments[1], "cost")) cost();
    if (!strcmp(arguments[1], "ranges")) ranges();
    if (!strcmp(arguments[1], "graph")) graph();
}
