// The stacks of Python as a library that Python calls.
#include "call_stacks.h"

using namespace tracepipe;

static Channel &channel = *new Channel;
static PythonStacks &stacks = *new PythonStacks;
static CallStacks &calls = *new CallStacks;

extern "C" int begin() { return channel.open() && stacks.open() && calls.open(); }
// The number of the stack that calls this, 0 where it has none.
extern "C" uint64_t here() { return stacks.here(channel, monotonic_ns()); }
// As CUPTI asks for a time.
extern "C" uint64_t note() {
    uint64_t now_ns = monotonic_ns();
    calls.note(now_ns, channel);
    return now_ns;
}
extern "C" void collect() { calls.collect(); }
extern "C" uint64_t at(uint64_t time_ns) { return calls.at(thread_id(), time_ns); }
