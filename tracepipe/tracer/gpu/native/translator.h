// SPDX-License-Identifier: MIT
// Translates CUPTI's activity records into those of the channel.
#pragma once
#include <cstring>
#include <cupti.h>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "demangle.h"
#include "kept_layouts.h"
#include "transport.h"

namespace tracepipe {

constexpr size_t BATCH_BYTES = 1 << 16;

// Records of one kind, sent when a batch is full and when a buffer is done.
template <typename Record> class Batch {
  public:
    Batch(Channel &channel, uint16_t kind) : channel_(channel), kind_(kind) { records_.reserve(BATCH_BYTES / sizeof(Record)); }
    void add(const Record &record) {
        records_.push_back(record);
        if (records_.size() == BATCH_BYTES / sizeof(Record)) send();
    }
    void send() {
        if (!records_.empty())
            channel_.put(kind_, records_.data(), records_.size() * sizeof(Record), {}, records_.size());
        records_.clear();
    }

  private:
    Channel &channel_;
    uint16_t kind_;
    std::vector<Record> records_;
};

// Translates CUPTI's buffers. CUPTI may return them on several threads; one at a time is translated.
class Translator {
  public:
    explicit Translator(Channel &channel) : channel_(channel) {}

    // Sends the records of a buffer. In `kept`, which outlives the process, it notes up to where they are sent.
    void translate(uint8_t *buffer, size_t bytes, KeptBuffer *kept) {
        std::lock_guard lock(mutex_);
        CUpti_Activity *activity = nullptr;
        for (size_t at = 0; cuptiActivityGetNextRecord(buffer, bytes, &activity) == CUPTI_SUCCESS; at++) {
            if (kept && at % SENT_AT_ONCE == SENT_AT_ONCE - 1) {
                send();
                kept->sent = uint64_t(reinterpret_cast<uint8_t *>(activity) - buffer);
            }
            take(activity);
        }
        send();
    }

    // Sends everything again, as a new capture has nothing of what was sent to an earlier one.
    void begin_anew() {
        std::lock_guard lock(mutex_);
        names_.clear();
        put_layouts(channel_);
    }

  private:
    void send() {
        kernels_.send();
        copies_.send();
        sets_.send();
        memory_.send();
    }
    void take(const CUpti_Activity *activity) {
        switch (activity->kind) {
        case CUPTI_ACTIVITY_KIND_KERNEL:
        case CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL:
            return take(*reinterpret_cast<const CuptiKernel *>(activity));
        case CUPTI_ACTIVITY_KIND_MEMCPY: {
            auto &copy = *reinterpret_cast<const CuptiCopy *>(activity);
            return take_copy(copy, copy.deviceId);
        }
        case CUPTI_ACTIVITY_KIND_MEMCPY2: {
            auto &copy = *reinterpret_cast<const CuptiPeerCopy *>(activity);
            return take_copy(copy, copy.dstDeviceId);
        }
        case CUPTI_ACTIVITY_KIND_MEMSET:
            return take(*reinterpret_cast<const CuptiSet *>(activity));
        case CUPTI_ACTIVITY_KIND_MEMORY2:
            return take(*reinterpret_cast<const CuptiMemory *>(activity));
        default:
            return;
        }
    }

