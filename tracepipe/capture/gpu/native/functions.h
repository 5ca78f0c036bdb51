// The modules that are patched, and their kernels.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
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

// Those that came after the stop are not patched, and known so that their launches can be counted.
struct Module {
    CUcontext context = nullptr;
    bool is_patched = false;
    bool launches_kernels = false;
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
            modules_[data.module] = {data.context};
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
        modules_[data.module] = {data.context, true, launches_kernels};
        if (!launches_kernels) return;
        // What kernels launch raises no callback: their names are kept now.
        each_function(data.pCubin, data.cubinSize, [&](const char *name) { know_code(data.module, name); });
    }
    // The context is about to be destroyed, and its modules with it.
    void forget(CUcontext context) {
        std::vector<CUmodule> modules;
        {
            std::shared_lock<std::shared_mutex> lock(mutex_);
            for (auto &[handle, module] : modules_)
                if (module.context == context) modules.push_back(handle);
        }
        for (CUmodule module : modules) forget(module);
    }
    void forget(CUmodule module) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        modules_.erase(module);
        for (auto at = functions_.begin(); at != functions_.end();)
            at = at->second.module == module ? functions_.erase(at) : std::next(at);
        for (auto at = code_.begin(); at != code_.end();)
            at = at->second.second == module ? code_.erase(at) : std::next(at);
    }
    // No launch is recorded any more: no further module is patched, and the others may be unpatched.
    void stop() { is_stopped_ = true; }
    // The kernels run as they were from now on. Only while no thread of the program is in the driver and the GPU is
    // idle: else a launch on another thread, or a kernel that runs, may meet half of either code, and the program
    // dies of an illegal instruction (Compute Sanitizer 13.0, driver 580).
    void unpatch() {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        for (auto &[handle, module] : modules_)
            if (std::exchange(module.is_patched, false)) sanitizerUnpatchModule(handle);
        is_unpatched_ = true;
    }
    bool is_unpatched() const { return is_unpatched_; }
    bool is_stopped() const { return is_stopped_; }
    Function of(const Sanitizer_LaunchData &data) {
        Function function;
        const char *name = data.functionName ? data.functionName : "";
        bool is_in_reach = false;
        {
            std::shared_lock<std::shared_mutex> lock(mutex_);
            auto known = functions_.find(data.function);
            if (known != functions_.end()) return known->second;
            auto module = modules_.find(data.module);
            is_in_reach = module != modules_.end();
            if (!is_in_reach && (!selection_.has_pattern() || met_.count(data.function))) return function;
            if (is_in_reach) function.launches_kernels = module->second.launches_kernels;
        }
        meet(data.function, name);
        if (!is_in_reach) return function;
        function.module = data.module;
        function.needed_room = std::make_shared<std::atomic<uint32_t>>(0);
        function.is_selected = selection_.fits(name);
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
    // A kernel is launched: said once, for when nothing fits the pattern.
    void meet(CUfunction function, const char *name) {
        if (!selection_.has_pattern()) return;
        {
            std::unique_lock<std::shared_mutex> lock(mutex_);
            if (met_.size() >= MET_MAX || !met_.insert(function).second) return;
        }
        uint64_t fits = selection_.fits(name);
        channel_.put(KIND_MET, &fits, sizeof fits, demangled(name));
    }
    void know_code(CUmodule module, const char *name) {
        uint64_t pc = 0, size = 0;
        if (sanitizerGetFunctionPcAndSize(module, name, &pc, &size) == SANITIZER_SUCCESS && pc)
            code_[pc] = {name_of(name), module};
    }

    static constexpr size_t MET_MAX = 4096;
    Channel &channel_;
    const Selection &selection_;
    std::unordered_set<CUfunction> met_;  // under mutex_
    std::atomic<bool> is_stopped_{false}, is_unpatched_{false};
    std::mutex patching_, names_mutex_;
    std::shared_mutex mutex_;
    std::unordered_map<CUfunction, Function> functions_;
    std::unordered_map<CUmodule, Module> modules_;
    std::unordered_map<uint64_t, std::pair<uint64_t, CUmodule>> code_;
    std::unordered_map<std::string, uint64_t> names_;
};

}  // namespace tracepipe
