// SPDX-License-Identifier: MIT
// The driver functions that the library calls, only from its own thread.
#pragma once
#include <cuda.h>
#include <dlfcn.h>

namespace tracepipe {

struct Driver {
    CUresult (*ctxPushCurrent)(CUcontext);
    CUresult (*ctxPopCurrent)(CUcontext *);
    CUresult (*streamCreate)(CUstream *, unsigned);
    CUresult (*streamSynchronize)(CUstream);
    CUresult (*memAlloc)(CUdeviceptr *, size_t);
    CUresult (*memcpyDtoHAsync)(void *, CUdeviceptr, size_t, CUstream);
    CUresult (*memsetD8Async)(CUdeviceptr, unsigned char, size_t, CUstream);
    CUresult (*memHostAlloc)(void **, size_t, unsigned);
    CUresult (*memHostGetDevicePointer)(CUdeviceptr *, void *, unsigned);
    CUresult (*moduleLoadData)(CUmodule *, const void *);
    CUresult (*moduleGetFunction)(CUfunction *, CUmodule, const char *);
    CUresult (*launchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream,
                             void **, void **);
    CUresult (*threadExchangeStreamCaptureMode)(CUstreamCaptureMode *);
    CUresult (*eventCreate)(CUevent *, unsigned);
    CUresult (*eventQuery)(CUevent);
    CUresult (*ctxRecordEvent)(CUcontext, CUevent);  // null before CUDA 12.5
    CUresult (*moduleGetGlobal)(CUdeviceptr *, size_t *, CUmodule, const char *);
    CUresult (*memcpyHtoDAsync)(CUdeviceptr, const void *, size_t, CUstream);
    CUresult (*deviceGetName)(char *, int, CUdevice);
    CUresult (*deviceGetUuid)(CUuuid *, CUdevice);
    CUresult (*deviceTotalMem)(size_t *, CUdevice);
    CUresult (*deviceGetAttribute)(int *, CUdevice_attribute, CUdevice);

    // Whether the loaded libcuda has every function that is needed.
    bool open() {
        void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
        if (!library) library = dlopen("libcuda.so.1", RTLD_NOW);
        if (!library) return false;
        bool all = true;
        auto find = [&](auto &function, const char *name) {
            function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
            all &= function != nullptr;
        };
        find(ctxPushCurrent, "cuCtxPushCurrent_v2");
        find(ctxPopCurrent, "cuCtxPopCurrent_v2");
        find(streamCreate, "cuStreamCreate");
        find(streamSynchronize, "cuStreamSynchronize");
        find(memAlloc, "cuMemAlloc_v2");
        find(memcpyDtoHAsync, "cuMemcpyDtoHAsync_v2");
        find(memsetD8Async, "cuMemsetD8Async");
        find(memHostAlloc, "cuMemHostAlloc");
        find(memHostGetDevicePointer, "cuMemHostGetDevicePointer_v2");
        find(moduleLoadData, "cuModuleLoadData");
        find(moduleGetFunction, "cuModuleGetFunction");
        find(launchKernel, "cuLaunchKernel");
        find(threadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode");
        find(deviceGetName, "cuDeviceGetName");
        find(deviceGetUuid, "cuDeviceGetUuid");
        find(deviceTotalMem, "cuDeviceTotalMem_v2");
        find(deviceGetAttribute, "cuDeviceGetAttribute");
        find(moduleGetGlobal, "cuModuleGetGlobal_v2");
        find(memcpyHtoDAsync, "cuMemcpyHtoDAsync_v2");
        find(eventCreate, "cuEventCreate");
        find(eventQuery, "cuEventQuery");
        bool are_needed = all;
        find(ctxRecordEvent, "cuCtxRecordEvent");
        return are_needed;
    }
};

inline Driver &driver() {
    static Driver functions;
    return functions;
}

// Makes a context current on the library's thread for a while.
//
// The calls of that thread must not invalidate a stream's capture on another thread. The driver treats the
// two as independent only if the thread's capture mode is relaxed. The mode can be set only after the driver
// is initialised, which it is when there is a context.
class Current {
  public:
    explicit Current(CUcontext context) : result(driver().ctxPushCurrent(context)) {
        static bool is_relaxed = false;
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        if (!is_relaxed) is_relaxed = driver().threadExchangeStreamCaptureMode(&mode) == CUDA_SUCCESS;
    }
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    ~Current() {
        CUcontext popped;
        if (result == CUDA_SUCCESS) driver().ctxPopCurrent(&popped);
    }
    const CUresult result;
};

}  // namespace tracepipe
