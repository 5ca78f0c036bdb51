// SPDX-License-Identifier: MIT
// A GPU's memory for marks, either of kernels or of calls, and the modules that have its address.
#pragma once
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <unordered_map>

#include <sanitizer.h>

#include "driver.h"
#include "marks.h"

namespace tracepipe {

class MarkedMemory {
  public:
    static uint64_t bytes_for(uint32_t slots) { return slots * (A_RING + MARK_LINE); }
    // From the library's own thread: sets the device's `memory`, which is zero.
    bool open(CUdeviceptr memory, uint32_t slots) {
        void *staging = nullptr;
        if (slots * uint64_t(MARK_LINE) > STAGING_BYTES) return false;
        if (driver().memHostAlloc(&staging, STAGING_BYTES, 0) != CUDA_SUCCESS) return false;
        staging_ = static_cast<char *>(staging);
        rings_ = std::make_unique<MarkRings>(slots);
        counts_.resize(slots);
        std::lock_guard<std::mutex> lock(mutex_);
        buffer_ = {memory, memory + slots * A_RING, slots, 0};
        return true;
    }
    // Says that something writes there; `rings` has what was read, null until then.
    void use() { is_used_ = true; }
    MarkRings *rings() { return is_used_ ? rings_.get() : nullptr; }
    MarkBuffer buffer() {
        std::lock_guard<std::mutex> lock(mutex_);
        return buffer_;
    }
    // From a callback of a launch on `stream`: the variables of a module get the buffer before the kernel
    // begins. False if there is no buffer.
    bool give(CUmodule module, const std::vector<CUdeviceptr> &variables, Sanitizer_StreamHandle stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!buffer_.slots) return variables.empty();
        bool is_given = true;
        for (CUdeviceptr at : variables)
            is_given &= sanitizerMemcpyHostToDeviceAsync(reinterpret_cast<void *>(at), &buffer_, sizeof buffer_,
                                                         stream) == SANITIZER_SUCCESS;
        given_[module] = variables, is_used_ = is_used_ || !variables.empty();
        return is_given;
    }
    // The module is unloaded, or about to be.
    void forget(CUmodule module) {
        std::lock_guard<std::mutex> lock(mutex_);
        given_.erase(module);
    }
    // From the library's own thread: from now on marks cost the same as without a capture.
    void take_back(CUstream stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        MarkBuffer none{};
        for (auto &[module, variables] : given_)
            for (CUdeviceptr at : variables) driver().memcpyHtoDAsync(at, &none, sizeof none, stream);
        driver().streamSynchronize(stream);
        given_.clear();
    }
    // From the library's own thread: reads new marks. `number_of` returns the number of a mark's name.
    template <typename NumberOf> CUresult read(CUstream stream, const NumberOf &number_of) {
        uint32_t slots = buffer_.slots;
        CUresult result = copy(buffer_.counts, slots * uint64_t(MARK_LINE), stream);
        for (uint32_t slot = 0; slot < slots; slot++) counts_[slot] = count_at(slot);
        for (uint32_t slot = 0; slot < slots && result == CUDA_SUCCESS;) {
            if (!rings_->has_new(slot, counts_[slot])) {
                slot++;
                continue;
            }
            uint32_t past = slot + 1;
            while (past < slots && past - slot < A_PIECE && rings_->has_new(past, counts_[past])) past++;
            result = read_rings(slot, past, stream, number_of);
            slot = past;
        }
        return result;
    }

  private:
    static constexpr uint64_t A_RING = MARK_RING * sizeof(MarkRecord);
    static constexpr size_t STAGING_BYTES = 4u << 20;
    // The number of rings that are copied at once, before their counts.
    static constexpr uint32_t A_PIECE = (STAGING_BYTES - (1u << 20)) / A_RING;

    template <typename NumberOf>
    CUresult read_rings(uint32_t slot, uint32_t past, CUstream stream, const NumberOf &number_of) {
        uint64_t bytes = (past - slot) * A_RING;
        CUresult result = copy(buffer_.records + slot * A_RING, bytes, stream);
        if (result != CUDA_SUCCESS) return result;
        result = copy(buffer_.counts + slot * uint64_t(MARK_LINE), (past - slot) * uint64_t(MARK_LINE), stream, bytes);
        if (result != CUDA_SUCCESS) return result;
        const auto *records = reinterpret_cast<const MarkRecord *>(staging_);
        for (uint32_t at = slot; at < past; at++)
            rings_->add(at, counts_[at], count_at(at - slot, bytes), records + (at - slot) * MARK_RING, number_of);
        return CUDA_SUCCESS;
    }
    uint32_t count_at(uint32_t place, uint64_t offset = 0) const {
        uint32_t count;
        memcpy(&count, staging_ + offset + place * uint64_t(MARK_LINE), sizeof count);
        return count;
    }
    CUresult copy(CUdeviceptr from, uint64_t bytes, CUstream stream, uint64_t offset = 0) {
        CUresult result = driver().memcpyDtoHAsync(staging_ + offset, from, bytes, stream);
        return result == CUDA_SUCCESS ? driver().streamSynchronize(stream) : result;
    }

    std::atomic<bool> is_used_{false};
    std::mutex mutex_;
    MarkBuffer buffer_{};
    std::unordered_map<CUmodule, std::vector<CUdeviceptr>> given_;
    char *staging_ = nullptr;
    std::vector<uint32_t> counts_;
    std::unique_ptr<MarkRings> rings_;
};

}  // namespace tracepipe
