// SPDX-License-Identifier: MIT
// Redirects calls of a CUPTI function by the other libraries of a process to this one.
//
// A library that is linked to CUPTI calls it by an address in its own table (the psABI's GOT), which the
// dynamic linker has filled in. That address is replaced; code is not changed. A library that looks up the
// function's address by name (dlsym) is not affected.
#pragma once
#include <atomic>
#include <cstdint>
#include <cstring>
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <sys/mman.h>
#include <unistd.h>

namespace tracepipe {

class Redirect {
  public:
    // `library`: the start of the name of the library with the function. `ours` must be of this library.
    Redirect(const char *library, const char *function, void *ours)
        : library_(library), function_(function), ours_(ours) {
        Dl_info here{};
        if (dladdr(ours, &here)) own_ = reinterpret_cast<uintptr_t>(here.dli_fbase);
    }
    // Redirects the calls of libraries that were loaded since the last time.
    void look() {
        dl_iterate_phdr(
            [](dl_phdr_info *found, size_t, void *self) {
                auto &redirect = *static_cast<Redirect *>(self);
                // All objects have the same value: how many were loaded so far.
                if (redirect.seen_ == found->dlpi_adds) return 1;
                redirect.look_at(*found);
                redirect.adds_ = found->dlpi_adds;
                return 0;
            },
            this);
        seen_ = adds_;
    }

  private:
#if defined(__x86_64__)
    static constexpr uint32_t CALLED = R_X86_64_JUMP_SLOT, POINTED_TO = R_X86_64_GLOB_DAT;
#elif defined(__aarch64__)
    static constexpr uint32_t CALLED = R_AARCH64_JUMP_SLOT, POINTED_TO = R_AARCH64_GLOB_DAT;
#endif
    struct Object {
        uintptr_t base = 0, protected_from = 0, protected_to = 0;
        const ElfW(Sym) *symbols = nullptr;
        const char *strings = nullptr;
        const ElfW(Rela) *called = nullptr, *others = nullptr;
        size_t called_bytes = 0, other_bytes = 0, relative = 0;
    };

    void look_at(const dl_phdr_info &found) {
        if (found.dlpi_addr == own_) return;
        Object object{found.dlpi_addr};
        const ElfW(Dyn) *dynamic = nullptr;
        for (unsigned at = 0; at < found.dlpi_phnum; at++) {
            const ElfW(Phdr) &part = found.dlpi_phdr[at];
            if (part.p_type == PT_DYNAMIC) dynamic = reinterpret_cast<const ElfW(Dyn) *>(object.base + part.p_vaddr);
            if (part.p_type != PT_GNU_RELRO) continue;
            object.protected_from = object.base + part.p_vaddr;
            object.protected_to = object.protected_from + part.p_memsz;
        }
        if (!dynamic || !read(dynamic, object)) return;
        redirect(object, object.called, object.called_bytes);
        size_t relative_bytes = object.relative * sizeof(ElfW(Rela));  // they come first, and have no symbol
        if (object.others) redirect(object, object.others + object.relative, object.other_bytes - relative_bytes);
    }
    // Whether the object is linked to the library, and has the tables that are needed here.
    bool read(const ElfW(Dyn) *dynamic, Object &object) const {
        auto place = [&](ElfW(Addr) at) { return at < object.base ? at + object.base : at; };
        for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++) switch (entry->d_tag) {
                case DT_SYMTAB: object.symbols = reinterpret_cast<ElfW(Sym) *>(place(entry->d_un.d_ptr)); break;
                case DT_STRTAB: object.strings = reinterpret_cast<char *>(place(entry->d_un.d_ptr)); break;
                case DT_JMPREL: object.called = reinterpret_cast<ElfW(Rela) *>(place(entry->d_un.d_ptr)); break;
                case DT_PLTRELSZ: object.called_bytes = entry->d_un.d_val; break;
                case DT_RELA: object.others = reinterpret_cast<ElfW(Rela) *>(place(entry->d_un.d_ptr)); break;
                case DT_RELASZ: object.other_bytes = entry->d_un.d_val; break;
                case DT_RELACOUNT: object.relative = entry->d_un.d_val; break;
            }
        if (!object.symbols || !object.strings) return false;
        for (const ElfW(Dyn) *entry = dynamic; entry->d_tag != DT_NULL; entry++)
            if (entry->d_tag == DT_NEEDED &&
                strncmp(object.strings + entry->d_un.d_val, library_, strlen(library_)) == 0)
                return true;
        return false;
    }
    void redirect(const Object &object, const ElfW(Rela) *first, size_t bytes) const {
        for (const ElfW(Rela) *place = first; place && place < first + bytes / sizeof *first; place++) {
            uint32_t type = ELF64_R_TYPE(place->r_info);
            if (type != CALLED && type != POINTED_TO) continue;
            const ElfW(Sym) &symbol = object.symbols[ELF64_R_SYM(place->r_info)];
            if (strcmp(object.strings + symbol.st_name, function_) == 0) write(object, object.base + place->r_offset);
        }
    }
    void write(const Object &object, uintptr_t place) const {
        auto page_bytes = uintptr_t(sysconf(_SC_PAGESIZE));
        auto *page = reinterpret_cast<void *>(place & ~(page_bytes - 1));
        bool is_protected = place >= object.protected_from && place < object.protected_to;
        if (is_protected && mprotect(page, page_bytes, PROT_READ | PROT_WRITE) != 0) return;
        reinterpret_cast<std::atomic<void *> *>(place)->store(ours_);
        if (is_protected) mprotect(page, page_bytes, PROT_READ);
    }

    const char *library_, *function_;
    void *ours_;
    uintptr_t own_ = 0;
    unsigned long long seen_ = 0, adds_ = 0;
};

}  // namespace tracepipe
