// Puts records into a channel as the injection library does, without a GPU.
//
//   producer many N       N records of kind 20 from each of 4 threads: | thread u32 | number u32 | (number × 7) % 290 bytes |
//   producer torn         one committed, one reserved and never committed, one committed
//   producer launch       a launch of 8001 warps whose records were made up, and its columns
//   producer plain        one of 100 warps of 8 lanes each, which all leave together
//   producer shared       a graph of two nodes that ran a loop, and a kernel that one of them launched
//   producer marks        one of three warps, two of them in one slot, and what they marked in its ring
//   producer calls        one warp, the device functions that it called, and a mark
//   producer until_over   records until the recording is over, one more, the end of the connection; then it waits
//                         for the end of its input
//   producer fork         a record from the process, and the end of it; its child goes on until the end of its input
//   producer forged       what a program may do to its own memory: 8 MB of records, each counter anything before each
#include <cstdio>
#include <thread>

#include <tracepipe/mark.h>

#include "shared_launch.h"

using namespace tracepipe;

static void many(Channel &channel, unsigned count) {
    std::vector<std::thread> threads;
    for (uint32_t thread = 0; thread < 4; thread++)
        threads.emplace_back([&, thread] {
            std::vector<char> filler(290, char('a' + thread));
            for (uint32_t number = 0; number < count; number++) {
                uint32_t head[] = {thread, number};
                channel.put(20, head, sizeof head, {filler.data(), number * 7 % 290});
            }
        });
    for (auto &thread : threads) thread.join();
}
static void send(Channel &channel, const LaunchRecord &record, const Drained &drained) {
    channel.put(KIND_KERNEL, &record, sizeof record);
    WarpColumns().send(
        record.launch, drained,
        [&](size_t bytes, uint64_t warps) { return channel.reserve(KIND_WARPS, bytes, warps); },
        [&](void *payload) { channel.commit(payload); });
}
static void launch(Channel &channel) {
    std::vector<Warp> warps(8001);
    Drained drained{warps.data(), warps.size(), {}};
    for (uint64_t at = 0; at < warps.size(); at++) {
        Warp &warp = warps[at];
        warp.entry_ns = 1000000 + at * 32;
        warp.entry_clk = (uint64_t(1) << 33) + at;
        warp.place = uint32_t(at % 132 | at % 64 << 16);
        warp.entry_mask = ALL_LANES;
        warp.exit_ns = warp.entry_ns + 500;
        warp.exit_clk = warp.entry_clk + 900;
    }
    warps[8000].entry_mask = 0xff;  // the last of a block
    warps[3].partial_mask = 0xff;   // left apart: first here, then what the Exits have, in no order
    drained.exits = {{1000096 + 800, (uint64_t(1) << 33) + 3 + 1400, 3, 0xff000000, 0},
                     {1000096 + 700, (uint64_t(1) << 33) + 3 + 1200, 3, 0x00ffff00, 0},
                     {0, 0, 0, 0, 0}};  // claimed and not yet written
    sort_exits(drained.exits);
    Seen seen = look(drained);
    LaunchRecord record{7, 1, 0, 0, {8001, 1, 1}, {8, 1, 1}, {1, 1, 1}, 5, 6, BY_CALL, seen.first_ns, seen.last_ns,
                        8001, seen.begun, seen.whole, 0, 0, 0};
    uint64_t name = 1;
    channel.put(KIND_NAME, &name, 8, "void f<int>(int*)");
    send(channel, record, drained);
}
static void plain(Channel &channel) {
    std::vector<Warp> warps(100);
    for (uint64_t at = 0; at < warps.size(); at++)
        warps[at] = {5000 + at, 7000 + at, uint32_t(at % 3 | at << 16), 0xff, 0, 0, 6000 + 2 * at, 8000 + 2 * at};
    LaunchRecord record{3, 1, 0, 0, {100, 1, 1}, {8, 1, 1}, {}, 5, 6, BY_CALL, 5000, 6198, 100, 100, 100, 0, 0, 0};
    send(channel, record, {warps.data(), warps.size(), {}, 40});
}
static void shared(Channel &channel) {
    auto entry = [](uint64_t grid_id, uint64_t index, uint64_t begin_ns, uint32_t grid, uint32_t partial = 0) {
        Warp warp{begin_ns, begin_ns * 2, uint32_t(index), ALL_LANES, partial, 0, begin_ns + 10, begin_ns * 2 + 20};
        return Entry{warp, grid_id, index, 0x100 * grid_id, {grid, 1, 1}, {32, 1, 1}};
    };
    // As they were appended: two warps of grid 2, one of them diverging; grid 3, twice; a child; one not written.
    std::vector<Entry> entries{entry(2, 1, 1000, 2), entry(2, 0, 1001, 2, 0xff), entry(3, 0, 1100, 1),
                               entry(3, 0, 1200, 1), entry(~uint64_t(0), 0, 1150, 1), Entry{}};
    std::vector<Exit> exits{{1040, 2100, 1, 0xffffff00, 0}};
    std::vector<Node> nodes(2);
    nodes[0].grid_id = 2, nodes[0].record.launch = 10;
    nodes[1].grid_id = 3, nodes[1].record.launch = 11;
    uint64_t child = 20;
    for (const SharedKernel &kernel : kernels_of(entries.data(), entries.size(), exits, nodes)) {
        Drained drained{kernel.warps.data(), kernel.warps.size(), kernel.exits, 0, kernel.index.data()};
        Seen seen = look(drained);
        LaunchRecord record{};
        record.launch = kernel.node ? kernel.node->record.launch : child++;
        record.name = kernel.pc;
        record.launched_by = kernel.node ? BY_GRAPH : BY_KERNEL;
        memcpy(record.grid, kernel.grid, sizeof record.grid);
        memcpy(record.block, kernel.block, sizeof record.block);
        record.start_ns = seen.first_ns, record.end_ns = seen.last_ns;
        record.warps = record.begun = seen.begun, record.whole = seen.whole;
        send(channel, record, drained);
    }
}

