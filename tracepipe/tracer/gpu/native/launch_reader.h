// SPDX-License-Identifier: MIT
// Reads what the patches wrote for the launches of a context, and sends it.
//
// A launch has ended when all lanes of all its warps have exited, or when the program has waited for it. The
// records show this without events and callbacks. Memory that was read is set to zero for the next launch.
#pragma once
#include <functional>

#include "context.h"

namespace tracepipe {

class LaunchReader {
  public:
    static constexpr size_t STAGING_BYTES = 16u << 20;

    // `code_at` returns the name of the kernel that begins at an address, 0 if it is not known; `name_of` the
    // number of a mark's name.
    LaunchReader(Channel &channel, std::function<uint64_t(uint64_t)> code_at,
                 std::function<uint64_t(const MarkRecord &)> name_of)
        : channel_(channel), code_at_(std::move(code_at)), name_of_(std::move(name_of)) {}

    // Reads the launches that have ended or, if it is late, all.
    void read(Context &context, bool is_late) {
        std::vector<LaunchPointer> todo = context.pending(MANY);
        reading_ = &context;
        for (size_t at = 0; at < todo.size() && !context.is_dead;) {
            auto is_small = [&](const Launch &launch) { return !launch.is_shared && launch.bytes() <= SMALL_BYTES; };
            size_t past = at + 1;
            if (is_small(*todo[at]))
                while (past < todo.size() && is_small(*todo[past]) &&
                       todo[past]->offset == todo[past - 1]->offset + todo[past - 1]->bytes() &&
                       todo[past]->offset + todo[past]->bytes() - todo[at]->offset <= STAGING_BYTES)
                    past++;
            Launch &launch = *todo[at];
            are_marks_read_ = false;
            bool is_drained = launch.is_shared   ? drain_shared(context, launch, is_late)
                              : is_small(launch) ? drain_span(context, &todo[at], past - at, is_late)
                                                 : drain_large(context, launch, is_late);
            context.give_back(&todo[at], past - at);
            if (!is_drained) fail(context);
            at = past;
        }
        for (MarkRings *rings : {context.marks.rings(), context.calls.rings()}) {
            if (!rings) continue;
            if (context.is_empty()) rings->forget();
            LostRecord lost{0, uint32_t(context.device), LOST_MARKS, std::exchange(rings->lost, 0)};
            if (lost.warps) channel_.put(KIND_LOST_WARPS, &lost, sizeof lost);
        }
    }
    void fail(Context &context) {
        context.is_dead = true;
        lose(context, LOST_FAILED);
    }
    // Reports all launches that were not read as lost.
    void lose(Context &context, Lost why) {
        std::vector<LaunchPointer> pending = context.pending(~size_t(0));
        for (LaunchPointer &launch : pending) {
            if (!launch->is_cancelled && !launch->is_reported) {
                channel_.put(KIND_KERNEL, &launch->record, sizeof launch->record);
                lost(launch->record, why, launch->record.warps);
            }
            launch->sent(channel_);
            launch->is_done = true;
        }
        context.give_back(pending.data(), pending.size());
    }

    // Whether a driver call succeeded; if not, the user gets a message.
    bool works(CUresult result, const char *function) {
        if (result != CUDA_SUCCESS)
            channel_.note(std::string(function) + " failed with CUresult " + std::to_string(int(result)) +
                          ": no more warps are recorded in this context");
        return result == CUDA_SUCCESS;
    }

  private:
    static constexpr size_t SMALL_BYTES = DeviceMemory::SMALL_BYTES;
    static constexpr size_t MANY = 4096;

