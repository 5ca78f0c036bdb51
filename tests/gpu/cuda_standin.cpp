// The libcuda.so.1 of cupti_standin.cpp: it has a GPU of compute capability 9.0 when the program says so.
#include <cstring>

#include <cuda.h>
#undef cuDeviceGetUuid

extern "C" {
int standin_driver_version(int *version);
int standin_has_gpu();
CUresult cuDriverGetVersion(int *version) { return CUresult(standin_driver_version(version)); }
CUresult cuDeviceGetName(char *name, int, CUdevice device) {
    if (!standin_has_gpu()) return CUDA_ERROR_NOT_INITIALIZED;
    if (device) return CUDA_ERROR_INVALID_DEVICE;
    strcpy(name, "NVIDIA H200");
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice) { return memset(uuid, 1, sizeof *uuid), CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR: *value = 2048; break;
    case CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = 233472; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}
}
