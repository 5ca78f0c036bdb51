// SPDX-License-Identifier: MIT
// Selects the launches that are recorded: by a pattern of kernel names, mangled or demangled, by a range of
// the launches that fit it, and by their number for each kernel. A kernel is identified by its name: programs
// load the same code many times, and autotuning compilers load thousands of modules with kernels of the same
// name.
#pragma once
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <elf.h>
#include <regex>
#include <string>

#include "demangle.h"

namespace tracepipe {

// Calls `found` with each symbol of a cubin, which is an ELF file, and its name; false if it is not a cubin.
template <typename Found> bool each_symbol(const char *cubin, size_t bytes, Found found) {
    const auto *file = reinterpret_cast<const Elf64_Ehdr *>(cubin);
    if (!cubin || bytes < sizeof *file || memcmp(file->e_ident, ELFMAG, SELFMAG) != 0) return false;
    if (file->e_shoff > bytes || (bytes - file->e_shoff) / sizeof(Elf64_Shdr) < file->e_shnum) return false;
    const auto *sections = reinterpret_cast<const Elf64_Shdr *>(cubin + file->e_shoff);
    for (unsigned at = 0; at < file->e_shnum; at++) {
        const Elf64_Shdr &table = sections[at];
        if (table.sh_type != SHT_SYMTAB || table.sh_link >= file->e_shnum) continue;
        const Elf64_Shdr &names = sections[table.sh_link];
        if (table.sh_offset + table.sh_size > bytes || names.sh_offset + names.sh_size > bytes) return false;
        const auto *symbols = reinterpret_cast<const Elf64_Sym *>(cubin + table.sh_offset);
        for (size_t k = 0; k < table.sh_size / sizeof *symbols; k++)
            if (symbols[k].st_name < names.sh_size) found(symbols[k], cubin + names.sh_offset + symbols[k].st_name);
    }
    return true;
}
constexpr unsigned char IS_KERNEL = 0x10;  // STO_CUDA_ENTRY, in the st_other of a function
// The same for functions, with whether each is a kernel.
template <typename Found> bool each_function(const char *cubin, size_t bytes, Found found) {
    return each_symbol(cubin, bytes, [&](const Elf64_Sym &symbol, const char *name) {
        if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC) found(name, (symbol.st_other & IS_KERNEL) != 0);
    });
}

// All functions with one name.
struct Kernel {
    Kernel(uint64_t number, bool fits) : name(number), is_selected(fits), is_spent(!fits) {}
    const uint64_t name;
    const bool is_selected;
    std::atomic<bool> is_spent;  // its launches are no longer recorded
    std::atomic<uint64_t> launches{0}, warps{0};
    std::atomic<uint32_t> needed_room{0};  // for Exits, see exits_room
};

