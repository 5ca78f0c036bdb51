// SPDX-License-Identifier: MIT
// Which stack captured each kernel of a CUDA graph, where no callback tells of nodes.
//
// Compute Sanitizer reports the kernels of a graph's launch in the order in which they were captured, and names of
// their functions (13.0, driver 580). If a capture was the only one in the process, and a graph's launch has the same
// functions in the same order, its kernels have the stacks of the capture. Otherwise they are not known.
#pragma once
#include <atomic>
#include <functional>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <cuda.h>

namespace tracepipe {

// In place of the number of a stack, where the thread had none. 0: it is not known. See STACK_OF_AUTOGRAD too.
constexpr uint64_t NO_STACK_AT_CAPTURE = 2;

class CapturedGraphs {
  public:
    // Names of functions, hashed, with the stacks that captured them.
    using Kernels = std::vector<std::pair<size_t, uint64_t>>;

    static size_t hash(const char *function) { return function ? std::hash<std::string_view>()(function) : 0; }

    void begin() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_alone_ = !captures_++;
        captured_.clear();
    }
    void add(const char *function, uint64_t stack) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (captures_) captured_.emplace_back(hash(function), stack ? stack : NO_STACK_AT_CAPTURE);
    }
    // A capture is over, with a graph if it has not failed.
    void end(CUgraph graph) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (captures_) captures_--;
        is_alone_ &= !captures_;
        if (graph) graphs_[graph] = is_alone_ ? std::move(captured_) : Kernels();
        captured_.clear();
    }
    void instantiate(CUgraph graph, CUgraphExec executable) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto known = graphs_.find(graph);
        executables_[executable] = known == graphs_.end() ? Kernels() : known->second;
    }
    void destroy(CUgraph graph) {
        std::lock_guard<std::mutex> lock(mutex_);
        graphs_.erase(graph);
    }
    void destroy(CUgraphExec executable) {
        std::lock_guard<std::mutex> lock(mutex_);
        executables_.erase(executable);
    }
    // The stacks of a launch's kernels, whose functions are given; none if they are not known.
    std::vector<uint64_t> stacks(CUgraphExec executable, const std::vector<size_t> &functions) {
        std::lock_guard<std::mutex> lock(mutex_);
        std::vector<uint64_t> found;
        auto known = executables_.find(executable);
        if (known == executables_.end() || known->second.size() != functions.size()) return {};
        for (auto [function, stack] : known->second) {
            if (!function || function != functions[found.size()]) return {};
            found.push_back(stack);
        }
        return found;
    }

  private:
    std::mutex mutex_;
    unsigned captures_ = 0;  // in progress
    bool is_alone_ = false;
    Kernels captured_;
    std::unordered_map<CUgraph, Kernels> graphs_;
    std::unordered_map<CUgraphExec, Kernels> executables_;
};

}  // namespace tracepipe
