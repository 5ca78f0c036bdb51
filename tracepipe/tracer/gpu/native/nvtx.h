// SPDX-License-Identifier: MIT
// NVTX's interface for tools: what it passes to a library that it loads, and the structs of its calls.
//
// It declares what is the same in all versions of NVTX 3, so that nothing has to be installed to build the
// library; tests/gpu/annotated.cpp compares it with NVIDIA's headers (nvtxDetail/nvtxTypes.h, nvToolsExt.h).
#pragma once
#include <cstddef>
#include <cstdint>

namespace tracepipe::nvtx {

// The id of the table with Callbacks, and those of the modules of functions in it.
constexpr uint32_t CALLBACKS = 1;
constexpr int CORE = 1, CORE2 = 5;

using Function = void (*)();
using GetExportTable = const void *(*)(uint32_t id);

struct Callbacks {
    size_t struct_size;
    // An array of pointers to function pointers, with the indices below.
    int (*get_module_function_table)(int module, Function ***table, unsigned *size);
};

enum Core : unsigned {
    MARK_EX = 1, MARK_A, MARK_W, RANGE_START_EX, RANGE_START_A, RANGE_START_W, RANGE_END, RANGE_PUSH_EX, RANGE_PUSH_A,
    RANGE_PUSH_W, RANGE_POP, NAME_CATEGORY_A, NAME_CATEGORY_W, NAME_OS_THREAD_A, NAME_OS_THREAD_W,
};
enum Core2 : unsigned {
    DOMAIN_MARK_EX = 1, DOMAIN_RANGE_START_EX, DOMAIN_RANGE_END, DOMAIN_RANGE_PUSH_EX, DOMAIN_RANGE_POP,
    DOMAIN_NAME_CATEGORY_A = 8, DOMAIN_NAME_CATEGORY_W, DOMAIN_REGISTER_STRING_A, DOMAIN_REGISTER_STRING_W,
    DOMAIN_CREATE_A, DOMAIN_CREATE_W,
};

// Extensions of NVTX have tables of their own. That of extended payloads has further functions that begin and end
// ranges: NCCL pushes some of its ranges with RANGE_PUSH_EX, and pops them with RANGE_POP_PAYLOAD.
constexpr uint16_t PAYLOADS = 2;
enum PayloadFunction : size_t {
    MARK_PAYLOAD = 2, RANGE_PUSH_PAYLOAD, RANGE_POP_PAYLOAD, RANGE_START_PAYLOAD, RANGE_END_PAYLOAD,
};
struct ExtensionSegment {
    size_t id, slot_count;
    intptr_t *slots;  // a function each
};
struct Extension {  // only what is used here: it continues
    uint16_t nvtx_version, struct_size, module, compatibility;
    size_t segment_count;
    ExtensionSegment *segments;
};
struct PayloadData;

// A domain and a registered string; the tool decides what they point to.
using Domain = const void *;
using String = const void *;

enum MessageType : int32_t { MESSAGE_ASCII = 1, MESSAGE_UNICODE = 2, MESSAGE_REGISTERED = 3 };
enum PayloadType : int32_t { PAYLOAD_U64 = 1, PAYLOAD_I64, PAYLOAD_DOUBLE, PAYLOAD_U32, PAYLOAD_I32, PAYLOAD_FLOAT };
enum ColorType : int32_t { COLOR_ARGB = 1 };

struct Attributes {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    uint64_t payload;  // a shorter type uses its first bytes
    int32_t message_type;
    union {
        const char *ascii;
        const wchar_t *unicode;
        String registered;
    } message;
};
static_assert(sizeof(Attributes) == 48);

}  // namespace tracepipe::nvtx