class Selection {
  public:
    // Reads TRACEPIPE_GPU_KERNELS, a regular expression; TRACEPIPE_GPU_CALLED, one for device functions;
    // TRACEPIPE_GPU_LAUNCHES, FIRST-LAST counted from 1; TRACEPIPE_GPU_PER_KERNEL, launches of each kernel;
    // TRACEPIPE_GPU_BLOCKS, FIRST-LAST counted from 0, for which the patches were built; and
    // TRACEPIPE_GPU_BUDGET, a number of warps. The capture process has checked them.
    void read_environment() {
        has_pattern_ = read_pattern("TRACEPIPE_GPU_KERNELS", pattern_,
                                    "TRACEPIPE_GPU_KERNELS is no regular expression; all kernels are recorded");
        has_called_ = read_pattern("TRACEPIPE_GPU_CALLED", called_,
                                   "TRACEPIPE_GPU_CALLED is no regular expression; no calls in kernels are recorded");
        read_range(getenv("TRACEPIPE_GPU_LAUNCHES"), first_, last_);
        read_range(getenv("TRACEPIPE_GPU_BLOCKS"), first_block_, last_block_);
        budget_ = read_number("TRACEPIPE_GPU_BUDGET");
        per_kernel_ = read_number("TRACEPIPE_GPU_PER_KERNEL");
    }
    // Whether calls of device functions are recorded, and those of a given function.
    bool has_called() const { return has_called_; }
    bool fits_called(const std::string &mangled) const {
        return std::regex_search(demangled(mangled.c_str()), called_) || std::regex_search(mangled, called_);
    }
    const char *error() const { return error_; }
    bool has_pattern() const { return has_pattern_; }
    bool fits(const char *mangled) const {
        return !has_pattern_ || std::regex_search(demangled(mangled), pattern_) ||
               std::regex_search(mangled, pattern_);
    }
    // Whether only some launches of each kernel are recorded.
    bool is_per_kernel() const { return per_kernel_ != 0; }
    // Counts a launch; whether it is in the range, and its kernel is still recorded.
    bool is_next_selected(const Kernel &kernel) {
        if (!kernel.is_selected) return false;
        uint64_t number = count_.fetch_add(1, std::memory_order_relaxed) + 1;
        return number >= first_ && number <= last_ && !kernel.is_spent.load(std::memory_order_relaxed);
    }
    // Counts a launch of the range; whether it is one of the first of its kernel there.
    bool is_early(Kernel &kernel) {
        if (!per_kernel_) return true;
        uint64_t launches = kernel.launches.fetch_add(1, std::memory_order_relaxed) + 1;
        if (launches >= per_kernel_) kernel.is_spent = true;
        return launches <= per_kernel_;
    }
    // Whether all launches of the range are over.
    bool is_past() const { return count_.load(std::memory_order_relaxed) >= last_; }
    // Whether a kernel of a module can fit, by the function symbols of its cubin.
    bool may_fit(const char *cubin, size_t bytes) const {
        if (!has_pattern_) return true;
        bool found = false;
        bool is_known = each_function(cubin, bytes, [&](const char *name, bool) { found |= fits(name); });
        return found || !is_known;
    }
    // The first recorded warp of a grid, and the number of them.
    uint64_t first_warp(uint64_t a_block) const { return first_block_ * a_block; }
    uint64_t warps(uint64_t blocks, uint64_t a_block) const {
        return blocks <= first_block_ ? 0 : (std::min(blocks - 1, last_block_) + 1 - first_block_) * a_block;
    }
    // Whether `warps` more warps of a kernel are within the budget; those beyond it are counted. If only the
    // first launches of each kernel are recorded, a kernel gets only a share of the budget after its first
    // launch.
    bool takes(Kernel &kernel, uint64_t warps) {
        if (!budget_) return true;
        uint64_t before = kernel.warps.fetch_add(warps, std::memory_order_relaxed);
        bool is_too_much = per_kernel_ && before && before + warps > budget_ / SHARE_OF_A_KERNEL;
        if (is_too_much) kernel.is_spent = true;
        if (!is_too_much && taken_.fetch_add(warps, std::memory_order_relaxed) < budget_) return true;
        beyond_.fetch_add(warps, std::memory_order_relaxed);
        return false;
    }
    bool is_spent() const { return budget_ && taken_.load(std::memory_order_relaxed) >= budget_; }
    uint64_t take_beyond() { return beyond_.exchange(0, std::memory_order_relaxed); }

  private:
    bool read_pattern(const char *variable, std::regex &pattern, const char *otherwise) {
        const char *text = getenv(variable);
        if (!text || !*text) return false;
        try {
            pattern = std::regex(text, std::regex::ECMAScript | std::regex::optimize);
            return true;
        } catch (const std::regex_error &) {
            error_ = otherwise;
            return false;
        }
    }
    static constexpr uint64_t SHARE_OF_A_KERNEL = 16;

    static uint64_t read_number(const char *variable) {
        const char *text = getenv(variable);
        return text ? strtoull(text, nullptr, 10) : 0;
    }
    static void read_range(const char *text, uint64_t &first, uint64_t &last) {
        if (!text || !*text) return;
        char *rest = nullptr;
        first = strtoull(text, &rest, 10);
        last = *rest == '-' && rest[1] ? strtoull(rest + 1, nullptr, 10) : *rest == '-' ? ~uint64_t(0) : first;
    }

    std::regex pattern_, called_;
    bool has_pattern_ = false, has_called_ = false;
    const char *error_ = nullptr;
    uint64_t first_ = 0, last_ = ~uint64_t(0);
    uint64_t first_block_ = 0, last_block_ = ~uint64_t(0) - 1;
    uint64_t budget_ = 0, per_kernel_ = 0;  // 0: none
    std::atomic<uint64_t> count_{0}, taken_{0}, beyond_{0};
};

}  // namespace tracepipe
