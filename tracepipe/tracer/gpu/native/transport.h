// SPDX-License-Identifier: MIT
// The channel from a traced process to the capture process: memory that both map, with a ring of records.
//
// The capture process creates the memory, seals its size, and sends it to every process that connects
// (connection.h). Any number of processes and threads put records in; the capture process takes them out. A
// producer reserves room with one compare-and-swap, writes, and commits; a committed record can be read even
// if its process dies. A producer waits for room for a bounded time, and then drops the record and counts it.
//
// Memory, little-endian:
//
//     0        8         16        24         28     32
//     | magic  | key     | ring    | wait     | 0    | launches |
//     |        |         | bytes   | µs  u32  |      |          |
//     64                 128                 192                      704
//     | produced         | consumed          | dropped by kind, 64 × u64
//     704     708          712          716        720       724  728
//     | turns | windows    | hits of    | hits of  | has     | 0  | when turn N was, ns:    |    windows.h
//     | u32   | left u32   | begins u32 | ends u32 | windows |    | 16 × u64, at N mod 16   |
//     1024                                        3072                                        4064
//     | 128 KeptBuffers, 16 bytes each            | 31 InFlight, 32 bytes each
//     4096 ──────────────────────────────────────────────────────── 4096 + ring bytes
//     | records, each at a multiple of 16; positions count from 0 over all laps of the ring
//     4096 + ring bytes ──────────────────────────────────────────── and 128 MiB
//     | 128 buffers of 1 MiB, which CUPTI fills: what is in them when their process dies is read there
//
// Record:
//
//     0                      8        12      14      16      20      24         32
//     | tag                  | length | kind  | 0     | pid   | tid   | time_ns  | payload …
//
// length is the payload's, in bytes. tag is (position | state) ^ key; state is 1 while the record is written
// and 2 when it is committed, so remains of an earlier lap are never mistaken for a record. time_ns is
// CLOCK_MONOTONIC when room for the record was reserved.
#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <string_view>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "connection.h"
#include "settings.h"

