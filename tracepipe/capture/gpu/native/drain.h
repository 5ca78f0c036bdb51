// The library's own thread: brings what the patches wrote to the capture process, and takes clock pairs.
//
// A launch is known to have ended when all lanes of all its warps have left, or when the program has waited
// for it. No events, no callbacks: the records say it. The thread copies on a stream of its own and leaves
// zeros behind. Its calls of the driver raise callbacks like any others, which `is_own_thread` lets pass.
#pragma once
#include <chrono>
#include <condition_variable>
#include <thread>

#include "context.h"

namespace tracepipe {

inline bool &is_own_thread() {
    thread_local bool own = false;
    return own;
}

class Drain {
  public:
    explicit Drain(Channel &channel) : channel_(channel) {}

    // `memory_bytes`: of each GPU.
    void start(uint64_t memory_bytes) {
        memory_bytes_ = memory_bytes;
        std::thread([this] { run(); }).detach();
    }
    // Waits until a context has memory for launches, for a while.
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
    void wake() {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            is_woken_ = true;
        }
        wake_.notify_one();
    }
    // There is a launch: it is looked after soon, since a later one may end the context.
    void wake_if_idle() {
        if (is_idle_.exchange(false)) wake();
    }
    // Waits until all launches have ended and are drained, `wait_ms` at most; what remains is given up as
    // unfinished. Ends with a clock pair. `is_last`: the process ends.
    void finish(unsigned wait_ms, bool is_last) {
        if (is_own_thread()) return;
        std::unique_lock<std::mutex> lock(mutex_);
        if (is_ended_) return;
        uint64_t asked = ++finish_asked_;
        finish_by_ns_ = monotonic_ns() + uint64_t(wait_ms) * 1000000;
        is_last_ |= is_last;
        wake_.notify_one();
        // Past the deadline the thread is given up, whatever holds it: the target goes on.
        finished_.wait_for(lock, std::chrono::milliseconds(wait_ms + 500), [&] { return finish_done_ >= asked; });
    }

  private:
    static constexpr size_t STAGING_BYTES = 4u << 20, SMALL_BYTES = 64u << 10;
    static constexpr size_t MANY = 4096;
    static constexpr uint64_t CLOCK_EVERY_NS = 1'000'000'000, CLOCK_AT_LEAST_NS = 3'000'000'000;

