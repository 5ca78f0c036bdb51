// SPDX-License-Identifier: MIT
// Encodes letters of wide texts as UTF-8.
#pragma once
#include <cstdint>
#include <string>

namespace tracepipe {

inline void append_utf8(std::string &out, uint32_t letter) {
    if (letter < 0x80) {
        out += char(letter);
        return;
    }
    int more = letter < 0x800 ? 1 : letter < 0x10000 ? 2 : 3;
    out += char((0xff00 >> (more + 1) & 0xff) | (letter >> 6 * more & 0x3f));
    while (more--) out += char(0x80 | (letter >> 6 * more & 0x3f));
}

}  // namespace tracepipe
