// SPDX-License-Identifier: MIT
// Reads the calling thread's Python frames in its own process, without reference counts, the GIL or Python's
// headers.
//
//     thread state ──▶ frame ──previous──▶ frame ──▶ …        innermost first
//                        │ code, instruction
//                        ▼
//                      code ──▶ names of file and function, table of lines
//
// A thread's own frames do not change while it is in this code, and they keep their code objects alive. The
// layout of these structs is the same in all releases of a minor version of CPython (3.10 to 3.15, but not in
// builds without the GIL or with Py_TRACE_REFS). The first walk in a process uses process_vm_readv, which
// fails for memory that cannot be read. If anything is not as expected, nothing more is read. Nothing is read
// either once the interpreter shuts down, as it frees the states of threads that still run.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <string>
#include <sys/uio.h>
#include <unistd.h>

#include "settings.h"
#include "utf8.h"

namespace tracepipe {

// A frame of a thread: its code object, and its position in the code in bytes, below 0 before the first
// instruction.
struct PythonFrame {
    uintptr_t code;
    int64_t at;
};

class PythonFrames {
  public:
    static constexpr unsigned FRAMES_MAX = 128;

    // Whether this process has a Python whose frames can be read, and TRACEPIPE_GPU_STACKS does not forbid
    // it.
    bool open() {
        const char *set = settings().get("TRACEPIPE_GPU_STACKS");
        if (set && strcmp(set, "off") == 0) return false;
        auto version = reinterpret_cast<const char *(*)()>(dlsym(RTLD_DEFAULT, "Py_GetVersion"));
        auto state = reinterpret_cast<State>(dlsym(RTLD_DEFAULT, "PyGILState_GetThisThreadState"));
        is_ending_ = reinterpret_cast<Asked>(dlsym(RTLD_DEFAULT, "_Py_IsFinalizing"));
        if (!is_ending_) is_ending_ = reinterpret_cast<Asked>(dlsym(RTLD_DEFAULT, "Py_IsFinalizing"));
        code_type_ = reinterpret_cast<uintptr_t>(dlsym(RTLD_DEFAULT, "PyCode_Type"));
        int minor = 0;
        if (!version || !state || !code_type_ || !is_ending_ || sscanf(version(), "3.%d", &minor) != 1) return false;
        if (minor < 10 || minor > 15 || strstr(version(), "free-threading")) return false;
        layout_ = &LAYOUTS[minor - 10];
        state_ = state;
        return true;
    }
    // Reads the frames of this thread, innermost first; returns their number.
    unsigned read(PythonFrame *frames) {
        unsigned further = 0;
        return read(frames, further, false);
    }
    // The same; `further` is the number of outer frames that found no room.
    unsigned read_all(PythonFrame *frames, unsigned &further) { return read(frames, further, true); }
    // A number that is the same for the same frames: same code, position and names. `numbers` gets that of
    // each frame. The values of a frame are read and mixed independently of each other, as a launch waits for
    // this.
    uint64_t hash(const PythonFrame *frames, unsigned count, uint64_t *numbers = nullptr) const {
        uint64_t hash = count;
        for (unsigned at = 0; at < count; at++) {
            uintptr_t code = frames[at].code;
            uintptr_t name = word_at(code + layout_->name), file = word_at(code + layout_->filename);
            uint64_t mixed = code * 0x9e3779b97f4a7c15u + uint64_t(frames[at].at) * 0xbf58476d1ce4e5b9u;
            mixed += word_at(code + layout_->linetable) * 0x94d049bb133111ebu;
            mixed += *reinterpret_cast<uint32_t *>(code + layout_->first_line) * 0xd6e8feb86659fd93u;
            // A new code object may be at the address of a freed one, and so may its names.
            mixed += name * 0xa0761d6478bd642fu + hash_of(name) * 0xe7037ed1a0b428dbu;
            mixed += file * 0x8ebc6af09c88c6e3u + hash_of(file) * 0x589965cc75374cc3u;
            if (numbers) numbers[at] = mixed;
            hash = (hash ^ mixed) * 0x9e3779b97f4a7c15u, hash ^= hash >> 32;
        }
        return hash;
    }
    // `train.py:41 step`, with the full path of the file. Called while the frame is open.
    std::string name_of(const PythonFrame &frame) const {
        return file_of(frame) + ":" + std::to_string(line_of(frame)) + " " + function_of(frame);
    }
    // The parts of that name; from Python 3.11 on, the function has its class.
    std::string file_of(const PythonFrame &frame) const { return text_at(frame.code + layout_->filename); }
    std::string function_of(const PythonFrame &frame) const { return text_at(frame.code + layout_->name); }
    int line_of(const PythonFrame &frame) const {
        int line = *reinterpret_cast<int32_t *>(frame.code + layout_->first_line);
        uintptr_t table = *reinterpret_cast<uintptr_t *>(frame.code + layout_->linetable);
        int64_t size = std::min(*reinterpret_cast<int64_t *>(table + BYTES_SIZE), TABLE_MAX);
        auto *at = reinterpret_cast<const uint8_t *>(table + BYTES_DATA), *end = at + size;
        if (frame.at < 0) return line;
        auto line_by = layout_->instructions == NONE ? line_by_pairs : line_by_entries;
        return line_by(at, end, line, frame.at);
    }