    void run() {
        is_own_thread() = true;
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        driver().threadExchangeStreamCaptureMode(&mode);
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
            bool is_late = by_ns && monotonic_ns() > by_ns;
            is_busy = false;
            for (auto &context : contexts) {
                visit(*context, by_ns != 0, is_late);
                is_busy |= !context->is_empty();
            }
            if (by_ns && (!is_busy || is_late)) {
                for (auto &context : contexts) visit_clock(*context, true);
                std::lock_guard<std::mutex> lock(mutex_);
                finish_done_ = asked;
                is_ended_ = is_last_;
                finished_.notify_all();
                if (is_ended_) return;
            }
        }
    }

    void visit(Context &context, bool is_finishing, bool is_late) {
        std::unique_lock<std::timed_mutex> use(context.in_use);
        if (context.is_dead) return lose(context, LOST_FAILED);
        if (!context.is_open || !context.is_empty()) {
            if (!works(driver().ctxPushCurrent(context.handle), "cuCtxPushCurrent")) return fail(context);
            if (!context.is_open) open(context);
            if (!context.is_dead) drain(context, is_late);
            CUcontext popped;
            driver().ctxPopCurrent(&popped);
        }
        use.unlock();
        if (!context.is_dead && !is_finishing) visit_clock(context, false);
        if (is_late) lose(context, LOST_UNFINISHED);
    }
    void visit_clock(Context &context, bool is_due) {
        uint64_t past_ns = monotonic_ns() - context.clock_taken_ns;
        is_due |= past_ns > (context.is_empty() ? CLOCK_EVERY_NS : CLOCK_AT_LEAST_NS);
        if (!is_due) return;
        std::lock_guard<std::timed_mutex> use(context.in_use);
        if (context.is_dead || !context.clocks.is_open()) return;
        if (driver().ctxPushCurrent(context.handle) != CUDA_SUCCESS) return;
        clock_pair(context, 200);
        CUcontext popped;
        driver().ctxPopCurrent(&popped);
    }
    void clock_pair(Context &context, uint32_t rounds) {
        ClockRecord pair{uint32_t(context.device), 0, 0, 0, 0};
        if (context.clocks.take(rounds, pair)) channel_.put(KIND_CLOCK, &pair, sizeof pair);
        context.clock_taken_ns = monotonic_ns();
    }

    void open(Context &context) {
        void *staging = nullptr;
        bool is_ready = works(driver().streamCreate(&context.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate") &&
                        works(driver().memHostAlloc(&staging, STAGING_BYTES, 0), "cuMemHostAlloc") &&
                        allocate(context);
        context.staging = static_cast<char *>(staging);
        if (is_ready) tell_gpu(context.device);
        {
            std::lock_guard<std::mutex> lock(mutex_);
            context.is_open = true;
        }
        finished_.notify_all();
        if (!is_ready) return fail(context);
        if (context.clocks.open(context.stream)) clock_pair(context, 400);
    }
    // What the GPU cannot give is halved, down to 8 MiB.
    bool allocate(Context &context) {
        CUdeviceptr memory = 0;
        uint64_t bytes = std::max<uint64_t>(memory_bytes_, 8u << 20);
        while (driver().memAlloc(&memory, bytes) != CUDA_SUCCESS)
            if ((bytes /= 2) < (8u << 20)) return works(CUDA_ERROR_OUT_OF_MEMORY, "cuMemAlloc");
        if (!works(driver().memsetD8Async(memory, 0, bytes, context.stream), "cuMemsetD8Async") ||
            !works(driver().streamSynchronize(context.stream), "cuStreamSynchronize"))
            return false;
        // The patches' data has other things in these bits.
        if (memory % REGION_ALIGNMENT || (memory + bytes) >> CHECK_SHIFT)
            return works(CUDA_ERROR_NOT_SUPPORTED, "placing the records");
        context.give_memory(memory, bytes);
        return true;
    }
    bool works(CUresult result, const char *function) {
        if (result != CUDA_SUCCESS)
            channel_.note(std::string(function) + " failed with CUresult " + std::to_string(int(result)) +
                          ": no more warps are recorded in this context");
        return result == CUDA_SUCCESS;
    }
    void tell_gpu(CUdevice device) {
        struct {
            uint32_t index, sms, major, minor, clock_khz, zero;
            CUuuid uuid;
        } gpu{};
        char name[256] = "";
        int value = 0;
        auto ask = [&](CUdevice_attribute attribute) {
            value = 0;
            driver().deviceGetAttribute(&value, attribute, device);
            return uint32_t(value);
        };
        gpu.index = uint32_t(device);
        gpu.sms = ask(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        gpu.major = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR);
        gpu.minor = ask(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        gpu.clock_khz = ask(CU_DEVICE_ATTRIBUTE_CLOCK_RATE);
        driver().deviceGetUuid(&gpu.uuid, device);
        driver().deviceGetName(name, sizeof name - 1, device);
        channel_.put(KIND_GPU, &gpu, sizeof gpu, name);
    }

    void drain(Context &context, bool is_late) {
        std::vector<LaunchPointer> todo = context.pending(MANY);
        for (size_t at = 0; at < todo.size() && !context.is_dead;) {
            size_t past = at + 1;
            while (past < todo.size() && todo[past]->offset > todo[past - 1]->offset &&
                   todo[past]->bytes() <= SMALL_BYTES &&
                   todo[past]->offset + todo[past]->bytes() - todo[at]->offset <= STAGING_BYTES)
                past++;
            bool is_small = todo[at]->bytes() <= SMALL_BYTES;
            bool is_drained = is_small ? drain_span(context, &todo[at], past - at, is_late)
                                       : drain_large(context, *todo[at], is_late);
            if (!is_drained) fail(context);
            at = is_small ? past : at + 1;
            context.give_back_done();
        }
    }
    // Launches that lie one after the other come with one copy.
    bool drain_span(Context &context, LaunchPointer *launches, size_t count, bool is_late) {
        uint64_t start = launches[0]->offset;
        uint64_t bytes = launches[count - 1]->offset + launches[count - 1]->bytes() - start;
        if (!copy(context, context.staging, start, bytes)) return false;
        std::vector<Launch *> drained;
        for (size_t at = 0; at < count; at++) {
            Launch &launch = *launches[at];
            const char *region = context.staging + (launch.offset - start);
            const auto *exits = reinterpret_cast<const Exit *>(region + exits_offset(launch.recorded));
            uint64_t made = reinterpret_cast<const Region *>(region)->exits;
            Drained records{reinterpret_cast<const Warp *>(region + sizeof(Region)), launch.recorded, {}};
            records.exits.assign(exits, exits + std::min(made, launch.exits_room()));
            if (!send_if_over(launch, records, made, is_late)) continue;
            if (!zero(context, launch.offset, exits_offset(launch.recorded) + records.exits.size() * sizeof(Exit)))
                return false;
            drained.push_back(&launch);
        }
        if (drained.empty()) return true;
        if (!works(driver().streamSynchronize(context.stream), "cuStreamSynchronize")) return false;
        for (Launch *launch : drained) launch->is_done = true;
        return true;
    }
    bool drain_large(Context &context, Launch &launch, bool is_late) {
        uint64_t records_bytes = exits_offset(launch.recorded);
        Warp last;
        if (!launch.is_over && !is_late && !launch.is_cancelled) {
            // The last warp ends among the last: before it has, the rest need not be copied.
            if (!copy(context, &last, launch.offset + records_bytes - sizeof last, sizeof last)) return false;
            if (!last.exit_ns && !last.partial_mask) return true;
        }
        std::vector<char> region(records_bytes);
        if (!copy(context, region.data(), launch.offset, records_bytes)) return false;
        uint64_t made = reinterpret_cast<const Region *>(region.data())->exits;
        Drained records{reinterpret_cast<const Warp *>(region.data() + sizeof(Region)), launch.recorded, {}};
        records.exits.resize(std::min(made, launch.exits_room()));
        uint64_t exits_bytes = records.exits.size() * sizeof(Exit);
        if (!copy(context, records.exits.data(), launch.offset + records_bytes, exits_bytes)) return false;
        if (!send_if_over(launch, records, made, is_late)) return true;
        if (!zero(context, launch.offset, records_bytes + exits_bytes)) return false;
        if (!works(driver().streamSynchronize(context.stream), "cuStreamSynchronize")) return false;
        launch.is_done = true;
        return true;
    }

    bool copy(Context &context, void *to, uint64_t offset, uint64_t bytes) {
        for (uint64_t at = 0; at < bytes; at += STAGING_BYTES) {
            uint64_t piece = std::min<uint64_t>(STAGING_BYTES, bytes - at);
            CUdeviceptr from = context.base() + offset + at;
            if (!works(driver().memcpyDtoHAsync(context.staging, from, piece, context.stream), "cuMemcpyDtoHAsync") ||
                !works(driver().streamSynchronize(context.stream), "cuStreamSynchronize"))
                return false;
            if (to != context.staging) memcpy(static_cast<char *>(to) + at, context.staging, piece);
        }
        return true;
    }
    bool zero(Context &context, uint64_t offset, uint64_t bytes) {
        return works(driver().memsetD8Async(context.base() + offset, 0, bytes, context.stream), "cuMemsetD8Async");
    }

    // Sends what a launch has if no more will come.
    bool send_if_over(Launch &launch, Drained &records, uint64_t exits_made, bool is_late) {
        if (launch.is_cancelled) return true;
        size_t room = records.exits.size();
        sort_exits(records.exits);
        Seen seen = look(records);
        bool is_whole = seen.whole == records.count && records.exits.size() == room;
        if (!is_whole && !launch.is_over && !is_late) return false;
        LaunchRecord record = launch.record;
        record.start_ns = seen.begun ? seen.first_ns : 0;
        record.end_ns = seen.begun ? seen.last_ns : 0;
        record.begun = seen.begun;
        record.whole = seen.whole;
        channel_.put(KIND_KERNEL, &record, sizeof record);
        columns_.send(
            record.launch, records,
            [&](size_t bytes, uint64_t warps) { return channel_.reserve(KIND_WARPS, bytes, warps); },
            [&](void *payload) { channel_.commit(payload); });
        lost(record, LOST_NO_MEMORY, record.warps - records.count);
        lost(record, launch.is_over ? LOST_NOT_SEEN : LOST_UNFINISHED, records.count - seen.begun);
        lost(record, LOST_EXITS, exits_made - room);
        if (exits_made > room && launch.room < MOST_ROOM) *launch.needed_room = uint32_t(launch.room + 1);
        return true;
    }
    void lost(const LaunchRecord &launch, Lost why, uint64_t warps) {
        if (!warps) return;
        LostRecord record{launch.launch, launch.gpu, why, warps};
        channel_.put(KIND_LOST_WARPS, &record, sizeof record);
    }
    void fail(Context &context) {
        context.is_dead = true;
        lose(context, LOST_FAILED);
    }
    void lose(Context &context, Lost why) {
        for (LaunchPointer &launch : context.pending(~size_t(0))) {
            if (!launch->is_cancelled) {
                channel_.put(KIND_KERNEL, &launch->record, sizeof launch->record);
                lost(launch->record, why, launch->record.warps);
            }
            launch->is_done = true;
        }
        context.give_back_done();
    }

    Channel &channel_;
    WarpColumns columns_;
    uint64_t memory_bytes_ = 0;
    std::mutex mutex_;
    std::condition_variable wake_, finished_;
    std::vector<std::shared_ptr<Context>> contexts_;
    std::atomic<bool> is_idle_{false};
    bool is_woken_ = false, is_last_ = false, is_ended_ = false;
    uint64_t finish_asked_ = 0, finish_done_ = 0, finish_by_ns_ = 0;
};

}  // namespace tracepipe
