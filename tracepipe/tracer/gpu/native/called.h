// SPDX-License-Identifier: MIT
// The device functions whose calls are recorded: found in the code of modules, and listed for the patches.
#pragma once
#include <algorithm>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include <sanitizer.h>

#include "called_table.h"
#include "marks.h"

namespace tracepipe {

// A section of a module's code, and such functions in it.
struct CalledCode {
    uint64_t begin, end;
    std::vector<CalledFunction> functions;
};

// The name of a device function from that of its symbol: `$_Z1kv$_Z1fv` is a kernel k's private f, `_Z1fv$9`
// is one of several that nvlink took from different files.
inline std::string_view called_name(std::string_view symbol) {
    size_t last = symbol.rfind('$');
    if (last == symbol.npos) return symbol;
    std::string_view rest = symbol.substr(last + 1);
    bool is_number = !rest.empty() && rest.find_first_not_of("0123456789") == rest.npos;
    return symbol[0] == '$' ? rest : is_number ? symbol.substr(0, last) : symbol;
}

// The table on the GPU of one context.
class Called {
  public:
    // From the library's own thread: sets the memory for the table, and for the records of calls.
    void open(uint64_t address, const MarkBuffer &buffer) {
        std::lock_guard<std::mutex> lock(mutex_);
        address_ = address;
        table_->records = buffer.records, table_->counts = buffer.counts, table_->slots = buffer.slots;
    }
    // From a callback of a launch on `stream`: adds a module, whose calls are recorded from this kernel on.
    // False if there is no room for them.
    bool add(CUmodule module, const std::vector<CalledCode> &code, Sanitizer_StreamHandle stream) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!address_) return false;
        for (const CalledCode &section : code) {
            uint32_t count = uint32_t(section.functions.size());
            if (table_->sections == MOST_CALLED_SECTIONS || functions_ + count > MOST_CALLED) return false;
            std::copy(section.functions.begin(), section.functions.end(), table_->functions + functions_);
            table_->section[table_->sections] = {section.begin, section.end, functions_, count};
            of_module_.emplace(module, table_->sections++);
            functions_ += count;
        }
        return sanitizerMemcpyHostToDeviceAsync(reinterpret_cast<void *>(address_), table_.get(), sizeof *table_,
                                                stream) == SANITIZER_SUCCESS;
    }
    // The module is unloaded, and other code may get its addresses. The GPU's table changes with the next
    // module.
    void forget(CUmodule module) {
        std::lock_guard<std::mutex> lock(mutex_);
        auto [first, past] = of_module_.equal_range(module);
        for (auto at = first; at != past; ++at) table_->section[at->second].begin = table_->section[at->second].end = 0;
        of_module_.erase(first, past);
    }

  private:
    std::mutex mutex_;
    uint64_t address_ = 0;
    std::unique_ptr<CalledTable> table_{new CalledTable{}};
    uint32_t functions_ = 0;
    std::multimap<CUmodule, uint32_t> of_module_;
};

}  // namespace tracepipe
