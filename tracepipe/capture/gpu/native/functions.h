// The modules that are patched, and their kernels.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <sanitizer.h>

#include "selection.h"
#include "transport.h"

namespace tracepipe {

struct Function {
    uint64_t name = 0;
    bool is_selected = false;
    bool launches_kernels = false;  // may do so: its module can
    CUmodule module = nullptr;      // null: not patched
    std::shared_ptr<std::atomic<uint32_t>> needed_room;
};

class Functions {
  public:
    Functions(Channel &channel, const Selection &selection) : channel_(channel), selection_(selection) {}

    void patch(const Sanitizer_ResourceModuleData &data) {
        if (!selection_.may_fit(data.pCubin, data.cubinSize)) return;
        // The API asks for one patching at a time.
        std::lock_guard<std::mutex> lock(patching_);
        if (is_stopped_) {
            std::unique_lock<std::shared_mutex> functions(mutex_);
            patched_[data.module] = false;
            return;
        }
        bool is_patched =
            sanitizerPatchInstructions(SANITIZER_INSTRUCTION_BLOCK_ENTER, data.module, "tracepipe_enter") ==
                SANITIZER_SUCCESS &&
            sanitizerPatchInstructions(SANITIZER_INSTRUCTION_BLOCK_EXIT, data.module, "tracepipe_exit") ==
                SANITIZER_SUCCESS &&
            sanitizerPatchModule(data.module) == SANITIZER_SUCCESS;
        if (!is_patched) return void(channel_.note("a module could not be patched: its kernels are not recorded"));
        bool launches_kernels = data.pCubin && memmem(data.pCubin, data.cubinSize, "cudaCDP", 7);
        std::unique_lock<std::shared_mutex> functions(mutex_);
        patched_[data.module] = launches_kernels;
        if (!launches_kernels) return;
        // What kernels launch raises no callback: their names are kept now.
        each_function(data.pCubin, data.cubinSize, [&](const char *name) { know_code(data.module, name); });
    }
    void forget(CUmodule module) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        patched_.erase(module);
        for (auto at = functions_.begin(); at != functions_.end();)
            at = at->second.module == module ? functions_.erase(at) : std::next(at);
        for (auto at = code_.begin(); at != code_.end();)
            at = at->second.second == module ? code_.erase(at) : std::next(at);
    }
    // No launch is recorded any more: the kernels run as they were, and are known so that they can be counted.
    // Before a launch, on the program's thread.
    void stop() {
        if (is_stopped_.load(std::memory_order_relaxed)) return;
        std::lock_guard<std::mutex> lock(patching_);
        if (is_stopped_.load()) return;
        std::shared_lock<std::shared_mutex> functions(mutex_);
        for (auto &[module, launches_kernels] : patched_) sanitizerUnpatchModule(module);
        is_stopped_ = true;
    }
    bool is_stopped() const { return is_stopped_; }
    Function of(const Sanitizer_LaunchData &data) {
        Function function;
        {
            std::shared_lock<std::shared_mutex> lock(mutex_);
            auto known = functions_.find(data.function);
            if (known != functions_.end()) return known->second;
            auto module = patched_.find(data.module);
            if (module == patched_.end()) return function;
            function.launches_kernels = module->second;
        }
        const char *name = data.functionName ? data.functionName : "";
        function.module = data.module;
        function.needed_room = std::make_shared<std::atomic<uint32_t>>(0);
        function.is_selected = selection_.fits(demangled(name));
        function.name = name_of(name);
        std::unique_lock<std::shared_mutex> lock(mutex_);
        functions_[data.function] = function;
        return function;
    }
    // The name of the kernel that begins at an address, 0 if it is not known.
    uint64_t code_at(uint64_t pc) {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        auto found = code_.find(pc);
        return found == code_.end() ? 0 : found->second.first;
    }
    uint64_t name_of(const char *mangled) {
        std::lock_guard<std::mutex> lock(names_mutex_);
        uint64_t &id = names_[mangled];
        if (!id) {
            id = names_.size();
            channel_.put(KIND_NAME, &id, sizeof id, demangled(mangled));
        }
        return id;
    }

  private:
    void know_code(CUmodule module, const char *name) {
        uint64_t pc = 0, size = 0;
        if (sanitizerGetFunctionPcAndSize(module, name, &pc, &size) == SANITIZER_SUCCESS && pc)
            code_[pc] = {name_of(name), module};
    }

    Channel &channel_;
    const Selection &selection_;
    std::atomic<bool> is_stopped_{false};
    std::mutex patching_, names_mutex_;
    std::shared_mutex mutex_;
    std::unordered_map<CUfunction, Function> functions_;
    // Whether they have kernels that launch kernels; those that came after the stop are not patched.
    std::unordered_map<CUmodule, bool> patched_;
    std::unordered_map<uint64_t, std::pair<uint64_t, CUmodule>> code_;
    std::unordered_map<std::string, uint64_t> names_;
};

}  // namespace tracepipe