namespace tracepipe {

constexpr uint64_t CHANNEL_MAGIC = 0x3255504765706954;  // "TipeGPU2"
constexpr size_t CHANNEL_HEADER_BYTES = 4096;
constexpr size_t RECORD_HEADER_BYTES = 32;
constexpr unsigned KINDS = 64;

// Kinds that every engine has. Other kinds begin at 16 (warps), 38 (kernels) and 56 (annotations). All
// integers little-endian, texts UTF-8 without a NUL up to the end of the payload.
enum Kind : uint16_t {
    KIND_NAME = 1,   // | id u64 | text: a name to which later records of this pid refer by id
    KIND_GPU = 2,    // GpuHead, and the name as text
    KIND_CLOCK = 3,  // | gpu u32 | 0 u32 | source_ns u64 | host_lo_ns u64 | host_hi_ns u64 |
    KIND_NOTE = 4,   // | text: a message for the user
    KIND_STACK = 5,  // python_stacks.h describes both: before the first record of this pid with its number
    KIND_FRAME = 6,
    KIND_STACK_BEYOND = 7,  // never put; counts calls whose stack is beyond the limit
                            // 8 is a buffer that was kept; the capture process makes these
};

// A GPU of a process, and what an SM of it holds at most; 0 where it is not known. `reserved_bytes` is the
// shared memory that each block has for the system.
struct GpuHead {
    uint32_t index, sms, major, minor, clock_khz;
    uint32_t warps, blocks, registers, shared_bytes, reserved_bytes;
    char uuid[16];
};
static_assert(sizeof(GpuHead) == 56, "");

inline uint64_t monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

inline uint32_t thread_id() {
    // The only thread after a fork inherits the value, so it is kept with the process in which it was read.
    thread_local uint32_t id = 0;
    thread_local pid_t process = 0;
    if (process != this_process()) process = this_process(), id = uint32_t(syscall(SYS_gettid));
    return id;
}

// A buffer outside of the ring, and the process that has it, 0 for none. `is_out`: CUPTI has it, and the records
// from `sent` on are nowhere else.
struct KeptBuffer {
    std::atomic<uint32_t> pid, is_out;
    std::atomic<uint64_t> sent;
};
constexpr size_t KEPT_BUFFERS = 128, KEPT_BYTES = 1 << 20;

// Of a process, 0 for none: launches and warps that are to be recorded and were not sent yet.
struct alignas(32) InFlight {
    std::atomic<uint32_t> pid, zero;
    std::atomic<int64_t> launches, warps;
};
constexpr size_t COUNTED_PROCESSES = 31;

struct ChannelHeader {
    uint64_t magic, key, ring_bytes;
    uint32_t wait_us, zero;
    std::atomic<uint64_t> launches;  // ids assigned
    alignas(64) std::atomic<uint64_t> produced;
    alignas(64) std::atomic<uint64_t> consumed;
    alignas(64) std::atomic<uint64_t> dropped[KINDS];
    std::atomic<uint32_t> turns, windows_left, begin_hits, end_hits, has_windows, zero2;
    std::atomic<uint64_t> turned_ns[16];
    alignas(1024) KeptBuffer kept[KEPT_BUFFERS];
    InFlight in_flight[COUNTED_PROCESSES];
};
static_assert(offsetof(ChannelHeader, launches) == 32 && offsetof(ChannelHeader, produced) == 64);
static_assert(offsetof(ChannelHeader, consumed) == 128 && offsetof(ChannelHeader, dropped) == 192);
static_assert(offsetof(ChannelHeader, turns) == 704 && offsetof(ChannelHeader, turned_ns) == 728);
static_assert(offsetof(ChannelHeader, kept) == 1024 && sizeof(KeptBuffer) == 16);
static_assert(offsetof(ChannelHeader, in_flight) == 3072 && sizeof(InFlight) == 32);
static_assert(sizeof(ChannelHeader) <= CHANNEL_HEADER_BYTES);

struct RecordHeader {
    std::atomic<uint64_t> tag;
    uint32_t length;
    uint16_t kind, zero;
    uint32_t pid, tid;
    uint64_t time_ns;
};
static_assert(sizeof(RecordHeader) == RECORD_HEADER_BYTES);

class Channel {
  public:
    // Whether the capture process answered, and its memory could be mapped.
    bool open() {
        const char *name = settings().get("TRACEPIPE_GPU_CHANNEL");
        if (!name || !*name) return false;
        int memory = connection_.open(name);
        if (memory < 0) return false;
        bool mapped = map(memory);
        ::close(memory);
        if (!mapped) connection_.close();
        return mapped;
    }
    bool is_open() const { return header_ != nullptr; }
    // The largest payload that a record may have.
    size_t payload_limit() const { return ring_bytes_ / 4; }

