// SPDX-License-Identifier: MIT
// How CUPTI's records become those of the channel, for the capture process: see Layout of kernel_records.h.
//
// CUPTI adds a record to a buffer when a call returns or a kernel is launched, and later the times of the kernel.
// Each record follows the one before it, at a multiple of 8 bytes. The rest of a buffer is zero.
#pragma once
#include <cstddef>
#include <cupti.h>
#include <initializer_list>
#include <string>

#include "kernel_records.h"
#include "transport.h"

namespace tracepipe {

#if CUPTI_API_VERSION >= 130000
using CuptiKernel = CUpti_ActivityKernel10;
#elif CUPTI_API_VERSION >= 26
using CuptiKernel = CUpti_ActivityKernel9;
#else
#error "CUPTI of CUDA 12.8 or later is needed"
#endif
using CuptiCopy = CUpti_ActivityMemcpy6;
using CuptiPeerCopy = CUpti_ActivityMemcpyPtoP4;
using CuptiSet = CUpti_ActivityMemset4;
using CuptiMemory = CUpti_ActivityMemory4;
using CuptiDevice = CUpti_ActivityDevice5;
using CuptiWait = CUpti_ActivitySynchronization;  // its successors only add members
using CuptiEvent = CUpti_ActivityCudaEvent;

template <typename From, typename To>
void put_layout(Channel &channel, CUpti_ActivityKind from, KernelKind kind, const To &record,
                std::initializer_list<Field> fields) {
    Layout layout{from, uint32_t((sizeof(From) + 7) / 8 * 8), kind, sizeof record};
    std::string rest(reinterpret_cast<const char *>(&record), sizeof record);
    rest.append(reinterpret_cast<const char *>(fields.begin()), fields.size() * sizeof(Field));
    channel.put(KIND_LAYOUT, &layout, sizeof layout, rest, 0);
}

inline void put_layouts(Channel &channel) {
    auto skip = [&](CUpti_ActivityKind kind, auto record) { put_layout<decltype(record)>(channel, kind, KernelKind(0), uint64_t(0), {}); };
    skip(CUPTI_ACTIVITY_KIND_DEVICE, CuptiDevice{});
#if CUPTI_API_VERSION >= 130000
    skip(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, CUpti_ActivitySynchronization2{});
    skip(CUPTI_ACTIVITY_KIND_CUDA_EVENT, CUpti_ActivityCudaEvent2{});
#else
    skip(CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, CuptiWait{});
    skip(CUPTI_ACTIVITY_KIND_CUDA_EVENT, CuptiEvent{});
#endif
#define FIELD(from, to)                                                                   \
    Field {                                                                               \
        offsetof(From, from), offsetof(To, to),                                           \
            uint16_t(std::min(sizeof(From::from), sizeof(To::to))), 0                     \
    }
#define WORK                                                                                                          \
    FIELD(start, start_ns), FIELD(end, end_ns), FIELD(graphNodeId, graph_node), FIELD(graphId, graph),                \
        FIELD(deviceId, gpu), FIELD(contextId, context), FIELD(streamId, stream), FIELD(correlationId, correlation)
    {
        using From = CuptiKernel;
        using To = Kernel;
        for (auto kind : {CUPTI_ACTIVITY_KIND_KERNEL, CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL})
            put_layout<From>(channel, kind, KIND_KERNEL, To{},
                             {WORK, FIELD(name, name), FIELD(gridX, grid[0]), FIELD(gridY, grid[1]), FIELD(gridZ, grid[2]),
                              FIELD(blockX, block[0]), FIELD(blockY, block[1]), FIELD(blockZ, block[2]),
                              FIELD(clusterX, cluster[0]), FIELD(clusterY, cluster[1]), FIELD(clusterZ, cluster[2]),
                              FIELD(staticSharedMemory, static_shared_bytes),
                              FIELD(dynamicSharedMemory, dynamic_shared_bytes), FIELD(registersPerThread, registers)});
    }
    {
        using From = CuptiCopy;
        using To = Copy;
        put_layout<From>(channel, CUPTI_ACTIVITY_KIND_MEMCPY, KIND_COPY, To{},
                         {WORK, FIELD(bytes, size_bytes), FIELD(deviceId, to_gpu), FIELD(copyKind, direction),
                          FIELD(srcKind, from_kind), FIELD(dstKind, to_kind), FIELD(flags, flags)});
    }
    {
        using From = CuptiPeerCopy;
        using To = Copy;
        put_layout<From>(channel, CUPTI_ACTIVITY_KIND_MEMCPY2, KIND_COPY, To{},
                         {WORK, FIELD(bytes, size_bytes), FIELD(dstDeviceId, to_gpu), FIELD(copyKind, direction),
                          FIELD(srcKind, from_kind), FIELD(dstKind, to_kind), FIELD(flags, flags)});
    }
    {
        using From = CuptiSet;
        using To = Set;
        put_layout<From>(channel, CUPTI_ACTIVITY_KIND_MEMSET, KIND_SET, To{},
                         {WORK, FIELD(bytes, size_bytes), FIELD(value, value), FIELD(memoryKind, memory_kind)});
    }
    {
        using From = CuptiMemory;
        using To = Memory;
        put_layout<From>(channel, CUPTI_ACTIVITY_KIND_MEMORY2, KIND_MEMORY, To{},
                         {FIELD(timestamp, time_ns), FIELD(bytes, size_bytes), FIELD(address, address),
                          FIELD(deviceId, gpu), FIELD(contextId, context), FIELD(streamId, stream),
                          FIELD(correlationId, correlation), FIELD(memoryOperationType, operation),
                          FIELD(memoryKind, memory_kind)});
    }
    for (bool is_driver : {false, true}) {
        using From = CUpti_ActivityAPI;
        using To = Call;
        To call{};
        call.domain = is_driver ? CUPTI_CB_DOMAIN_DRIVER_API : CUPTI_CB_DOMAIN_RUNTIME_API;
        call.context = call.stream = call.event = ~0u;
        put_layout<From>(channel, is_driver ? CUPTI_ACTIVITY_KIND_DRIVER : CUPTI_ACTIVITY_KIND_RUNTIME, KIND_CALL, call,
                         {FIELD(start, start_ns), FIELD(end, end_ns), FIELD(cbid, cbid), FIELD(threadId, tid),
                          FIELD(correlationId, correlation), FIELD(returnValue, result)});
    }
#undef WORK
#undef FIELD
}

}  // namespace tracepipe
