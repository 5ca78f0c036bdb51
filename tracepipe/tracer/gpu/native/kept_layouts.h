// SPDX-License-Identifier: MIT
// How CUPTI's records become those of the channel, for the capture process: see Layout of kernel_records.h.
//
// CUPTI adds a record to a buffer when a kernel is launched, and its times later: until then the highest bit of
// its kind is set. Each record follows the one before it, at a multiple of 8 bytes. The rest of a buffer is zero.
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

// A call in its thread's buffer, which the library fills itself. No kind of CUPTI has this number.
constexpr uint32_t KEPT_CALL = 1 << 16;
struct KeptCall {
    uint32_t kind, zero;
    Call call;
};

template <typename From, typename To>
void put_layout(Channel &channel, uint32_t from, KernelKind kind, const To &record,
                std::initializer_list<Field> fields) {
    Layout layout{from, uint32_t((sizeof(From) + 7) / 8 * 8), kind, sizeof record};
    std::string rest(reinterpret_cast<const char *>(&record), sizeof record);
    rest.append(reinterpret_cast<const char *>(fields.begin()), fields.size() * sizeof(Field));
    channel.put(KIND_LAYOUT, &layout, sizeof layout, rest, 0);
}

inline void put_layouts(Channel &channel) {
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
    put_layout<KeptCall>(channel, KEPT_CALL, KIND_CALL, Call{}, {{offsetof(KeptCall, call), 0, sizeof(Call), 0}});
#undef WORK
#undef FIELD
}

}  // namespace tracepipe
