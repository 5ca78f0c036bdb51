// SPDX-License-Identifier: MIT
// Records API calls with their arguments, which a tool gets as a struct of the function's parameters.
//
// TRACEPIPE_GPU_ARGUMENTS names the table of what to read from each struct; api_calls.py describes its lines.
// A function that is not in it is recorded without arguments, and only the values in its line are read.
//
// Payload of KIND_CALL_ENTER, and of KIND_CALL_EXIT:
//
//     0      8        16       24      32      36      38      40
//     | name | launch | kernel | stack | cpu   | words | text  | words × u64 | text …    0 stands for none
//     |      | u64    | name   |       | u32   | u16   | bytes |
//
//     0      8        12      16      24
//     | name | result | cpu   | out   |                  out: the value behind its pointer, 0 if the call failed
//     |      | u32    | u32   | u64   |
#pragma once
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <sched.h>
#include <sstream>
#include <string>
#include <sys/uio.h>
#include <unordered_map>

#include "warp_columns.h"

namespace tracepipe {

// Ids of functions in KIND_NAME: FUNCTION, HAS_ARGUMENTS if its records have them, IS_RUNTIME, and the API's
// id.
constexpr uint64_t FUNCTION = uint64_t(1) << 63, HAS_ARGUMENTS = uint64_t(1) << 62, IS_RUNTIME = uint64_t(1) << 32;
constexpr unsigned CALL_WORDS = 8;
constexpr size_t CALL_TEXT_BYTES = 248;

// The place of a value in the struct, or in the one that a pointer in it points to.
struct CallValue {
    uint16_t offset = 0;
    uint8_t bytes = 0;  // 0: there is none
    bool is_pointed = false;
};
// A word of a record: a value, or two of 32 bits.
struct CallWord {
    CallValue low, high;
};
struct CallLayout {
    CallWord words[CALL_WORDS];
    uint8_t count = 0, out_bytes = 0;
    int16_t through = -1, out = -1, text = -1;  // offsets of pointers
};

struct CallEnter {
    uint64_t name, launch, kernel, stack;
    uint32_t cpu;
    uint16_t words, text_bytes;
    char rest[CALL_WORDS * 8 + CALL_TEXT_BYTES];
};
struct CallExit {
    uint64_t name;
    uint32_t result, cpu;
    uint64_t out;
};
static_assert(offsetof(CallEnter, rest) == 40 && sizeof(CallExit) == 24, "");

class CallTable {
  public:
    // Whether the whole table was read, or there is none.
    bool read(const char *path = getenv("TRACEPIPE_GPU_ARGUMENTS")) {
        if (!path || !*path) return true;
        std::ifstream file(path);
        std::string line, name, word;
        while (std::getline(file, line)) {
            std::istringstream words(line);
            CallLayout layout;
            words >> name;
            bool fits = true;
            while (fits && words >> word) fits = add(layout, word.c_str());
            if (!fits) return false;
            layouts_[name] = layout;
        }
        return !layouts_.empty();
    }
    // The layout of a function, null if it has no arguments.
    const CallLayout *find(const char *function) const {
        auto known = layouts_.find(function);
        return known == layouts_.end() ? nullptr : &known->second;
    }

  private:
    static bool add(CallLayout &layout, const char *word) {
        if (strncmp(word, "through", 7) == 0) return number(word += 7, layout.through) && !*word;
        if (strncmp(word, "text", 4) == 0) return number(word += 4, layout.text) && !*word;
        if (strncmp(word, "out", 3) == 0)
            return number(word += 3, layout.out) && *word++ == '+' && number(word, layout.out_bytes) && !*word &&
                   is_width(layout.out_bytes);
        if (layout.count == CALL_WORDS) return false;
        CallWord &to = layout.words[layout.count++];
        if (!value(word, to.low)) return false;
        return !*word || (*word++ == ',' && value(word, to.high) && !*word);
    }
    static bool value(const char *&word, CallValue &value) {
        value.is_pointed = *word == '@';
        word += value.is_pointed;
        return number(word, value.offset) && *word++ == '+' && number(word, value.bytes) && is_width(value.bytes);
    }
    template <typename Number> static bool number(const char *&word, Number &to) {
        char *end = nullptr;
        to = Number(strtoul(word, &end, 10));
        bool is_number = end != word;
        word = end;
        return is_number;
    }
    static bool is_width(unsigned bytes) { return bytes == 1 || bytes == 2 || bytes == 4 || bytes == 8; }

