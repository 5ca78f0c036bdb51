// Which launches are recorded: a pattern of demangled kernel names, and a range of those that fit it.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <elf.h>
#include <regex>
#include <string>

namespace tracepipe {

inline std::string demangled(const char *name) {
    int status = 0;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string result = status == 0 && text ? text : name;
    free(text);
    return result;
}

class Selection {
  public:
    // Reads TRACEPIPE_GPU_KERNELS, a regular expression, and TRACEPIPE_GPU_LAUNCHES, FIRST-LAST counted
    // from 1, both included. What the capture process checks before is taken as it is.
    void read_environment() {
        const char *pattern = getenv("TRACEPIPE_GPU_KERNELS"), *range = getenv("TRACEPIPE_GPU_LAUNCHES");
        if (pattern && *pattern) {
            try {
                pattern_ = std::regex(pattern, std::regex::ECMAScript | std::regex::optimize);
                has_pattern_ = true;
            } catch (const std::regex_error &) {
                error_ = "TRACEPIPE_GPU_KERNELS is no regular expression; all kernels are recorded";
            }
        }
        if (range && *range) {
            char *rest = nullptr;
            first_ = strtoull(range, &rest, 10);
            last_ = *rest == '-' && rest[1] ? strtoull(rest + 1, nullptr, 10) : *rest == '-' ? ~uint64_t(0) : first_;
        }
    }
    const char *error() const { return error_; }
    bool fits(const std::string &name) const { return !has_pattern_ || std::regex_search(name, pattern_); }
    // Counts a launch that fits; whether it is in the range.
    bool is_next_selected() {
        uint64_t number = count_.fetch_add(1, std::memory_order_relaxed) + 1;
        return number >= first_ && number <= last_;
    }
    // Whether a kernel of a module can fit: by the function symbols of its cubin, an ELF file.
    bool may_fit(const char *cubin, size_t bytes) const {
        if (!has_pattern_) return true;
        const auto *file = reinterpret_cast<const Elf64_Ehdr *>(cubin);
        if (!cubin || bytes < sizeof *file || memcmp(file->e_ident, ELFMAG, SELFMAG) != 0) return true;
        if (file->e_shoff > bytes || (bytes - file->e_shoff) / sizeof(Elf64_Shdr) < file->e_shnum) return true;
        const auto *sections = reinterpret_cast<const Elf64_Shdr *>(cubin + file->e_shoff);
        for (unsigned at = 0; at < file->e_shnum; at++) {
            const Elf64_Shdr &table = sections[at];
            if (table.sh_type != SHT_SYMTAB || table.sh_link >= file->e_shnum) continue;
            const Elf64_Shdr &names = sections[table.sh_link];
            if (table.sh_offset + table.sh_size > bytes || names.sh_offset + names.sh_size > bytes) return true;
            const auto *symbols = reinterpret_cast<const Elf64_Sym *>(cubin + table.sh_offset);
            for (size_t k = 0; k < table.sh_size / sizeof *symbols; k++)
                if (ELF64_ST_TYPE(symbols[k].st_info) == STT_FUNC && symbols[k].st_name < names.sh_size &&
                    fits(demangled(cubin + names.sh_offset + symbols[k].st_name)))
                    return true;
        }
        return false;
    }

  private:
    std::regex pattern_;
    bool has_pattern_ = false;
    const char *error_ = nullptr;
    uint64_t first_ = 0, last_ = ~uint64_t(0);
    std::atomic<uint64_t> count_{0};
};

}  // namespace tracepipe