  private:
    using State = void *(*)();
    using Asked = int (*)();
    // Offsets in bytes. `thread`: the pointer to the frame in the thread state, or to a struct between them,
    // in which `between` is the frame. `at`: the instruction, which is an index in 3.10 and a pointer in the
    // others.
    struct Layout {
        uint16_t thread, between, previous, code, at, owner;
        uint16_t filename, name, linetable, first_line, first_traced, instructions;
        uint16_t ascii_bytes, text_bytes;
    };
    static constexpr uint16_t NONE = 0xffff;
    static constexpr Layout LAYOUTS[] = {
        {24, NONE, 24, 32, 96, NONE, 104, 112, 120, 40, NONE, NONE, 48, 72},
        {56, 8, 48, 32, 56, 69, 112, 128, 136, 72, 168, 184, 48, 72},
        {56, 0, 8, 0, 56, 70, 112, 128, 136, 68, 176, 192, 40, 56},
        {72, NONE, 8, 0, 56, 70, 112, 128, 136, 68, 184, 200, 40, 56},
        {72, NONE, 8, 0, 56, 74, 112, 128, 136, 68, 192, 208, 40, 56},
        {72, NONE, 8, 0, 56, 74, 112, 128, 136, 68, 192, 208, 40, 56},
    };
    static constexpr unsigned WALK_MAX = 1 << 16;  // frames; a longer chain is cut
    static constexpr uint8_t OF_GENERATOR = 1, OF_C = 3;
    static constexpr uintptr_t CODE_TAGS = 7;  // from 3.14 on, a frame's references may have some in low bits
    static constexpr unsigned BYTES_SIZE = 16, BYTES_DATA = 32, TEXT_LENGTH = 16, TEXT_HASH = 24, TEXT_STATE = 32;
    static constexpr int64_t UNIT_BYTES = 2, TEXT_MAX = 1024, TABLE_MAX = 1 << 20;

    template <bool is_safe, typename Value> static bool take(uintptr_t at, Value &value) {
        if (!is_safe) return memcpy(&value, reinterpret_cast<void *>(at), sizeof value), true;
        iovec to{&value, sizeof value}, from{reinterpret_cast<void *>(at), sizeof value};
        return process_vm_readv(getpid(), &to, 1, &from, 1, 0) == ssize_t(sizeof value);
    }
    unsigned read(PythonFrame *frames, unsigned &further, bool is_all) {
        State state = state_.load(std::memory_order_acquire);
        auto thread = state && !is_ending_() ? reinterpret_cast<uintptr_t>(state()) : 0;
        if (!thread) return 0;
        unsigned count = 0;
        bool is_good = (is_proven_ ? walk<false>(thread, frames, count, is_all ? &further : nullptr)
                                    : walk<true>(thread, frames, count, is_all ? &further : nullptr));
        if (!is_good) return state_ = nullptr, 0;
        if (count) is_proven_ = true;
        return count;
    }
    template <bool is_safe>
    bool walk(uintptr_t thread, PythonFrame *frames, unsigned &count, unsigned *further) const {
        const Layout &layout = *layout_;
        uintptr_t frame = 0;
        if (!take<is_safe>(thread + layout.thread, frame)) return false;
        if (layout.between != NONE && frame && !take<is_safe>(frame + layout.between, frame)) return false;
        PythonFrame beyond;
        for (unsigned walked = 0; frame && walked < WALK_MAX; walked++) {
            bool has_room = count < FRAMES_MAX;
            if (!has_room && !further) break;
            int is_shown = look<is_safe>(frame, has_room ? frames[count] : beyond);
            if (is_shown < 0 || !take<is_safe>(frame + layout.previous, frame)) return false;
            (has_room ? count : *further) += is_shown > 0;
        }
        return true;
    }
    // Reads a frame: 1, or 0 for one that Python does not show, or −1 if it is not a frame.
    template <bool is_safe> int look(uintptr_t frame, PythonFrame &found) const {
        const Layout &layout = *layout_;
        uint8_t owner = 0;
        if (layout.owner != NONE && !take<is_safe>(frame + layout.owner, owner)) return -1;
        if (owner == OF_C) return 0;
        uintptr_t type = 0;
        if (!take<is_safe>(frame + layout.code, found.code)) return -1;
        found.code &= ~CODE_TAGS;
        if (!take<is_safe>(found.code + 8, type)) return -1;
        if (type != code_type_) return -1;
        if (layout.instructions == NONE) {
            int32_t at = 0;
            if (!take<is_safe>(frame + layout.at, at)) return -1;
            found.at = int64_t(at) * UNIT_BYTES;
            return 1;
        }
        uintptr_t at = 0;
        int32_t first = 0;
        if (!take<is_safe>(frame + layout.at, at) || !take<is_safe>(found.code + layout.first_traced, first)) return -1;
        found.at = int64_t(at - (found.code + layout.instructions));
        return owner == OF_GENERATOR || found.at >= first * UNIT_BYTES;
    }

