// SPDX-License-Identifier: MIT
// Demangles the names of C++ functions.
#pragma once
#include <cstdlib>
#include <cstring>
#include <cxxabi.h>
#include <string>

namespace tracepipe {

// Other names stay as they are: __cxa_demangle would take the name `f` of a C function for the type float.
inline std::string demangled(const char *name) {
    if (strncmp(name, "_Z", 2) != 0) return name;
    int status = 0;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string result = status == 0 && text ? text : name;
    free(text);
    return result;
}

}  // namespace tracepipe