// The marks of some slots as a GPU writes them.
class MarkingGpu {
  public:
    explicit MarkingGpu(uint32_t slots) : counts_(slots), records_(size_t(slots) * MARK_RING) {}
    void mark(uint32_t slot, uint64_t low, uint64_t high, uint64_t clk) {
        uint32_t count = counts_[slot]++;
        high |= uint64_t(count / MARK_RING) << MARK_LAP_SHIFT;
        records_[slot * MARK_RING + count % MARK_RING] = {low | clk, high};
    }
    // A call of a device function by some lanes, or its return.
    void call(uint32_t slot, uint64_t name, uint32_t lanes, uint64_t clk, uint64_t is_return = 0) {
        uint64_t high = uint64_t(lanes) << CALL_LANES_SHIFT | name << CALL_NAME_SHIFT;
        mark(slot, is_return << MARK_CLOCK_BITS, high, clk);
    }
    template <typename NumberOf> void read(MarkRings &rings, NumberOf number_of) {
        for (uint32_t slot = 0; slot < counts_.size(); slot++)
            if (rings.has_new(slot, counts_[slot]))
                rings.add(slot, counts_[slot], counts_[slot], &records_[slot * MARK_RING], number_of);
    }

  private:
    std::vector<uint32_t> counts_;
    std::vector<MarkRecord> records_;
};
#define BEGIN(name) TRACEPIPE_MARK_LOW_(name), TRACEPIPE_MARK_HIGH_(name)
#define END(name) TRACEPIPE_MARK_LOW_(name) | 1ull << MARK_CLOCK_BITS, TRACEPIPE_MARK_HIGH_(name)
static void marks(Channel &channel) {
    std::vector<std::string> names;
    auto number_of = [&](const MarkRecord &mark) {
        std::string name = mark_name(mark);
        auto known = std::find(names.begin(), names.end(), name);
        uint64_t id = 100 + (known - names.begin());
        if (known == names.end()) names.push_back(name), channel.put(KIND_NAME, &id, 8, name);
        return id;
    };
    MarkingGpu gpu(3 * MARK_SLOTS);
    MarkRings rings(3 * MARK_SLOTS);
    uint32_t slot = 2 * MARK_SLOTS + 5, other = 1 * MARK_SLOTS;
    gpu.mark(slot, BEGIN(stale), 500);  // of a warp that is not recorded
    gpu.mark(slot, BEGIN(load), 1000), gpu.mark(slot, END(load), 1100);
    gpu.mark(slot, BEGIN(mma), 1100), gpu.mark(slot, BEGIN(load), 1150), gpu.mark(slot, END(mma), 1300);
    gpu.read(rings, number_of);
    gpu.mark(slot, END(load), 1400), gpu.mark(slot, END(unknown), 1450);
    gpu.mark(slot, BEGIN(Store_0123456), 2200);  // of the warp that had the slot next, and is still at it when it leaves
    gpu.read(rings, number_of);
    for (uint64_t clk = 0; clk < MARK_RING + 2; clk++)
        gpu.mark(other, BEGIN(overwritten), 3000 + clk);
    gpu.mark(other, END(overwritten), 3000 + MARK_RING + 100);
    gpu.read(rings, number_of);
    Warp first{10000, 1000, 2 | 5 << 16, ALL_LANES, 0, 0, 10500, 2000};
    Warp second{10600, 2100, 2 | 5 << 16, ALL_LANES, 0, 0, 10900, 2500};
    Warp third{10000, 3000, 1 | 0 << 16, ALL_LANES, 0, 0, 10500, 3000 + 2 * MARK_RING};
    Warp none{10000, 3000, 1 | 63 << 16, ALL_LANES, 0, 0, 10500, 3500};
    std::vector<Warp> warps{first, second, third, none};
    LaunchRecord record{3, 1, 0, 0, {4, 1, 1}, {32, 1, 1}, {}, 5, 6, BY_CALL, 10000, 10900, 4, 4, 4, 0, 0, 0};
    channel.put(KIND_KERNEL, &record, sizeof record);
    WarpColumns().send(
        record.launch, {warps.data(), warps.size(), {}},
        [&](size_t bytes, uint64_t count) { return channel.reserve(KIND_WARPS, bytes, count); },
        [&](void *payload) { channel.commit(payload); }, {&rings});
    LostRecord lost{record.launch, 0, LOST_MARKS, rings.lost};
    channel.put(KIND_LOST_WARPS, &lost, sizeof lost);
}