    static uint64_t word_at(uintptr_t at) { return *reinterpret_cast<uint64_t *>(at); }
    // The hash of a str: its cached one if there is one, else one of its length and its end. Paths of files,
    // whose hash was usually not computed, differ at the end.
    uint64_t hash_of(uintptr_t text) const {
        uint64_t hash = word_at(text + TEXT_HASH);
        if (hash != ~uint64_t(0)) return hash;
        uint64_t length = word_at(text + TEXT_LENGTH);
        if (!is_compact(text) || length < 16) return length;
        const uint8_t *end = data_of(text) + length * uint64_t(width_of(text));
        uint64_t parts[2];
        memcpy(parts, end - sizeof parts, sizeof parts);
        return (length ^ parts[0]) * 0x9e3779b97f4a7c15u ^ parts[1];
    }
    static uint32_t state_of(uintptr_t text) { return *reinterpret_cast<uint32_t *>(text + TEXT_STATE); }
    static bool is_compact(uintptr_t text) { return state_of(text) >> 5 & 1; }
    static bool is_ascii(uintptr_t text) { return state_of(text) >> 6 & 1; }
    static int64_t width_of(uintptr_t text) { return state_of(text) >> 2 & 7; }
    const uint8_t *data_of(uintptr_t text) const {
        return reinterpret_cast<const uint8_t *>(text + (is_ascii(text) ? layout_->ascii_bytes : layout_->text_bytes));
    }
    // The str that a pointer points to, as UTF-8.
    std::string text_at(uintptr_t pointer) const {
        uintptr_t text = *reinterpret_cast<uintptr_t *>(pointer);
        auto length = std::min(*reinterpret_cast<int64_t *>(text + TEXT_LENGTH), TEXT_MAX);
        if (!is_compact(text)) return "?";  // Python's compiler makes no such str
        const uint8_t *data = data_of(text);
        auto width = width_of(text);
        if (is_ascii(text)) return {reinterpret_cast<const char *>(data), size_t(length)};
        std::string out;
        for (int64_t at = 0; at < length; at++) {
            uint32_t letter = 0;
            memcpy(&letter, data + at * width, size_t(width));
            append_utf8(out, letter);
        }
        return out;
    }
    // PEP 626: pairs of bytes of code and line difference, −128 for no line.
    static int line_by_pairs(const uint8_t *at, const uint8_t *end, int line, int64_t wanted) {
        int64_t passed = 0;
        for (int here = line; at + 1 < end; at += 2) {
            auto lines = int8_t(at[1]);
            if (lines != -128) line += lines;
            here = lines == -128 ? 0 : line;
            passed += at[0];
            if (passed > wanted) return here;
        }
        return line;
    }
    // CPython's Objects/locations.md: 1 | kind 4 bits | units − 1, then data that depends on the kind.
    static int line_by_entries(const uint8_t *at, const uint8_t *end, int line, int64_t wanted) {
        int64_t passed = 0;
        while (at < end) {
            unsigned kind = *at >> 3 & 15, units = (*at & 7) + 1;
            at++;
            bool has_line = kind != 15;
            if (kind >= 10 && kind <= 12) line += int(kind) - 10;
            if (kind == 13 || kind == 14) line += signed_number(at, end);
            passed += units * UNIT_BYTES;
            if (passed > wanted) return has_line ? line : 0;
            while (at < end && !(*at & 0x80)) at++;
        }
        return line;
    }
    static int signed_number(const uint8_t *at, const uint8_t *end) {
        unsigned value = 0;
        for (unsigned shift = 0; at < end && shift < 32; shift += 6) {
            value |= unsigned(*at & 63) << shift;
            if (!(*at++ & 64)) break;
        }
        return value & 1 ? -int(value >> 1) : int(value >> 1);
    }

    std::atomic<State> state_{nullptr};
    std::atomic<bool> is_proven_{false};
    const Layout *layout_ = nullptr;
    Asked is_ending_ = nullptr;
    uintptr_t code_type_ = 0;
};

}  // namespace tracepipe
