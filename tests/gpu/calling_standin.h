// A kernel that calls device functions, for sanitizer_standin.cpp: its module's machine code, as far as the library
// looks at it, and what the patches of CALL and RET do for one of its warps, in the memory of the host.
#pragma once
#include <atomic>

#include "called_table.h"
#include "cubin_standin.h"
#include "warp_record.h"

constexpr uint64_t CALLING_PC = 0x7f0000001000;

// An ELF file with the functions of one section: a kernel, and two that it has for itself.
struct CallingCubin : CubinStandin<4> {
    static constexpr char NAMES[] = "\0_Z1kv\0$_Z1kv$_Z5outerf\0$_Z1kv$_Z5innerf";
    CallingCubin() : CubinStandin(NAMES, sizeof NAMES) {
        // Local symbols come first.
        symbols[1] = function(7, 0x100, 0x80), symbols[2] = function(24, 0x180, 0x80);
        symbols[3] = function(1, 0, 0x200), symbols[3].st_other = 0x10;
    }
    static Elf64_Sym function(unsigned name, uint64_t value, uint64_t size) {
        Elf64_Sym symbol{};
        symbol.st_name = name, symbol.st_info = STT_FUNC, symbol.st_shndx = 5;
        symbol.st_value = value, symbol.st_size = size;
        return symbol;
    }
};

// One warp in slot 7 of SM 0: it calls `outer`, which calls `inner` twice.
inline void run_calling_warp(uint64_t data, uint64_t entry_clk) {
    using namespace tracepipe;
    uint64_t region = data << 16 >> 16 & ~(REGION_ALIGNMENT - 1), clk = entry_clk;
    auto *table = reinterpret_cast<const CalledTable *>(region & ~(CALLS_ALIGNMENT - 1));
    auto mark = [&](uint64_t pc, uint64_t end) {
        clk += 100;
        for (uint32_t at = 0; at < table->sections; at++) {
            const CalledSection &section = table->section[at];
            for (uint32_t k = section.first; k < section.first + section.count; k++) {
                const CalledFunction &function = table->functions[k];
                if (pc < section.begin + function.begin || pc >= section.begin + function.end) continue;
                auto &count = *reinterpret_cast<uint32_t *>(table->counts + 7 * MARK_LINE);
                auto *record = reinterpret_cast<uint64_t *>(table->records) + 2 * (7 * MARK_RING + count % MARK_RING);
                record[0] = clk | end << MARK_CLOCK_BITS;
                record[1] = uint64_t(~0u) << CALL_LANES_SHIFT | uint64_t(function.name) << CALL_NAME_SHIFT;
                count++;
            }
        }
    };
    mark(CALLING_PC + 0x100, 0), mark(CALLING_PC + 0x180, 0), mark(CALLING_PC + 0x1f0, 1);
    mark(CALLING_PC + 0x180, 0), mark(CALLING_PC + 0x1f0, 1), mark(CALLING_PC + 0x170, 1);
    auto *warp = reinterpret_cast<Warp *>(region + sizeof(Region));
    *warp = {5000, entry_clk, 7u << 16, 0xffffffff, 0, 0, 0, entry_clk + 1000};
    reinterpret_cast<std::atomic<uint64_t> *>(&warp->exit_ns)->store(5500);
}
