// SPDX-License-Identifier: MIT
// What a CUDA function means for the engines, by its name.
#pragma once
#include <cstdint>
#include <cstring>

namespace tracepipe {

enum CallFlag : uint16_t {
    CALL_KNOWN = 1,
    CALL_LAUNCHES = 2,
    CALL_ENDS_CONTEXT = 4,
    CALL_NAMES_KERNEL = 8,
    CALL_WAITS = 16,  // for the GPU, without giving it work
    CALL_BEGINS_CAPTURE = 32,
    CALL_ENDS_CAPTURE = 64,
    CALL_LEFT_OUT = 128,  // not recorded, by call_choice.h
    CALL_UNLOADS = 256,
    CALL_ENDS_STREAM = 512,
    CALL_HAS_STACK = 1024,  // its stack is worth the cost: it launches, copies, sets or allocates
    CALL_ENDS_GRAPH = 2048,
    CALL_UPDATES_GRAPH = 4096,
};

inline uint16_t call_flags(bool is_runtime, const char *function) {
    auto begins = [&](const char *start) { return strncmp(function, start, strlen(start)) == 0; };
    uint16_t flags = CALL_KNOWN;
    bool is_host = begins("cuLaunchHostFunc") || begins("cudaLaunchHostFunc");
    if (!is_runtime && (begins("cuLaunch") || begins("cuGraphLaunch")) && !is_host) flags |= CALL_LAUNCHES;
    if ((begins("cuLaunch") || begins("cudaLaunch") || begins("__cudaLaunch")) && !is_host) flags |= CALL_NAMES_KERNEL;
    if (begins("cuCtxDestroy") || begins("cuDevicePrimaryCtxRe") || begins("cudaDeviceReset"))
        flags |= CALL_ENDS_CONTEXT | CALL_UNLOADS;
    if (begins("cuModuleUnload") || begins("cuLibraryUnload")) flags |= CALL_UNLOADS;
    if (begins("cuStreamDestroy")) flags |= CALL_ENDS_STREAM;
    auto has = [&](const char *word) { return strstr(function, word) != nullptr; };
    if (has("Synchronize")) flags |= CALL_WAITS;
    if (has("Launch") || has("Memcpy") || has("Memset") || has("lloc") || has("MemCreate")) flags |= CALL_HAS_STACK;
    if (begins("cuStreamBeginCapture")) flags |= CALL_BEGINS_CAPTURE;
    if (begins("cuStreamEndCapture")) flags |= CALL_ENDS_CAPTURE;
    if (strcmp(function, "cuGraphDestroy") == 0) flags |= CALL_ENDS_GRAPH;
    if (begins("cuGraphExecUpdate")) flags |= CALL_UPDATES_GRAPH;
    return flags;
}

}  // namespace tracepipe
