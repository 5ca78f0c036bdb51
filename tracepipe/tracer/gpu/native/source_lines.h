// SPDX-License-Identifier: MIT
// Finds the source lines of machine code whose module has them (-lineinfo; Triton's kernels).
#pragma once
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <cupti.h>
#include <cupti_pcsampling.h>
#include <map>
#include <mutex>
#include <string>
#include <tuple>
#include <unordered_map>

namespace tracepipe {

class SourceLines {
  public:
    // Takes a loaded module: its code is kept if it has lines, as the program may free it.
    void take(const char *cubin, size_t bytes) {
        static constexpr char SECTION[] = ".debug_line";
        if (!cubin || bytes > BYTES_MAX || !memmem(cubin, bytes, SECTION, sizeof SECTION - 1)) return;
        CUpti_GetCubinCrcParams asking{};
        asking.size = CUpti_GetCubinCrcParamsSize, asking.cubin = cubin, asking.cubinSize = bytes;
        if (cuptiGetCubinCrc(&asking) != CUPTI_SUCCESS) return;
        std::lock_guard lock(mutex_);
        if (bytes_ + bytes > BYTES_MAX || !modules_.try_emplace(asking.cubinCrc, cubin, bytes).second) return;
        bytes_ += bytes;
    }
    // FILE:LINE of an instruction, "" if its module does not have it; null if it was not looked up yet, as
    // that is slow.
    const std::string *of(uint64_t module, const std::string &function, uint64_t offset) {
        auto key = std::tuple(module, function, offset);
        auto known = known_.find(key);
        if (known != known_.end()) return &known->second;
        std::lock_guard lock(mutex_);
        auto found = modules_.find(module);
        if (found == modules_.end() || known_.size() >= KNOWN_MAX || spent_ >= AT_ONCE) return nullptr;
        auto began = std::chrono::steady_clock::now();
        const std::string &line = known_[key] = asked(found->second, function, offset);
        spent_ += std::chrono::steady_clock::now() - began;
        return &line;
    }
    // Allows further look-ups.
    void rest() { spent_ = {}; }

  private:
    static constexpr size_t BYTES_MAX = 64 << 20, KNOWN_MAX = 1 << 16;
    static constexpr auto AT_ONCE = std::chrono::milliseconds(20);

    static std::string asked(const std::string &cubin, const std::string &function, uint64_t offset) {
        CUpti_GetSassToSourceCorrelationParams asking{};
        asking.size = CUpti_GetSassToSourceCorrelationParamsSize;
        asking.cubin = cubin.data(), asking.cubinSize = cubin.size();
        asking.functionName = function.c_str(), asking.pcOffset = offset;
        std::string line;
        if (cuptiGetSassToSourceCorrelation(&asking) == CUPTI_SUCCESS && asking.fileName && *asking.fileName) {
            bool is_whole = *asking.fileName == '/' || !asking.dirName || !*asking.dirName;
            line = (is_whole ? "" : std::string(asking.dirName) + "/") + asking.fileName;
            line += ":" + std::to_string(asking.lineNumber);
        }
        free(asking.fileName), free(asking.dirName);
        return line;
    }

    std::mutex mutex_;  // for the modules, which any thread loads
    std::unordered_map<uint64_t, std::string> modules_;
    size_t bytes_ = 0;
    std::map<std::tuple<uint64_t, std::string, uint64_t>, std::string> known_;
    std::chrono::steady_clock::duration spent_{};
};

}  // namespace tracepipe
