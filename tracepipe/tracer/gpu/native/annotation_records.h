// SPDX-License-Identifier: MIT
// The records of the annotation library: kinds 56 to 61 of transport.h.
//
// All integers are little-endian, and there is no padding; engines/annotations.py has the same
// layouts. The time of an event is that of its record. Domains and registered texts are identified by the
// program's handles; 0 is the domain without a name, or no registered text.
#pragma once
#include <cstdint>

namespace tracepipe {

enum AnnotationKind : uint16_t {
    KIND_MARK = 56,   // Begun
    KIND_PUSH = 57,   // Begun: a range of this thread, nested in its open ranges of this domain
    KIND_POP = 58,    // Ended
    KIND_START = 59,  // Begun: a range of the process
    KIND_END = 60,    // Ended
    KIND_LABEL = 61,  // Label
};

constexpr uint32_t HAS_COLOR = 1, BEGAN_BEFORE = 2;  // BEGAN_BEFORE: open when its window began
constexpr uint64_t DEPTH_UNKNOWN = ~uint64_t(0);

struct Begun {  // its text follows if `registered` is 0
    uint64_t domain, registered;
    uint64_t number;  // of a push: how many ranges are open around it; of a start: its id in this process
    uint64_t payload;
    uint32_t payload_type;  // nvtx::PayloadType, 0 without one
    uint32_t flags;         // HAS_COLOR, BEGAN_BEFORE
    uint32_t color, category;
    uint64_t stack;  // of the Python program, 0 if there is none
};

struct Ended {
    uint64_t domain, number;  // as in its begin
};

enum LabelKind : uint32_t {
    LABEL_DOMAIN = 1,
    LABEL_TEXT = 2,
    LABEL_CATEGORY = 3,
    LABEL_THREAD = 4,
    LABEL_STACK = 6,  // frames, innermost first, each `FILE:LINE FUNCTION` and a newline
    LABEL_FORK = 5,  // no text: this process has the handles of the process with that number
};


struct Label {  // the text follows
    uint32_t what, zero;
    uint64_t domain, number;  // number: a handle, a category's number, or the id of a thread or process
};

static_assert(sizeof(Begun) == 56 && sizeof(Ended) == 16 && sizeof(Label) == 24);

}  // namespace tracepipe
