// The stacks of Python as a library that Python calls.
#include "python_stacks.h"

using namespace tracepipe;

static Channel &channel = *new Channel;
static PythonStacks &stacks = *new PythonStacks;

extern "C" int begin() { return channel.open() && stacks.open(); }
// The number of the stack that calls this, 0 where it has none.
extern "C" uint64_t here() { return stacks.here(channel, monotonic_ns()); }
