// Launches 200 kernels and waits for them, launches 50 that take a millisecond each, and ends as its argument says.
#include "ends_standin.h"

__global__ void brief(int *out) { out[blockIdx.x * blockDim.x + threadIdx.x] = 1; }
__global__ void slow() {
    for (long long begun = clock64(); clock64() - begun < 1'500'000;) {}
}

int main(int, char **arguments) {
    int *out;
    if (cudaMalloc(&out, 1024 * sizeof *out) != cudaSuccess) return 1;
    for (int at = 0; at < 200; at++) brief<<<4, 256>>>(out);
    if (cudaDeviceSynchronize() != cudaSuccess) return 1;
    for (int at = 0; at < 50; at++) slow<<<1, 32>>>();
    end_by(arguments[1], [] {});
}
