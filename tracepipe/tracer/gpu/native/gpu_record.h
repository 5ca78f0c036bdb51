// SPDX-License-Identifier: MIT
// The record of a GPU, with what the driver reports about it.
#pragma once
#include <cstring>

#include "driver.h"
#include "transport.h"

namespace tracepipe {

constexpr uint32_t WARP_THREADS = 32;

// Whether the driver can be asked about GPUs.
inline bool has_device_functions() {
    static const bool has = (driver().open(), driver().deviceGetName && driver().deviceGetUuid && driver().deviceGetAttribute);
    return has;
}

// Puts KIND_GPU for a device of this process; false if there is no device with that number, or CUDA has not begun.
inline bool put_gpu(Channel &channel, CUdevice device) {
    GpuHead gpu{};
    CUuuid uuid{};
    char name[256] = "";
    int value = 0;
    auto ask = [&](CUdevice_attribute attribute) {
        value = 0;
        driver().deviceGetAttribute(&value, attribute, device);
        return uint32_t(value);
    };
    if (driver().deviceGetName(name, sizeof name - 1, device) != CUDA_SUCCESS) return false;
    gpu.index = uint32_t(device);
    gpu.sms = ask(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
    gpu.major = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
    gpu.minor = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
    gpu.clock_khz = ask(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
    gpu.warps = ask(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR) / WARP_THREADS;
    gpu.blocks = ask(CU_DEVICE_ATTRIBUTE_MAX_BLOCKS_PER_MULTIPROCESSOR);
    gpu.registers = ask(CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_MULTIPROCESSOR);
    gpu.shared_bytes = ask(CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR);
    gpu.reserved_bytes = ask(CU_DEVICE_ATTRIBUTE_RESERVED_SHARED_MEMORY_PER_BLOCK);
    driver().deviceGetUuid(&uuid, device);
    memcpy(gpu.uuid, uuid.bytes, sizeof gpu.uuid);
    return channel.put(KIND_GPU, &gpu, sizeof gpu, name, 0);
}

}  // namespace tracepipe
