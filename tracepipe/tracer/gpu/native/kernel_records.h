// SPDX-License-Identifier: MIT
// The records of the engine `kernels`: kinds 38 to 48 of transport.h.
//
// The payload of kinds 41 to 44 and 47 is an array of the struct of that name. All integers are
// little-endian, without further padding; kernels.py has the same layouts. Times are ns on the clock
// that HELLO states. `correlation` is CUPTI's number of the API call that requested the work, unique in its
// process.
#pragma once
#include <cstdint>

namespace tracepipe {

enum KernelKind : uint16_t {
    KIND_NODE = 38,       // Node: a node of a CUDA graph was made
    KIND_LAYOUT = 39,     // Layout, a record, and Field[]: how CUPTI's records of a kind become others
    KIND_HELLO = 40,      // one Hello: a process loaded the library
    KIND_KERNEL = 41,     // Kernel[]
    KIND_COPY = 42,       // Copy[]
    KIND_SET = 43,        // Set[]
    KIND_CALL = 44,       // Call[]
    KIND_CALL_NAME = 45,  // | domain u32 | cbid u32 | text: the function of calls of this pid; dropped: its calls are not seen
    KIND_ANY = 46,        // never put; counts records that CUPTI itself dropped
    KIND_MEMORY = 47,     // Memory[]
    KIND_TAKEN = 48,      // | until_ns u64 | noticed_ns u64 |: another profiler took CUPTI; records came until then
};

enum Clock : uint32_t { CLOCK_IS_MONOTONIC = 0, CLOCK_IS_REALTIME = 1 };

// A reading of CUPTI's clock between two readings of the clock that it is set to.
struct Hello {
    uint32_t cupti_version, clock;
    uint64_t before_ns, cupti_ns, after_ns;
};

struct Kernel {
    uint64_t start_ns, end_ns;
    uint64_t name;  // id of a NAME record: the name's address in 48 bits, and above them how many were sent before
    uint64_t graph_node;
    uint32_t gpu, context, stream, correlation;
    uint32_t grid[3], block[3], cluster[3];
    uint32_t static_shared_bytes, dynamic_shared_bytes, registers;
    uint32_t graph, is_device_launched;
    uint32_t shared_config_bytes;  // shared memory of an SM as the program has configured it, 0 if it has not
    uint32_t clusters;             // the most clusters of this launch that the GPU holds at a time, 0 if unknown
};

struct Copy {
    uint64_t start_ns, end_ns, size_bytes;
    uint64_t graph_node;
    uint32_t gpu, context, stream, correlation;
    uint32_t graph, to_gpu;
    uint8_t direction, from_kind, to_kind, flags;  // CUpti_ActivityMemcpyKind, …MemoryKind, …Flag
    uint32_t zero;
};

struct Set {
    uint64_t start_ns, end_ns, size_bytes;
    uint64_t graph_node;
    uint32_t gpu, context, stream, correlation;
    uint32_t graph, value, memory_kind, zero;
};

struct Call {
    uint64_t start_ns, end_ns;
    uint64_t stack;  // number of a STACK record, 0 without one
    uint32_t domain, cbid, tid, correlation, result;  // domain: 1 driver, 2 runtime
    uint32_t context, stream, event;  // of a call that records an event or waits; each ~0 without one
};

// A node that a thread made, or a clone of an earlier one, as each executable graph has of its nodes; or a node that
// does from now on what another one says.
struct Node {
    uint64_t node, original;  // numbers of nodes, unique in the process; original: 0 if it is no clone
    uint64_t stack;           // of the thread that made it, 0 without one; STACK_OF_AUTOGRAD; of a clone 0 or NODE_UPDATED
};
constexpr uint64_t NODE_UPDATED = 1;

// Memory that a call allocated or freed.
struct Memory {
    uint64_t time_ns, size_bytes, address;
    uint32_t gpu, context, stream, correlation;  // stream: ~0 if the call has none
    uint32_t operation, memory_kind;             // CUpti_ActivityMemoryOperationType, …MemoryKind
};

// The capture process reads the buffers that a dead process has left as this library would: a record of CUPTI, of
// `bytes`, becomes one of `kind`, 0 if none, from the given one, with its fields in place.
struct Layout {
    uint32_t cupti_kind, bytes, kind, record_bytes;
};
struct Field {
    uint16_t from, to, bytes, zero;
};

static_assert(sizeof(Hello) == 32 && sizeof(Kernel) == 112 && sizeof(Copy) == 64);
static_assert(sizeof(Node) == 24);
static_assert(sizeof(Set) == 64 && sizeof(Call) == 56 && sizeof(Memory) == 48);

}  // namespace tracepipe