    void take(const CuptiKernel &from) {
        Kernel to{};
        to.start_ns = from.start, to.end_ns = from.end;
        to.name = name_of(from.name ? from.name : "kernel without a name");
        to.graph_node = from.graphNodeId, to.graph = from.graphId;
        to.gpu = from.deviceId, to.context = from.contextId, to.stream = from.streamId;
        to.correlation = from.correlationId;
        const int32_t grid[] = {from.gridX, from.gridY, from.gridZ};
        const int32_t block[] = {from.blockX, from.blockY, from.blockZ};
        const uint32_t cluster[] = {from.clusterX, from.clusterY, from.clusterZ};
        for (int axis = 0; axis < 3; axis++) {
            to.grid[axis] = uint32_t(grid[axis]);
            to.block[axis] = uint32_t(block[axis]);
            to.cluster[axis] = cluster[axis];
        }
        to.static_shared_bytes = uint32_t(from.staticSharedMemory);
        to.dynamic_shared_bytes = uint32_t(from.dynamicSharedMemory);
        to.registers = from.registersPerThread;
        // Otherwise the driver chooses what the kernel needs, which is no limit.
        if (from.isSharedMemoryCarveoutRequested) to.shared_config_bytes = from.sharedMemoryExecuted;
        to.clusters = from.maxActiveClusters;
#if CUPTI_API_VERSION >= 130000
        to.is_device_launched = from.isDeviceLaunched;
#endif
        kernels_.add(to);
    }

    template <typename Record> void take_copy(const Record &from, uint32_t to_gpu) {
        Copy to{};
        to.start_ns = from.start, to.end_ns = from.end, to.size_bytes = from.bytes;
        to.graph_node = from.graphNodeId, to.graph = from.graphId;
        to.gpu = from.deviceId, to.context = from.contextId, to.stream = from.streamId;
        to.correlation = from.correlationId, to.to_gpu = to_gpu;
        to.direction = from.copyKind, to.from_kind = from.srcKind, to.to_kind = from.dstKind;
        to.flags = from.flags;
        copies_.add(to);
    }

    void take(const CuptiSet &from) {
        Set to{};
        to.start_ns = from.start, to.end_ns = from.end, to.size_bytes = from.bytes;
        to.graph_node = from.graphNodeId, to.graph = from.graphId;
        to.gpu = from.deviceId, to.context = from.contextId, to.stream = from.streamId;
        to.correlation = from.correlationId, to.value = from.value, to.memory_kind = from.memoryKind;
        sets_.add(to);
    }

    // What a call took or gave back: not the variables that a module has from its start on.
    void take(const CuptiMemory &from) {
        bool is_known = from.memoryOperationType == CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_ALLOCATION ||
                        from.memoryOperationType == CUPTI_ACTIVITY_MEMORY_OPERATION_TYPE_RELEASE;
        if (!is_known || (from.memoryKind != CUPTI_ACTIVITY_MEMORY_KIND_PINNED &&
                          from.memoryKind != CUPTI_ACTIVITY_MEMORY_KIND_DEVICE &&
                          from.memoryKind != CUPTI_ACTIVITY_MEMORY_KIND_MANAGED))
            return;
        memory_.add({from.timestamp, from.bytes, from.address, from.deviceId, from.contextId, from.streamId,
                     from.correlationId, uint32_t(from.memoryOperationType), uint32_t(from.memoryKind)});
    }

    // A name stays at its address while its module is loaded; later another may be there.
    uint64_t name_of(const char *name) {
        auto &known = names_[name];
        if (known.first != name) {
            std::string text = demangled(name);
            if (text.size() > channel_.payload_limit() / 2) text.resize(channel_.payload_limit() / 2);
            uint64_t id = reinterpret_cast<uint64_t>(name) | ++names_sent_ << 48;
            if (!channel_.put(KIND_NAME, &id, sizeof id, text, 0)) return id;  // sent with the next kernel
            known = {name, id};
        }
        return known.second;
    }

    static constexpr size_t SENT_AT_ONCE = 1024;

    Channel &channel_;
    std::mutex mutex_;
    std::unordered_map<const char *, std::pair<std::string, uint64_t>> names_;
    uint64_t names_sent_ = 0;
    Batch<Kernel> kernels_{channel_, KIND_KERNEL};
    Batch<Copy> copies_{channel_, KIND_COPY};
    Batch<Set> sets_{channel_, KIND_SET};
    Batch<Memory> memory_{channel_, KIND_MEMORY};
};

}  // namespace tracepipe
