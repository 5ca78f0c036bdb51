// Puts records into a channel as the injection library does, without a GPU.
//
//   producer many N       N records of kind 20 from each of 4 threads: | thread u32 | number u32 | (number × 7) % 290 bytes |
//   producer torn         one committed, one reserved and never committed, one committed
//   producer launch       a launch of 8001 warps whose records were made up, and its columns
#include <thread>

#include "warp_columns.h"

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
    LaunchRecord record{7, 1, 0, 0, {8001, 1, 1}, {8, 1, 1}, {1, 1, 1}, 5, 6, 0, seen.first_ns, seen.last_ns,
                        8001, seen.begun, seen.whole};
    uint64_t name = 1;
    channel.put(KIND_NAME, &name, 8, "void f<int>(int*)");
    channel.put(KIND_KERNEL, &record, sizeof record);
    WarpColumns().send(
        7, drained, [&](size_t bytes, uint64_t count) { return channel.reserve(KIND_WARPS, bytes, count); },
        [&](void *payload) { channel.commit(payload); });
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
}
