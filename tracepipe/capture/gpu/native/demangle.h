// Names of C++ functions as people read them.
#pragma once
#include <cstdlib>
#include <cxxabi.h>
#include <string>

namespace tracepipe {

// What is no C++ name stays as it is.
inline std::string demangled(const char *name) {
    int status = 0;
    char *text = abi::__cxa_demangle(name, nullptr, nullptr, &status);
    std::string result = status == 0 && text ? text : name;
    free(text);
    return result;
}

}  // namespace tracepipe