    std::unordered_map<std::string, CallLayout> layouts_;
};

inline uint64_t load_bytes(const char *from, unsigned bytes) {
    uint64_t wide = 0;  // little-endian
    switch (bytes) {
        case 8: memcpy(&wide, from, 8); break;
        case 4: memcpy(&wide, from, 4); break;
        case 2: memcpy(&wide, from, 2); break;
        case 1: memcpy(&wide, from, 1); break;
    }
    return wide;
}
inline const char *pointer_at(const char *parameters, int offset) {
    return reinterpret_cast<const char *>(load_bytes(parameters + offset, sizeof(void *)));
}

// Copies the words of a call's arguments; returns their number. A launch's configuration is read just before
// the driver reads it; everything behind a null pointer is 0.
inline unsigned copy_words(const CallLayout &layout, const char *parameters, char *to) {
    const char *pointed = layout.through < 0 ? nullptr : pointer_at(parameters, layout.through);
    auto read = [&](const CallValue &value) -> uint64_t {
        const char *from = value.is_pointed ? pointed : parameters;
        return from ? load_bytes(from + value.offset, value.bytes) : 0;
    };
    for (unsigned at = 0; at < layout.count; at++) {
        const CallWord &from = layout.words[at];
        uint64_t word = read(from.low);
        if (from.high.bytes) word = (word & 0xffffffff) | read(from.high) << 32;
        memcpy(to + 8 * at, &word, 8);
    }
    return layout.count;
}

// Copies a text of the program. Its address is unchecked, so the kernel copies it, which fails for a bad one.
inline size_t copy_text(const char *from, char *to) {
    if (!from) return 0;
    const size_t rest = 4096 - uintptr_t(from) % 4096, first = std::min(rest, CALL_TEXT_BYTES);
    // The kernel copies a part completely or not at all.
    iovec local{to, CALL_TEXT_BYTES}, remote[] = {{const_cast<char *>(from), first},
                                                  {const_cast<char *>(from) + first, CALL_TEXT_BYTES - first}};
    int saved = errno;
    ssize_t got = process_vm_readv(getpid(), &local, 1, remote, first < CALL_TEXT_BYTES ? 2 : 1, 0);
    errno = saved;
    return got > 0 ? strnlen(to, size_t(got)) : 0;
}

inline uint64_t function_name(bool is_runtime, unsigned id, const CallLayout *layout) {
    return FUNCTION | (layout ? HAS_ARGUMENTS : 0) | (is_runtime ? IS_RUNTIME : 0) | id;
}

// At the entry, on the calling thread. `layout` may be null.
inline void put_call_enter(Channel &channel, uint64_t name, uint64_t launch, uint64_t kernel, uint64_t stack,
                           const CallLayout *layout, const void *parameters) {
    CallEnter record;
    record.name = name, record.launch = launch, record.kernel = kernel, record.stack = stack;
    record.cpu = uint32_t(sched_getcpu());
    record.words = record.text_bytes = 0;
    if (layout && parameters) {
        const char *from = static_cast<const char *>(parameters);
        record.words = uint16_t(copy_words(*layout, from, record.rest));
        if (layout->text >= 0)
            record.text_bytes = uint16_t(copy_text(pointer_at(from, layout->text), record.rest + 8 * record.words));
    }
    channel.put(KIND_CALL_ENTER, &record, offsetof(CallEnter, rest) + 8 * record.words + record.text_bytes);
}

// At the return: the value that the driver has written through a pointer can be read.
inline void put_call_exit(Channel &channel, uint64_t name, uint32_t result, const CallLayout *layout,
                          const void *parameters) {
    CallExit record{name, result, uint32_t(sched_getcpu()), 0};
    if (layout && parameters && layout->out >= 0 && !result)
        if (const char *from = pointer_at(static_cast<const char *>(parameters), layout->out))
            record.out = load_bytes(from, layout->out_bytes);
    channel.put(KIND_CALL_EXIT, &record, sizeof record);
}

}  // namespace tracepipe