    // Room for a payload, or null if there was none in time: then `events` are counted as dropped.
    void *reserve(uint16_t kind, size_t length, uint64_t events = 1, uint32_t tid = thread_id()) {
        if (!header_) return nullptr;
        size_t whole = (RECORD_HEADER_BYTES + length + 15) & ~size_t(15);
        uint64_t position;
        if (length > payload_limit() || !take(whole, position)) {
            header_->dropped[kind % KINDS].fetch_add(events, std::memory_order_relaxed);
            return nullptr;
        }
        auto *record = reinterpret_cast<RecordHeader *>(ring_ + (position & (ring_bytes_ - 1)));
        record->length = uint32_t(length);
        record->kind = kind;
        record->zero = 0;
        record->pid = uint32_t(this_process());
        record->tid = tid;
        record->time_ns = monotonic_ns();
        record->tag.store((position | 1) ^ key_, std::memory_order_release);
        return record + 1;
    }
    void commit(void *payload) {
        auto *record = static_cast<RecordHeader *>(payload) - 1;
        uint64_t tag = record->tag.load(std::memory_order_relaxed) ^ key_;
        record->tag.store((tag ^ 3) ^ key_, std::memory_order_release);
    }
    bool put(uint16_t kind, const void *head, size_t head_bytes, std::string_view text = {}, uint64_t events = 1,
             uint32_t tid = thread_id()) {
        auto *to = static_cast<char *>(reserve(kind, head_bytes + text.size(), events, tid));
        if (!to) return false;
        memcpy(to, head, head_bytes);
        if (!text.empty()) memcpy(to + head_bytes, text.data(), text.size());
        commit(to);
        return true;
    }
    // An id for a launch, which no other process of the capture uses.
    uint64_t next_launch() { return header_->launches.fetch_add(1, std::memory_order_relaxed) + 1; }
    bool note(std::string_view text) { return put(KIND_NOTE, "", 0, text); }
    void drop(uint16_t kind, uint64_t events) {
        if (header_) header_->dropped[kind % KINDS].fetch_add(events, std::memory_order_relaxed);
    }
    // Whether the recording is over: the remaining records may be sent, and then `close` is called.
    bool is_over() const { return connection_.is_over(); }
    // Tells the capture process up to which turn of the windows this process has followed them.
    void followed(uint32_t turns) { connection_.tell(turns); }
    // Waits for the end of the recording or of the connection.
    void wait_until_over() const { connection_.wait_until_over(); }
    ChannelHeader *shared() { return header_; }
    // Counts launches and warps that are to be recorded or, if less than 0, were sent. What a process that dies has
    // not sent is then known.
    void count_in_flight(int64_t launches, int64_t warps) {
        InFlight *counted = in_flight_;
        if (!counted) return;
        counted->launches.fetch_add(launches, std::memory_order_relaxed);
        counted->warps.fetch_add(warps, std::memory_order_relaxed);
    }
    void begin_to_count() {
        for (size_t at = 0; header_ && !in_flight_ && at < COUNTED_PROCESSES; at++)
            if (uint32_t none = 0; header_->in_flight[at].pid.compare_exchange_strong(none, uint32_t(this_process())))
                in_flight_ = &header_->in_flight[at];
    }
    // Everything was sent, or counted as lost.
    void end_count() {
        InFlight *counted = in_flight_.exchange(nullptr);
        if (counted) counted->launches = 0, counted->warps = 0, counted->pid = 0;
    }
    // A buffer of KEPT_BYTES that outlives this process, and is zero; null if there is none.
    uint8_t *take_buffer() {
        for (size_t at = 0; kept_ && at < KEPT_BUFFERS; at++)
            if (uint32_t none = 0; header_->kept[at].pid.compare_exchange_strong(none, uint32_t(this_process())))
                return kept_ + at * KEPT_BYTES;
        return nullptr;
    }
    // What the capture process knows of such a buffer; null for other memory.
    KeptBuffer *kept(const uint8_t *buffer) {
        size_t at = kept_ && buffer >= kept_ ? size_t(buffer - kept_) / KEPT_BYTES : KEPT_BUFFERS;
        return at < KEPT_BUFFERS ? &header_->kept[at] : nullptr;
    }
    // What is in this process's buffers is not to be read.
    void forget_buffers() {
        for (size_t at = 0; kept_ && at < KEPT_BUFFERS; at++)
            if (header_->kept[at].pid == uint32_t(this_process())) header_->kept[at].is_out = 0;
    }
    // In a fork, where CUPTI would continue to fill the buffers of this process's parent.
    void leave_buffers() {
        in_flight_ = nullptr;
        if (kept_) put_in_place(kept_, KEPT_BUFFERS * KEPT_BYTES, -1, 0);
    }
    // The channel's first bytes, for tests of what a program may do to it.
    void *header() { return header_; }
    // Ends this process's records and releases the channel's memory. Records that are put later go to private
    // memory. `are_buffers_out`: CUPTI still has some, so that a later recording cannot have them.
    void close(bool are_buffers_out = false) {
        connection_.close();
        if (!header_) return;
        end_count();
        leave_buffers();
        if (are_buffers_out) kept_ = nullptr;
        put_in_place(header_, CHANNEL_HEADER_BYTES, -1, 0);
        put_in_place(ring_, 2 * ring_bytes_, -1, 0);
    }

