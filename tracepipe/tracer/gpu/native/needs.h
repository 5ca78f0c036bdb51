// SPDX-License-Identifier: MIT
// What the kernels of a module need, by its machine code: an ELF file, as tracer/find/kernels.py describes it.
//
// The driver is not asked, as it is called back here with its locks held, and it knows the patched code, which
// may need more registers.
#pragma once
#include <cstdint>
#include <cstring>
#include <elf.h>
#include <string>
#include <unordered_map>
#include <vector>

#include "selection.h"

namespace tracepipe {

struct Needs {
    uint32_t registers = 0;  // of a thread; 0: not known
    uint32_t static_shared_bytes = 0;
};

class KernelNeeds {
  public:
    KernelNeeds() = default;
    KernelNeeds(const char *cubin, size_t bytes) {
        std::vector<const char *> names;  // of the symbols that are kernels, by number
        bool is_known = each_symbol(cubin, bytes, [&](const Elf64_Sym &symbol, const char *name) {
            bool is_kernel = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC && symbol.st_other & IS_KERNEL;
            names.push_back(is_kernel ? name : nullptr);
        });
        if (!is_known) return;
        each_section(cubin, bytes, [&](const char *name, const char *data, size_t size) {
            if (strcmp(name, ".nv.info") == 0) read_registers(data, size, names);
        });
        uint64_t reserved = 0;
        std::unordered_map<std::string, uint64_t> shared;
        each_section(cubin, bytes, [&](const char *name, const char *, size_t size) {
            if (strcmp(name, RESERVED) == 0)
                reserved = RESERVED_BYTES;
            else if (strncmp(name, SHARED, strlen(SHARED)) == 0)
                shared[name + strlen(SHARED)] = size;
        });
        for (auto &[name, size] : shared) {
            auto known = needs_.find(name);
            if (known != needs_.end()) known->second.static_shared_bytes = uint32_t(size > reserved ? size - reserved : 0);
        }
    }
    Needs of(const char *kernel) const {
        auto known = needs_.find(kernel);
        return known == needs_.end() ? Needs{} : known->second;
    }

  private:
    static constexpr const char *SHARED = ".nv.shared.", *RESERVED = ".nv.shared.reserved.0";
    static constexpr uint64_t RESERVED_BYTES = 1024;
    static constexpr uint8_t WITH_BYTES = 4, REGISTERS = 0x2f;

    // Calls `found` with the name of each section, its data (null where the file has none) and its size.
    template <typename Found> static void each_section(const char *cubin, size_t bytes, Found found) {
        const auto *file = reinterpret_cast<const Elf64_Ehdr *>(cubin);
        const auto *sections = reinterpret_cast<const Elf64_Shdr *>(cubin + file->e_shoff);
        if (file->e_shstrndx >= file->e_shnum) return;
        const Elf64_Shdr &names = sections[file->e_shstrndx];
        if (!is_within(names, bytes)) return;
        for (unsigned at = 0; at < file->e_shnum; at++) {
            const Elf64_Shdr &section = sections[at];
            if (section.sh_name >= names.sh_size) continue;
            const char *name = cubin + names.sh_offset + section.sh_name;
            if (!memchr(name, 0, names.sh_size - section.sh_name)) continue;
            bool has_data = section.sh_type != SHT_NOBITS;
            if (has_data && !is_within(section, bytes)) continue;
            found(name, has_data ? cubin + section.sh_offset : nullptr, size_t(section.sh_size));
        }
    }
    static bool is_within(const Elf64_Shdr &section, size_t bytes) {
        return section.sh_offset <= bytes && section.sh_size <= bytes - section.sh_offset;
    }
    // Attributes: | format u8 | attribute u8 | value u16, or with format 4 the number of bytes that follow |
    void read_registers(const char *data, size_t size, const std::vector<const char *> &names) {
        for (size_t at = 0; data && at + 4 <= size;) {
            uint8_t format = uint8_t(data[at]), attribute = uint8_t(data[at + 1]);
            uint16_t follow = 0;
            memcpy(&follow, data + at + 2, sizeof follow);
            at += 4;
            if (format != WITH_BYTES) continue;
            uint32_t pair[2];  // the number of a symbol, and its value
            if (attribute == REGISTERS && follow >= sizeof pair && at + sizeof pair <= size) {
                memcpy(pair, data + at, sizeof pair);
                if (pair[0] < names.size() && names[pair[0]]) needs_[names[pair[0]]].registers = pair[1];
            }
            at += follow;
        }
    }

    std::unordered_map<std::string, Needs> needs_;
};

}  // namespace tracepipe
