// Prints what the kernels of a cubin need, as the library of `warps` reads it: `needs FILE NAME…`.
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>

#include "needs.h"

int main(int count, char **words) {
    std::ifstream file(words[1], std::ios::binary);
    std::string cubin(std::istreambuf_iterator<char>(file), {});
    tracepipe::KernelNeeds needs(cubin.data(), cubin.size());
    for (int at = 2; at < count; at++) {
        tracepipe::Needs found = needs.of(words[at]);
        printf("%s %u %u\n", words[at], found.registers, found.static_shared_bytes);
    }
}
