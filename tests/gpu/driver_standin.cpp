// The libcuda.so.1 of sanitizer_standin.cpp: a GPU's memory is the host's, and nothing runs there.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <cuda.h>
#undef cuDeviceGetUuid

static std::atomic<bool> is_initialized{false};
static thread_local CUstreamCaptureMode thread_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

extern "C" {
void standin_asked_for_idle();
int standin_is_idle();
void standin_allocates(bool is_relaxed);
CUresult cuCtxPushCurrent_v2(CUcontext) { return is_initialized = true, CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext *) { return CUDA_SUCCESS; }
CUresult cuStreamCreate(CUstream *, unsigned) { return CUDA_SUCCESS; }
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuMemAlloc_v2(CUdeviceptr *memory, size_t bytes) {
    standin_allocates(thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED);
    *memory = reinterpret_cast<CUdeviceptr>(aligned_alloc(4096, bytes));
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync_v2(void *to, CUdeviceptr from, size_t bytes, CUstream) {
    memcpy(to, reinterpret_cast<void *>(from), bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemsetD8Async(CUdeviceptr memory, unsigned char value, size_t bytes, CUstream) {
    memset(reinterpret_cast<void *>(memory), value, bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void **memory, size_t bytes, unsigned) {
    *memory = malloc(bytes);
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr *, void *, unsigned) { return CUDA_ERROR_NOT_SUPPORTED; }
// The buffer of the module with marks is the program's.
extern char standin_marks[24];
CUresult cuModuleGetGlobal_v2(CUdeviceptr *at, size_t *bytes, CUmodule, const char *name) {
    if (!strstr(name, "tracepipe_marks")) return CUDA_ERROR_NOT_FOUND;
    *at = reinterpret_cast<CUdeviceptr>(standin_marks), *bytes = sizeof standin_marks;
    return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void *from, size_t bytes, CUstream) {
    memcpy(reinterpret_cast<void *>(to), from, bytes);
    return CUDA_SUCCESS;
}
CUresult cuModuleLoadData(CUmodule *, const void *) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *) { return CUDA_ERROR_NOT_SUPPORTED; }
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                        void **, void **) {
    return CUDA_ERROR_NOT_SUPPORTED;
}
CUresult cuEventCreate(CUevent *, unsigned) { return CUDA_SUCCESS; }
CUresult cuCtxRecordEvent(CUcontext, CUevent) { return standin_asked_for_idle(), CUDA_SUCCESS; }
CUresult cuEventQuery(CUevent) { return standin_is_idle() ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode) {
    if (!is_initialized) return CUDA_ERROR_NOT_INITIALIZED;
    std::swap(*mode, thread_mode);
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetName(char *name, int, CUdevice) { return *name = 0, CUDA_SUCCESS; }
CUresult cuDeviceGetUuid(CUuuid *, CUdevice) { return CUDA_SUCCESS; }
CUresult cuDeviceTotalMem_v2(size_t *bytes, CUdevice) { return *bytes = 1 << 20, CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute, CUdevice) { return *value = 1, CUDA_SUCCESS; }
}
