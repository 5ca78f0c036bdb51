__global__ void add(const float *a, float *b) {
    __shared__ float s[64];
    s[threadIdx.x] = a[threadIdx.x];
    __syncthreads();
    b[threadIdx.x] = s[63 - threadIdx.x];
}
namespace ns { template <class T> __global__ void scale(T *x, T by) { x[threadIdx.x] *= by; } }
template __global__ void ns::scale<double>(double *, double);