// Calls of device functions by a warp whose lanes part: they return, recurse and leave as an H200 showed it.
static void calls(Channel &channel) {
    const char *const names[] = {"outer(float)", "inner(float)", "tree(float, int)", "leaves(float*)", "stays()", "lost()"};
    enum : uint64_t { OUTER = 1, INNER, TREE, LEAVES, STAYS, LOST };
    for (uint64_t id = OUTER; id <= LOST; id++) channel.put(KIND_NAME, &id, 8, names[id - 1]);
    MarkingGpu gpu(MARK_SLOTS), marking(MARK_SLOTS);
    MarkRings rings(MARK_SLOTS), written(MARK_SLOTS);
    uint32_t slot = 5, all = ALL_LANES;
    gpu.call(slot, OUTER, all, 1000), gpu.call(slot, INNER, all, 1100);
    gpu.call(slot, INNER, 1, 1200, 1), gpu.call(slot, INNER, ~1u, 1250, 1), gpu.call(slot, OUTER, all, 1300, 1);
    gpu.call(slot, TREE, all, 1400), gpu.call(slot, TREE, 0xeeeeeeee, 1410), gpu.call(slot, TREE, 0xcccccccc, 1420);
    gpu.call(slot, TREE, 0x77777777, 1430, 1), gpu.call(slot, TREE, 0x88888888, 1440, 1);
    gpu.call(slot, TREE, 0xcccccccc, 1450, 1), gpu.call(slot, TREE, 0xeeeeeeee, 1460, 1);
    gpu.call(slot, LEAVES, all, 1500), gpu.call(slot, LEAVES, 0x00ffffff, 1700, 1);
    gpu.call(slot, STAYS, 0x00ffffff, 1800), gpu.call(slot, LOST, 0x00ffffff, 1900, 1);
    marking.mark(slot, BEGIN(load), 1150), marking.mark(slot, END(load), 1160);
    gpu.read(rings, [](const MarkRecord &mark) { return mark.called(); });
    marking.read(written, [&](const MarkRecord &mark) {
        uint64_t id = 100;
        channel.put(KIND_NAME, &id, 8, mark_name(mark));
        return id;
    });
    std::vector<Warp> warps{{10000, 900, 5 << 16, ALL_LANES, 0xff000000, 0, 10500, 1600}};
    std::vector<Exit> exits{{10900, 2000, 0, 0x00ffffff, 0}};
    LaunchRecord record{3, 1, 0, 0, {1, 1, 1}, {32, 1, 1}, {}, 5, 6, BY_CALL, 10000, 10900, 1, 1, 1, 0, 0, 0};
    channel.put(KIND_KERNEL, &record, sizeof record);
    WarpColumns().send(
        record.launch, {warps.data(), warps.size(), exits},
        [&](size_t bytes, uint64_t count) { return channel.reserve(KIND_WARPS, bytes, count); },
        [&](void *payload) { channel.commit(payload); }, {&written, &rings});
    LostRecord lost{record.launch, 0, LOST_MARKS, written.lost + rings.lost};
    channel.put(KIND_LOST_WARPS, &lost, sizeof lost);
}

