// Launches 200 kernels and waits for them, launches 50 that take a millisecond each, and ends as its argument says. With
// `fault`, one that writes where there is no memory follows the 200, and it ends with 3 if CUDA reports that.
#include <cstring>

#include "ends_standin.h"

__global__ void brief(int *out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1; }
__global__ void faulty(int *out) { out[threadIdx.x] = 1; }
__global__ void slow() {
    for (long long begun = clock64(); clock64() - begun < 1'500'000;) {}
}

int main(int, char **arguments) {
    int *out;
    if (cudaMalloc(&out, 1024 * sizeof *out) != cudaSuccess) return 1;
    for (int at = 0; at < 200; at++) brief<<<4, 256>>>(out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    if (!strcmp(arguments[1], "fault")) {
        faulty<<<1, 32>>>(nullptr);
        return cudaDeviceSynchronize() == cudaErrorIllegalAddress ? 3 : 1;
    }
    for (int at = 0; at < 50; at++) slow<<<1, 32>>>();
    end_by(arguments[1], [] {});
}
