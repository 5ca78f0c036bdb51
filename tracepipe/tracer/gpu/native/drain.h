// SPDX-License-Identifier: MIT
// The library's own thread: sends what the patches wrote to the capture process, and takes clock pairs.
//
// The thread copies on a separate stream. Its driver calls raise callbacks as any others do, which are
// ignored by `is_own_thread`.
#pragma once
#include <chrono>
#include <condition_variable>

#include "functions.h"
#include "gpu_record.h"
#include "launch_reader.h"
#include "own_thread.h"

namespace tracepipe {

class Drain {
  public:
    Drain(Channel &channel, Functions &functions)
        : channel_(channel), functions_(functions),
          reader_(
              channel, [&functions](uint64_t pc) { return functions.code_at(pc); },
              [&functions](const MarkRecord &mark) { return functions.name_of(mark); }) {}

    // `memory_bytes`: on each GPU, 0 to choose by its memory. `report` is called from time to time, and at
    // the end with true. If the recording ends before the process, `stop` is called before the last records
    // are read, and `let_go` after everything else. False if no thread can be started.
    bool start(uint64_t memory_bytes, std::function<void(bool)> report, std::function<void()> stop,
               std::function<void()> let_go) {
        memory_bytes_ = memory_bytes;
        report_ = std::move(report), stop_ = std::move(stop), let_go_ = std::move(let_go);
        return start_own_thread([](void *self) { static_cast<Drain *>(self)->run(); }, this);
    }
    // Waits, for a limited time, until a context has memory for launches.
    void wait_open(Context &context) {
        std::unique_lock<std::mutex> lock(mutex_);
        finished_.wait_for(lock, std::chrono::seconds(2), [&] { return context.is_open || context.is_dead; });
    }
    void add(const std::shared_ptr<Context> &context) {
        std::lock_guard<std::mutex> lock(mutex_);
        contexts_.push_back(context);
    }
    std::shared_ptr<Context> find(CUcontext handle) {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto &context : contexts_)
            if (context->handle == handle && !context->is_dead) return context;
        return nullptr;
    }
    std::vector<std::shared_ptr<Context>> contexts() {
        std::lock_guard<std::mutex> lock(mutex_);
        return contexts_;
    }
    void wake() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_woken_ = true;
        }
        wake_.notify_one();
    }
    // Called for a launch: wakes the thread soon, since a later call may end the context.
    void wake_if_idle() {
        if (is_idle_.exchange(false)) wake();
    }
    // Waits until all launches have ended and are drained, `wait_ms` at most; the rest is reported as lost,
    // unfinished. A clock pair is the last record. `is_last`: the process ends.
    void finish(unsigned wait_ms, bool is_last) {
        if (is_own_thread()) return;
        uint64_t asked = ask_to_finish(wait_ms, is_last);
        std::unique_lock<std::mutex> lock(mutex_);
        if (is_ended_) return;
        // After the deadline the process continues, whatever holds up the thread.
        finished_.wait_for(lock, std::chrono::milliseconds(wait_ms + 500), [&] { return finish_done_ >= asked || is_ended_; });
    }

    static constexpr unsigned WAIT_AT_END_MS = 3000;

  private:
    // Default memory for records: a small share of the GPU's, and enough for a burst of launches.
    static constexpr uint64_t LEAST_MEMORY = 8u << 20, MOST_MEMORY = uint64_t(1) << 30, SHARE_OF_MEMORY = 64;
    static constexpr uint32_t CLOCK_ROUNDS = 400;  // 1 ms
    static constexpr int CLOCK_TRIES = 3;
    static constexpr uint64_t CLOCK_EVERY_NS = 250'000'000, CLOCK_AT_LEAST_NS = 1'000'000'000;

    // Returns the number of the request.
    uint64_t ask_to_finish(unsigned wait_ms, bool is_last) {
        std::lock_guard<std::mutex> lock(mutex_);
        finish_by_ns_ = monotonic_ns() + uint64_t(wait_ms) * 1000000;
        is_last_ |= is_last;
        wake_.notify_one();
        return ++finish_asked_;
    }
    void run() {
        is_own_thread() = true;
        bool is_over = false;
        for (bool is_busy = false;;) {
            std::vector<std::shared_ptr<Context>> contexts;
            uint64_t asked, by_ns;
            {
                std::unique_lock<std::mutex> lock(mutex_);
                bool finishing = finish_asked_ > finish_done_;
                auto pause = std::chrono::milliseconds(finishing || is_busy ? 1 : 20);
                is_idle_ = !is_busy;
                wake_.wait_for(lock, pause, [&] { return is_woken_ || (!finishing && finish_asked_ > finish_done_); });
                is_woken_ = is_idle_ = false;
                asked = finish_asked_;
                by_ns = asked > finish_done_ ? finish_by_ns_ : 0;
                contexts = contexts_;
            }
            if (!is_over && channel_.is_over()) {
                is_over = true;
                stop_();
                for (auto &context : contexts) take_back_marks(*context);
                ask_to_finish(WAIT_AT_END_MS, true);
                continue;
            }
            bool is_late = by_ns && monotonic_ns() > by_ns;
            is_busy = false;
            for (auto &context : contexts) {
                visit(*context, by_ns != 0, is_late);
                is_busy |= !context->is_empty();
            }
            report_(by_ns != 0);
            if (by_ns && (!is_busy || is_late)) {
                for (auto &context : contexts) visit_clock(*context, true);
                std::unique_lock<std::mutex> lock(mutex_);
                finish_done_ = asked;
                is_ended_ = is_last_;
                finished_.notify_all();
                if (!is_ended_) continue;
                lock.unlock();
                channel_.close();
                if (is_over) let_go_();
                return;
            }
        }
    }

    void visit(Context &context, bool is_finishing, bool is_late) {
        std::unique_lock<std::timed_mutex> use(context.in_use);
        if (context.is_dead) return reader_.lose(context, LOST_FAILED);
        if (!context.is_open || !context.is_empty()) {
            Current current(context.handle);
            if (!reader_.works(current.result, "cuCtxPushCurrent")) return reader_.fail(context);
            if (!context.is_open) open(context);
            if (!context.is_dead) reader_.read(context, is_late);
        }
        use.unlock();
        if (!context.is_dead && !is_finishing) visit_clock(context, false);
        if (is_late) reader_.lose(context, LOST_UNFINISHED);
    }
    void take_back_marks(Context &context) {
        std::lock_guard<std::timed_mutex> use(context.in_use);
        if (context.is_dead || !context.marks.rings()) return;
        Current current(context.handle);
        if (current.result == CUDA_SUCCESS) context.marks.take_back(context.stream);
    }
    void visit_clock(Context &context, bool is_due) {
        uint64_t past_ns = monotonic_ns() - context.clock_taken_ns;
        is_due |= past_ns > (context.is_empty() ? CLOCK_EVERY_NS : CLOCK_AT_LEAST_NS);
        if (!is_due) return;
        std::lock_guard<std::timed_mutex> use(context.in_use);
        if (context.is_dead || !context.clocks.is_open()) return;
        Current current(context.handle);
        if (current.result == CUDA_SUCCESS) clock_pair(context);
    }
    // A pair that is much wider than earlier ones is taken again, as something held up this thread.
    void clock_pair(Context &context) {
        ClockRecord best{};
        uint64_t width_ns = ~uint64_t(0), enough_ns = context.clock_width_ns + context.clock_width_ns / 8;
        for (int tries = 0; tries < CLOCK_TRIES && width_ns > enough_ns; tries++) {
            ClockRecord pair{uint32_t(context.device), 0, 0, 0, 0};
            if (!context.clocks.take(CLOCK_ROUNDS, pair)) break;
            if (pair.host_hi_ns - pair.host_lo_ns >= width_ns) continue;
            best = pair, width_ns = pair.host_hi_ns - pair.host_lo_ns;
        }
        if (width_ns != ~uint64_t(0)) {
            channel_.put(KIND_CLOCK, &best, sizeof best);
            context.clock_width_ns = std::min(width_ns, context.clock_width_ns ? context.clock_width_ns : width_ns);
        }
        context.clock_taken_ns = monotonic_ns();
    }

    void open(Context &context) {
        void *staging = nullptr;
        bool is_ready =
            reader_.works(driver().streamCreate(&context.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate") &&
            reader_.works(driver().memHostAlloc(&staging, LaunchReader::STAGING_BYTES, 0), "cuMemHostAlloc") &&
            allocate(context);
        context.staging = static_cast<char *>(staging);
        if (is_ready) put_gpu(channel_, context.device);
        // Before the program's first kernel starts: the kernel that answers would take the place of its blocks on an SM.
        if (is_ready && context.clocks.open(context.stream)) clock_pair(context);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            context.is_open = true;
        }
        finished_.notify_all();
        if (!is_ready) reader_.fail(context);
    }
    // If the GPU has not enough memory, half of it is tried.
    bool allocate(Context &context) {
        CUdeviceptr memory = 0;
        uint64_t bytes = memory_bytes_;
        size_t whole_bytes = 0;
        if (!bytes && driver().deviceTotalMem(&whole_bytes, context.device) == CUDA_SUCCESS)
            bytes = std::min<uint64_t>(whole_bytes / SHARE_OF_MEMORY, MOST_MEMORY);
        bytes = std::max<uint64_t>(bytes, LEAST_MEMORY);
        // The table of called functions is at a multiple of CALLS_ALIGNMENT, the records of calls after the
        // regions.
        uint32_t slots = slots_of(context.device);
        uint64_t of_calls = functions_.has_called() ? CALLS_ALIGNMENT + MarkedMemory::bytes_for(slots) : 0;
        if (of_calls) bytes = std::min<uint64_t>(bytes, CALLS_ALIGNMENT);
        bytes &= ~(REGION_ALIGNMENT - 1);
        while (driver().memAlloc(&memory, bytes + of_calls) != CUDA_SUCCESS)
            if ((bytes /= 2) < LEAST_MEMORY) return reader_.works(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
        if (!reader_.works(driver().memsetD8Async(memory, 0, bytes + of_calls, context.stream), "cuMemsetD8Async") ||
            !reader_.works(driver().streamSynchronize(context.stream), "cuStreamSynchronize"))
            return false;
        // The user data of the patches has other values in these bits.
        if (memory % REGION_ALIGNMENT || (memory + bytes + of_calls) >> CHECK_SHIFT)
            return reader_.works(CUDA_ERROR_NOT_SUPPORTED, "placing the records");
        if (of_calls) {
            memory = (memory + CALLS_ALIGNMENT - 1) & ~(CALLS_ALIGNMENT - 1);
            if (context.calls.open(memory + bytes, slots)) context.called.open(memory, context.calls.buffer());
            memory += CALLED_TABLE_BYTES, bytes -= CALLED_TABLE_BYTES;
        }
        uint64_t of_marks = MarkedMemory::bytes_for(slots);
        if (of_marks <= bytes / 2 && context.marks.open(memory + bytes - of_marks, slots)) bytes -= of_marks;
        context.give_memory(memory, bytes);
        return true;
    }
    static uint32_t slots_of(CUdevice device) {
        int sms = 0;
        driver().deviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, device);
        return uint32_t(sms) * uint32_t(MARK_SLOTS);
    }

    Channel &channel_;
    Functions &functions_;
    LaunchReader reader_;
    uint64_t memory_bytes_ = 0;
    std::function<void(bool)> report_;
    std::function<void()> stop_, let_go_;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::vector<std::shared_ptr<Context>> contexts_;
    std::atomic<bool> is_idle_{false};
    bool is_woken_ = false, is_last_ = false, is_ended_ = false;
    uint64_t finish_asked_ = 0, finish_done_ = 0, finish_by_ns_ = 0;
};

}  // namespace tracepipe