static void wait_for_input() {
    while (getchar() != EOF) {
    }
}
static void until_over(Channel &channel) {
    puts("begun");
    fflush(stdout);
    timespec pause{0, 1'000'000};
    for (; !channel.is_over(); nanosleep(&pause, nullptr)) channel.put(20, "record", 6);
    channel.put(20, "last", 4);
    channel.close();
    puts("over");
    fflush(stdout);
    wait_for_input();
}
static void fork_and_go(Channel &channel) {
    channel.put(20, "parent", 6);
    if (fork() != 0) return;
    channel.put(20, "child", 5);
    puts(channel.is_over() ? "alone" : "connected");
    fflush(stdout);
    wait_for_input();
}
// The header's words from `ring bytes` to the last counter, by a generator of its own.
static void forged(Channel &channel, const char *seed) {
    uint64_t state = strtoull(seed, nullptr, 10) * 2 + 1;
    auto next = [&] { return state ^= state << 13, state ^= state >> 7, state ^= state << 17; };
    auto *words = static_cast<std::atomic<uint64_t> *>(channel.header());
    for (uint64_t put = 0; put < 8u << 20;) {
        uint64_t at = next() % 88;
        words[at] = next() % 2 ? next() : next() % (1 << 17);
        size_t length = next() % 4000;
        put += length;
        std::vector<char> payload(length, 'x');
        channel.put(uint16_t(next()), payload.data(), length);
    }
}

int main(int count, char **arguments) {
    Channel channel;
    if (count < 2 || !channel.open()) return 3;
    std::string_view what = arguments[1];
    if (what == "many") many(channel, unsigned(atoi(arguments[2])));
    if (what == "torn") {
        channel.put(20, "before", 6);
        memset(channel.reserve(20, 100), 'x', 50);
        channel.put(20, "after", 5);
    }
    if (what == "launch") launch(channel);
    if (what == "plain") plain(channel);
    if (what == "shared") shared(channel);
    if (what == "marks") marks(channel);
    if (what == "calls") calls(channel);
    if (what == "until_over") until_over(channel);
    if (what == "fork") fork_and_go(channel);
    if (what == "forged") forged(channel, arguments[2]);
}