  private:
    bool map(int file) {
        struct stat status;
        if (fstat(file, &status) != 0 || size_t(status.st_size) < CHANNEL_HEADER_BYTES) return false;
        void *head = mmap(nullptr, CHANNEL_HEADER_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
        if (head == MAP_FAILED) return false;
        auto *header = static_cast<ChannelHeader *>(head);
        size_t bytes = header->ring_bytes;
        bool fits = header->magic == CHANNEL_MAGIC && bytes >= 65536 && (bytes & (bytes - 1)) == 0 &&
                    size_t(status.st_size) == CHANNEL_HEADER_BYTES + bytes + KEPT_BUFFERS * KEPT_BYTES;
        if (header_) return map_again(file, static_cast<ChannelHeader *>(head), fits);
        // The ring is mapped twice in a row, so that no record is cut by the ring's end.
        void *both = fits ? mmap(nullptr, 2 * bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) : MAP_FAILED;
        for (size_t lap = 0; both != MAP_FAILED && lap < 2; lap++)
            if (mmap(static_cast<char *>(both) + lap * bytes, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED,
                     file, CHANNEL_HEADER_BYTES) == MAP_FAILED) {
                munmap(both, 2 * bytes);
                both = MAP_FAILED;
            }
        if (both == MAP_FAILED) {
            munmap(head, CHANNEL_HEADER_BYTES);
            return false;
        }
        // What decides where this process writes is kept here, as all processes can write the header.
        ring_ = static_cast<char *>(both);
        ring_bytes_ = bytes, key_ = header->key, wait_us_ = header->wait_us;
        header_ = header;
        void *kept = mmap(nullptr, KEPT_BUFFERS * KEPT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file,
                          off_t(CHANNEL_HEADER_BYTES + bytes));
        kept_ = kept == MAP_FAILED ? nullptr : static_cast<uint8_t *>(kept);
        return true;
    }
    // A later channel is mapped over an earlier one, as a thread may still write there.
    bool map_again(int file, ChannelHeader *header, bool fits) {
        uint64_t key = header->key;
        uint32_t wait_us = header->wait_us;
        fits = fits && header->ring_bytes == ring_bytes_;
        munmap(header, CHANNEL_HEADER_BYTES);
        if (!fits || !put_in_place(header_, CHANNEL_HEADER_BYTES, file, 0) ||
            !put_in_place(ring_, ring_bytes_, file, CHANNEL_HEADER_BYTES) ||
            !put_in_place(ring_ + ring_bytes_, ring_bytes_, file, CHANNEL_HEADER_BYTES) ||
            (kept_ && !put_in_place(kept_, KEPT_BUFFERS * KEPT_BYTES, file, off_t(CHANNEL_HEADER_BYTES + ring_bytes_))))
            return false;
        key_ = key, wait_us_ = wait_us, stuck_at_ = ~uint64_t(0);
        return true;
    }
    // Maps memory of a file, or private memory if there is none, over what is mapped there.
    static bool put_in_place(void *at, size_t bytes, int file, off_t offset) {
        int kind = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
        return mmap(at, bytes, PROT_READ | PROT_WRITE, kind | MAP_FIXED, file, offset) != MAP_FAILED;
    }
    bool take(size_t whole, uint64_t &position) {
        uint64_t deadline_ns = 0;
        for (;;) {
            position = header_->produced.load(std::memory_order_relaxed);
            uint64_t consumed = header_->consumed.load(std::memory_order_acquire);
            if (position + whole - consumed <= ring_bytes_) {
                if (header_->produced.compare_exchange_weak(position, position + whole, std::memory_order_acq_rel))
                    return true;
                continue;
            }
            // A wait that failed is not repeated until the reader has consumed something.
            if (consumed == stuck_at_.load(std::memory_order_relaxed)) return false;
            uint64_t now_ns = monotonic_ns();
            if (!deadline_ns) deadline_ns = now_ns + uint64_t(wait_us_) * 1000;
            if (now_ns >= deadline_ns || connection_.is_gone()) {
                stuck_at_.store(consumed, std::memory_order_relaxed);
                return false;
            }
            timespec pause{0, 50000};
            nanosleep(&pause, nullptr);
        }
    }

    Connection connection_;
    ChannelHeader *header_ = nullptr;
    char *ring_ = nullptr;
    uint8_t *kept_ = nullptr;
    std::atomic<InFlight *> in_flight_{nullptr};
    uint64_t ring_bytes_ = 0, key_ = 0;
    uint32_t wait_us_ = 0;
    std::atomic<uint64_t> stuck_at_{~uint64_t(0)};
};

}  // namespace tracepipe
