// Kernels that launch kernels. Built with -rdc=true; prints what was computed, and on standard error how many
// warps the parents and the children had.
#include <cstdio>

constexpr int LAUNCHES = 5, PARENTS = 4, CHILDREN = 3;

__global__ void child(unsigned *count) { atomicAdd(count, 1); }
__global__ void parent(unsigned *count) {
    if (threadIdx.x == 0) child<<<CHILDREN, 64>>>(count);
}

int main() {
    unsigned *count, value = 0;
    cudaMalloc(&count, sizeof value);
    cudaMemset(count, 0, sizeof value);
    for (int k = 0; k < LAUNCHES; k++) parent<<<PARENTS, 96>>>(count);
    cudaError_t status = cudaMemcpy(&value, count, sizeof value, cudaMemcpyDeviceToHost);
    printf("%u %s\n", value, cudaGetErrorString(status));
    fprintf(stderr, "warps %d children %d\n", LAUNCHES * PARENTS * 3, LAUNCHES * PARENTS * CHILDREN * 2);
}