    // Adjacent launches are read with one copy.
    bool drain_span(Context &context, LaunchPointer *launches, size_t count, bool is_late) {
        uint64_t start = launches[0]->offset;
        uint64_t bytes = launches[count - 1]->offset + launches[count - 1]->bytes() - start;
        if (!copy(context, context.staging, start, bytes)) return false;
        std::vector<Launch *> drained;
        for (size_t at = 0; at < count; at++) {
            Launch &launch = *launches[at];
            const char *region = context.staging + (launch.offset - start);
            const auto *exits = reinterpret_cast<const Exit *>(region + launch.exits_offset());
            uint64_t made = reinterpret_cast<const Region *>(region)->exits;
            Drained records{
                reinterpret_cast<const Warp *>(region + sizeof(Region)), launch.recorded, {}, launch.first_warp};
            records.exits.assign(exits, exits + std::min(made, launch.exits_room()));
            if (!launch.is_cancelled) {
                sort_exits(records.exits);
                Seen seen = look(records);
                bool has_all_exits = std::min(made, launch.exits_room()) == records.exits.size();
                if (!is_ready(launch, seen, has_all_exits, is_late)) continue;
                send_kernel(launch.record, seen);
                launch.sent_kernel(channel_);
                send_warps(launch.record, records);
                count_lost(launch, seen, made);
            }
            launch.sent(channel_);
            drained.push_back(&launch);
        }
        // Launches that have not ended keep their records. If all have, as usual, one call sets the memory to
        // zero.
        if (drained.size() == count) {
            if (!zero(context, start, bytes)) return false;
        } else {
            for (Launch *launch : drained)
                if (!zero(context, launch->offset, launch->bytes())) return false;
        }
        if (drained.empty()) return true;
        if (!works(driver().streamSynchronize(context.stream), "cuStreamSynchronize")) return false;
        for (Launch *launch : drained) launch->is_done = true;
        return true;
    }
    // Reads in pieces of the staging memory; twice if there are several, as a launch is sent only when it is
    // complete.
    bool drain_large(Context &context, Launch &launch, bool is_late) {
        constexpr uint64_t A_PIECE = STAGING_BYTES / sizeof(Warp) / WARPS_A_BATCH * WARPS_A_BATCH;
        uint64_t made = 0, sent = 0;
        if (!launch.is_cancelled) {
            if (!launch.is_over && !is_late) {
                // The last warp is among the last to end: before that, the rest need not be copied.
                Warp last;
                uint64_t at = launch.offset + exits_offset(launch.recorded) - sizeof last;
                if (!copy(context, &last, at, sizeof last)) return false;
                if (!last.exit_ns && !last.partial_mask) return true;
            }
            Region region;
            if (!copy(context, &region, launch.offset, sizeof region)) return false;
            made = region.exits, sent = std::min(made, launch.exits_room());
            std::vector<Exit> exits(sent);
            if (!copy(context, exits.data(), launch.offset + launch.exits_offset(), sent * sizeof(Exit))) return false;
            sort_exits(exits);
            bool has_all_exits = exits.size() == sent;
            auto piece = [&](uint64_t from, Drained &records) {
                uint64_t count = std::min(A_PIECE, launch.recorded - from);
                records = {reinterpret_cast<const Warp *>(context.staging), count, {}, launch.first_warp + from};
                auto first = std::lower_bound(exits.begin(), exits.end(), from,
                                              [](const Exit &exit, uint64_t warp) { return exit.warp < warp; });
                for (; first != exits.end() && first->warp < from + count; ++first) {
                    records.exits.push_back(*first);
                    records.exits.back().warp -= from;
                }
                return copy(context, context.staging, launch.offset + sizeof(Region) + from * sizeof(Warp),
                            count * sizeof(Warp));
            };
            Seen seen;
            Drained records{};
            for (uint64_t from = 0; from < launch.recorded; from += A_PIECE) {
                if (!piece(from, records)) return false;
                seen.add(look(records));
            }
            if (!is_ready(launch, seen, has_all_exits, is_late)) return true;
            send_kernel(launch.record, seen);
            launch.sent_kernel(channel_);
            for (uint64_t from = 0; from < launch.recorded; from += A_PIECE) {
                if (launch.recorded > A_PIECE && !piece(from, records)) return false;
                send_warps(launch.record, records);
            }
            count_lost(launch, seen, made);
        }
        launch.sent(channel_);
        if (!zero(context, launch.offset, launch.exits_offset() + sent * sizeof(Exit))) return false;
        return end(context, launch);
    }
    bool drain_shared(Context &context, Launch &launch, bool is_late) {
        Region region{};
        if (!launch.is_cancelled) {
            if (!launch.is_closed.load(std::memory_order_acquire) && !is_late) return true;
            if (!copy(context, &region, launch.offset, sizeof region)) return false;
            bool is_final = launch.is_over || is_late;
            if (!is_final && (launch.launches_kernels || region.entries < launch.expected)) return true;
            uint64_t count = std::min<uint64_t>(region.entries, launch.recorded);
            std::vector<Entry> entries(count);
            std::vector<Exit> exits(std::min<uint64_t>(region.exits, launch.recorded));
            if (!copy(context, entries.data(), launch.offset + ENTRIES_OFFSET, count * sizeof(Entry)) ||
                !copy(context, exits.data(), launch.offset + launch.exits_offset(), exits.size() * sizeof(Exit)))
                return false;
            if (!send_shared(launch, region, entries, exits, is_final)) return true;
        }
        launch.sent(channel_);
        uint64_t used = std::min<uint64_t>(region.entries, launch.recorded);
        if (!zero(context, launch.offset, ENTRIES_OFFSET + used * sizeof(Entry)) ||
            !zero(context, launch.offset + launch.exits_offset(),
                  std::min<uint64_t>(region.exits, launch.recorded) * sizeof(Exit)))
            return false;
        return end(context, launch);
    }
    // False if more records are to come.
    bool send_shared(Launch &launch, const Region &region, const std::vector<Entry> &entries,
                     const std::vector<Exit> &exits, bool is_final) {
        std::vector<SharedKernel> kernels = kernels_of(entries.data(), entries.size(), exits, launch.nodes);
        std::vector<Seen> seen;
        uint64_t whole = 0, expected = 0, begun = 0;
        for (SharedKernel &kernel : kernels) {
            seen.push_back(look({kernel.warps.data(), kernel.warps.size(), kernel.exits, 0, kernel.index.data()}));
            whole += seen.back().whole;
        }
        if (!is_final && whole < launch.expected) return false;
        uint64_t parents = 0;
        for (const Node &node : launch.nodes) {
            expected += node.is_selected ? node.record.warps : 0;
            parents += node.is_selected && node.launches_kernels ? node.record.warps : 0;
        }
        for (size_t at = 0; at < kernels.size(); at++) {
            SharedKernel &kernel = kernels[at];
            if (kernel.node && !kernel.node->is_selected) continue;
            LaunchRecord record = kernel.node ? kernel.node->record : launched_by_kernel(launch, kernel);
            if (kernel.node) begun += seen[at].begun;
            // A node that has already run in this launch counts as another kernel.
            if (at && kernel.node && kernels[at - 1].grid_id == kernel.grid_id) record.launch = channel_.next_launch();
            send_kernel(record, seen[at]);
            if (kernel.node) launch.sent_kernel(channel_);
            send_warps(record, {kernel.warps.data(), kernel.warps.size(), std::move(kernel.exits), launch.first_warp,
                                kernel.index.data()});
        }
        launch.is_reported = true;
        uint64_t beyond = region.entries - entries.size(), missing = expected - std::min(begun, expected);
        lost(launch.record, LOST_NO_MEMORY, beyond);
        missing -= std::min(beyond, missing);
        lost(launch.record, LOST_PARENT, std::min(parents, missing));
        missing -= std::min(parents, missing);
        lost(launch.record, launch.is_over ? LOST_NOT_SEEN : LOST_UNFINISHED, missing);
        lost(launch.record, LOST_EXITS, region.exits - exits.size());
        return true;
    }
    LaunchRecord launched_by_kernel(const Launch &launch, const SharedKernel &kernel) {
        LaunchRecord record = launch.record;
        record.launch = channel_.next_launch();
        record.name = code_at_(kernel.pc);
        memcpy(record.grid, kernel.grid, sizeof record.grid);
        memcpy(record.block, kernel.block, sizeof record.block);
        memset(record.cluster, 0, sizeof record.cluster);
        record.launched_by = BY_KERNEL;
        record.registers = record.static_shared_bytes = 0;
        record.warps = kernel.warps.size();
        return record;
    }
    bool end(Context &context, Launch &launch) {
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

    // Whether no more records will come.
    static bool is_ready(const Launch &launch, const Seen &seen, bool has_all_exits, bool is_late) {
        return (seen.whole == launch.recorded && has_all_exits) || launch.is_over || is_late;
    }
    void send_kernel(const LaunchRecord &launch, const Seen &seen) {
        LaunchRecord record = launch;
        record.start_ns = seen.begun ? seen.first_ns : 0;
        record.end_ns = seen.begun ? seen.last_ns : 0;
        record.begun = seen.begun;
        record.whole = seen.whole;
        channel_.put(KIND_KERNEL, &record, sizeof record);
    }
    void send_warps(const LaunchRecord &launch, const Drained &records) {
        columns_.send(
            launch.launch, records,
            [&](size_t bytes, uint64_t warps) { return channel_.reserve(KIND_WARPS, bytes, warps); },
            [&](void *payload) { channel_.commit(payload); }, marks());
    }
    // The marks up to now, read once for launches that are drained together, after they have ended.
    Marks marks() {
        Marks marks{reading_->marks.rings(), reading_->calls.rings()};
        for (MarkedMemory *memory : {&reading_->marks, &reading_->calls})
            if (memory->rings() && !are_marks_read_ && !works(memory->read(reading_->stream, name_of_), "reading marks"))
                return {};
        are_marks_read_ = true;
        return marks;
    }
    void count_lost(Launch &launch, const Seen &seen, uint64_t exits_made) {
        launch.is_reported = true;
        lost(launch.record, LOST_NO_MEMORY, launch.record.warps - launch.recorded);
        lost(launch.record, launch.is_over ? LOST_NOT_SEEN : LOST_UNFINISHED, launch.recorded - seen.begun);
        if (exits_made <= launch.exits_room()) return;
        lost(launch.record, LOST_EXITS, exits_made - launch.exits_room());
        if (launch.room < MOST_ROOM) launch.kernel->needed_room = uint32_t(launch.room + 1);
    }
    void lost(const LaunchRecord &launch, Lost why, uint64_t warps) {
        if (!warps) return;
        LostRecord record{launch.launch, launch.gpu, why, warps};
        channel_.put(KIND_LOST_WARPS, &record, sizeof record);
    }

    Channel &channel_;
    std::function<uint64_t(uint64_t)> code_at_;
    std::function<uint64_t(const MarkRecord &)> name_of_;
    WarpColumns columns_;
    Context *reading_ = nullptr;
    bool are_marks_read_ = false;
};

}  // namespace tracepipe
