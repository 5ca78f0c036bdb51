// SPDX-License-Identifier: MIT
// Sees the first call of another library's function, however its caller found the function.
//
//     function:  jmp stub  … its other bytes …          stub, near the library:  jmp ours
//
// Until `remove`, whoever calls the function comes to ours. The first bytes are replaced by one store, and put
// back by one. No other thread may be about to run them: of a profiler's first call, none is.
#pragma once
#include <cstdint>
#include <cstring>
#include <sys/mman.h>
#include <unistd.h>

namespace tracepipe {

class EntryJump {
  public:
    EntryJump(void *function, void *ours) : function_(static_cast<uint8_t *>(function)), ours_(ours) {}

    // Whether calls come to ours from now on: not if the system forbids code to be changed.
    bool set() {
        if (is_set_) return true;
        if (!stub_ && !make_stub()) return false;
        intptr_t distance = stub_ - function_;
        uint64_t code;
        memcpy(&before_, function_, sizeof before_);
#if defined(__x86_64__)
        uint8_t jump[5] = {0xe9};  // jmp rel32, from the instruction after it
        auto relative = int32_t(distance - intptr_t(sizeof jump));
        memcpy(jump + 1, &relative, sizeof relative);
        code = before_;
        memcpy(&code, jump, sizeof jump);
#elif defined(__aarch64__)
        uint32_t jump = 0x14000000 | (uint32_t(distance >> 2) & 0x3ffffff);  // b imm26
        code = before_;
        memcpy(&code, &jump, sizeof jump);
#endif
        return is_set_ = write(code);
    }
    void remove() {
        if (is_set_) is_set_ = !write(before_);
    }

  private:
#if defined(__x86_64__)
    static constexpr intptr_t NEAR_BYTES = intptr_t(1) << 30;
    static constexpr uint8_t TO_OURS[] = {0xff, 0x25, 0, 0, 0, 0, 0, 0};  // jmp *[rip + 2]
    static constexpr size_t ADDRESS_AT = 6;
#elif defined(__aarch64__)
    static constexpr intptr_t NEAR_BYTES = intptr_t(1) << 26;
    static constexpr uint8_t TO_OURS[] = {0x50, 0, 0, 0x58, 0, 2, 0x1f, 0xd6};  // ldr x16, #8; br x16
    static constexpr size_t ADDRESS_AT = 8;
#endif
    bool make_stub() {
        auto page = uintptr_t(sysconf(_SC_PAGESIZE));
        auto near = reinterpret_cast<uintptr_t>(function_) & ~(page - 1);
        for (intptr_t away = 0; away < NEAR_BYTES; away += 1 << 20)
            for (uintptr_t at : {near - uintptr_t(away), near + uintptr_t(away)}) {
                void *made = mmap(reinterpret_cast<void *>(at), page, PROT_READ | PROT_WRITE,
                                  MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
                if (made == MAP_FAILED) continue;
                if (made != reinterpret_cast<void *>(at)) {  // a kernel before 4.17 takes it for a wish
                    munmap(made, page);
                    continue;
                }
                auto *bytes = static_cast<uint8_t *>(made);
                memcpy(bytes, TO_OURS, sizeof TO_OURS);
                memcpy(bytes + ADDRESS_AT, &ours_, sizeof ours_);
                if (mprotect(made, page, PROT_READ | PROT_EXEC) != 0) return munmap(made, page), false;
                stub_ = bytes;
                return true;
            }
        return false;
    }
    bool write(uint64_t code) const {
        auto page = uintptr_t(sysconf(_SC_PAGESIZE)), at = reinterpret_cast<uintptr_t>(function_);
        if (at % sizeof code) return false;
        auto *pages = reinterpret_cast<void *>(at & ~(page - 1));
        if (mprotect(pages, page, PROT_READ | PROT_WRITE | PROT_EXEC) != 0) return false;
        __atomic_store_n(reinterpret_cast<uint64_t *>(function_), code, __ATOMIC_SEQ_CST);
        __builtin___clear_cache(reinterpret_cast<char *>(function_), reinterpret_cast<char *>(function_) + sizeof code);
        mprotect(pages, page, PROT_READ | PROT_EXEC);
        return true;
    }

    uint8_t *function_, *stub_ = nullptr;
    void *ours_;
    uint64_t before_ = 0;
    bool is_set_ = false;
};

}  // namespace tracepipe
