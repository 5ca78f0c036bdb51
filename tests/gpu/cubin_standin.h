// A module's machine code for sanitizer_standin.cpp, as far as the library looks at it: an ELF file of symbols.
#pragma once
#include <cstddef>
#include <cstring>
#include <elf.h>

// The first symbol stays empty, as in any such file; `texts` are the names, one behind the other.
template <size_t SYMBOLS> struct CubinStandin {
    Elf64_Ehdr head{};
    Elf64_Shdr sections[3]{};
    Elf64_Sym symbols[SYMBOLS]{};
    char names[128]{};

    CubinStandin(const char *texts, size_t bytes) {
        memcpy(names, texts, bytes);
        memcpy(head.e_ident, ELFMAG, SELFMAG);
        head.e_shoff = offsetof(CubinStandin, sections), head.e_shnum = 3;
        sections[1].sh_type = SHT_SYMTAB, sections[1].sh_link = 2;
        sections[1].sh_offset = offsetof(CubinStandin, symbols), sections[1].sh_size = sizeof symbols;
        sections[2].sh_type = SHT_STRTAB;
        sections[2].sh_offset = offsetof(CubinStandin, names), sections[2].sh_size = sizeof names;
    }
};
