// Does what the lines of its input say with captured_graphs.h, for test_gpu_warps.py: graphs, executable ones and stacks are
// numbers, and functions are names. `stacks X F …` answers with the stacks of a launch of these functions.
#include "captured_graphs.h"

#include <cstdio>
#include <iostream>
#include <sstream>
#include <string>

template <typename Handle> static Handle handle(uintptr_t number) { return reinterpret_cast<Handle>(number); }

int main() {
    tracepipe::CapturedGraphs graphs;
    for (std::string line; std::getline(std::cin, line);) {
        std::istringstream words(line);
        std::string what, function;
        uintptr_t first = 0, second = 0;
        words >> what;
        if (what == "add") {
            words >> function >> first;
            graphs.add(function == "-" ? nullptr : function.c_str(), first);
            continue;
        }
        words >> first;
        if (what == "begin") graphs.begin();
        if (what == "end") graphs.end(handle<CUgraph>(first));
        if (what == "destroy") graphs.destroy(handle<CUgraph>(first));
        if (what == "forget") graphs.destroy(handle<CUgraphExec>(first));
        if (what == "instantiate" && words >> second) graphs.instantiate(handle<CUgraph>(first), handle<CUgraphExec>(second));
        if (what != "stacks") continue;
        std::vector<size_t> functions;
        while (words >> function) functions.push_back(graphs.hash(function.c_str()));
        for (uint64_t stack : graphs.stacks(handle<CUgraphExec>(first), functions)) std::cout << stack << ' ';
        std::cout << std::endl;
    }
}
