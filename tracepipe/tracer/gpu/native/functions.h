// SPDX-License-Identifier: MIT
// The patched modules, and their kernels.
#pragma once
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include <sanitizer.h>

#include "called.h"
#include "driver.h"
#include "marks.h"
#include "needs.h"
#include "own_thread.h"
#include "selection.h"
#include "transport.h"

namespace tracepipe {

// Modules that are loaded after the stop or during a capture by another thread, and modules without kernels
// that are still recorded, are not patched. They are kept so that their launches can be counted.
struct Module {
    const CUmodule handle;
    const CUcontext context;
    const bool launches_kernels;  // possibly
    const bool is_missed;         // not patched only because of a capture
    std::atomic<bool> is_patched;
    std::atomic<bool> is_prepared{false};  // the GPU has what is below
    std::vector<CUdeviceptr> marks{};      // its variables that get a MarkBuffer
    std::vector<CalledCode> called{};
    KernelNeeds needs{};
};

struct Function {
    Kernel &kernel;
    const std::shared_ptr<Module> module;
    const Needs needs;
};

class Functions {
  public:
    Functions(Channel &channel, const Selection &selection) : channel_(channel), selection_(selection) {}

    // `may_be_patched`: no other thread captures a stream.
    void patch(const Sanitizer_ResourceModuleData &data, bool may_be_patched) {
        if (!selection_.may_fit(data.pCubin, data.cubinSize)) return;
        bool is_wanted = !is_stopped_ && !is_spent(data.pCubin, data.cubinSize);
        bool is_patched = is_wanted && may_be_patched;
        bool has_called = is_patched && has_called_in(data);
        if (is_patched && !patch(data.module, has_called))
            return void(channel_.note("a module could not be patched: its kernels are not recorded"));
        bool launches_kernels = is_patched && data.pCubin && memmem(data.pCubin, data.cubinSize, "cudaCDP", 7);
        std::shared_ptr<Module> module(new Module{data.module, data.context, launches_kernels,
                                                  is_wanted && !may_be_patched, is_patched});
        if (is_patched) module->marks = marks_in(data);
        if (is_patched) module->needs = KernelNeeds(data.pCubin, data.cubinSize);
        if (has_called) module->called = called_in(data);
        module->is_prepared = module->marks.empty() && module->called.empty();
        std::unique_lock<std::shared_mutex> functions(mutex_);
        modules_[data.module] = module;
        if (!launches_kernels) return;
        // Launches by kernels raise no callback, so the names are kept now.
        each_function(data.pCubin, data.cubinSize, [&](const char *name, bool) { know_code(data.module, name); });
    }
    // The context is about to be destroyed with its modules.
    void forget(CUcontext context) {
        std::vector<CUmodule> modules;
        {
            std::shared_lock<std::shared_mutex> lock(mutex_);
            for (auto &[handle, module] : modules_)
                if (module->context == context) modules.push_back(handle);
        }
        for (CUmodule module : modules) forget(module);
    }
    void forget(CUmodule module) {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        modules_.erase(module);
        for (auto at = functions_.begin(); at != functions_.end();)
            at = at->second->module->handle == module ? functions_.erase(at) : std::next(at);
        for (auto at = code_.begin(); at != code_.end();)
            at = at->second.second == module ? code_.erase(at) : std::next(at);
    }
    // No further launch is recorded: no more modules are patched, and the others may be unpatched.
    void stop() { is_stopped_ = true; }
    // Restores the kernels. Only while no thread of the program is in the driver and the GPU is idle:
    // otherwise a launch on another thread, or a running kernel, may execute a mixture of both versions, and
    // the program dies of an illegal instruction (Compute Sanitizer 13.0, driver 580).
    void unpatch() {
        std::unique_lock<std::shared_mutex> lock(mutex_);
        for (auto &[handle, module] : modules_)
            if (module->is_patched.exchange(false)) sanitizerUnpatchModule(handle);
        is_unpatched_ = true;
    }
    bool is_any_patched() {
        std::shared_lock<std::shared_mutex> lock(mutex_);
        for (auto &[handle, module] : modules_)
            if (module->is_patched) return true;
        return false;
    }
    bool is_unpatched() const { return is_unpatched_; }
    bool is_stopped() const { return is_stopped_; }
    // The function of a launch; null if its module is not to be patched.
    std::shared_ptr<const Function> of(const Sanitizer_LaunchData &data) {
        const char *name = data.functionName ? data.functionName : "";
        std::shared_ptr<Module> module;
        {
            std::shared_lock<std::shared_mutex> lock(mutex_);
            auto known = functions_.find(data.function);
            if (known != functions_.end()) return known->second;
            auto found = modules_.find(data.module);
            if (found != modules_.end()) module = found->second;
            if (!module && (!selection_.has_pattern() || seen_.count(data.function))) return nullptr;
        }
        report(data.function, name);
        if (!module) return nullptr;
        std::shared_ptr<const Function> function(new Function{kernel_of(name), module, module->needs.of(name)});
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
    // Whether calls of device functions are recorded.
    bool has_called() const { return selection_.has_called(); }
    // The number of a mark's name.
    uint64_t name_of(const MarkRecord &mark) {
        static constexpr uint64_t OF_MARKS = uint64_t(1) << 61;
        if (mark.is_of_call()) return mark.called();
        std::lock_guard<std::mutex> lock(names_mutex_);
        uint64_t &id = mark_names_[mark.key()];
        if (!id) {
            id = OF_MARKS | mark_names_.size();
            channel_.put(KIND_NAME, &id, sizeof id, mark_name(mark));
        }
        return id;
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
    bool patch(CUmodule module, bool has_called) {
        // The API allows only one patching at a time.
        std::lock_guard<std::mutex> lock(patching_);
        auto at = [module](Sanitizer_InstructionId what, const char *function) {
            return sanitizerPatchInstructions(what, module, function) == SANITIZER_SUCCESS;
        };
        return at(SANITIZER_INSTRUCTION_BLOCK_ENTER, "tracepipe_enter") &&
               at(SANITIZER_INSTRUCTION_BLOCK_EXIT, "tracepipe_exit") &&
               (!has_called || (at(SANITIZER_INSTRUCTION_CALL, "tracepipe_call") &&
                                at(SANITIZER_INSTRUCTION_RET, "tracepipe_return"))) &&
               sanitizerPatchModule(module) == SANITIZER_SUCCESS;
    }
    // Whether all kernels of a module have been recorded often enough, in other modules.
    bool is_spent(const char *cubin, size_t bytes) {
        if (!selection_.is_per_kernel()) return false;
        std::lock_guard<std::mutex> lock(kernels_mutex_);
        bool is_any = false, are_all = true;
        bool is_known = each_function(cubin, bytes, [&](const char *name, bool is_kernel) {
            if (!is_kernel || !are_all) return;
            auto known = kernels_.find(name);
            is_any = true, are_all = known != kernels_.end() && known->second.is_spent;
        });
        return is_known && is_any && are_all;
    }
    Kernel &kernel_of(const char *name) {
        uint64_t number = name_of(name);
        std::lock_guard<std::mutex> lock(kernels_mutex_);
        auto known = kernels_.find(name);
        if (known == kernels_.end()) known = kernels_.try_emplace(name, number, selection_.fits(name)).first;
        return known->second;
    }
    // Reports each launched kernel once, as its name is needed if nothing fits the pattern.
    void report(CUfunction function, const char *name) {
        if (!selection_.has_pattern()) return;
        {
            std::unique_lock<std::shared_mutex> lock(mutex_);
            if (seen_.size() >= SEEN_MAX || !seen_.insert(function).second) return;
        }
        uint64_t fits = selection_.fits(name);
        channel_.put(KIND_MET, &fits, sizeof fits, demangled(name));
    }
    // The addresses of a module's variables for marks. The driver may be called within this callback, but not
    // by another thread until the launch that loads the module is over.
    std::vector<CUdeviceptr> marks_in(const Sanitizer_ResourceModuleData &data) {
        std::vector<CUdeviceptr> found;
        if (!data.pCubin || !memmem(data.pCubin, data.cubinSize, MARK_SYMBOL, strlen(MARK_SYMBOL))) return found;
        OwnCalls own;
        each_symbol(data.pCubin, data.cubinSize, [&](const Elf64_Sym &symbol, const char *name) {
            if (ELF64_ST_TYPE(symbol.st_info) != STT_OBJECT || !strstr(name, MARK_SYMBOL)) return;
            CUdeviceptr at = 0;
            size_t bytes = 0;
            bool is_found = driver().moduleGetGlobal(&at, &bytes, data.module, name) == CUDA_SUCCESS;
            if (is_found && bytes == sizeof(MarkBuffer)) found.push_back(at);
        });
        return found;
    }
    template <typename Found> void each_called(const Sanitizer_ResourceModuleData &data, Found found) {
        each_symbol(data.pCubin, data.cubinSize, [&](const Elf64_Sym &symbol, const char *name) {
            bool is_function = ELF64_ST_TYPE(symbol.st_info) == STT_FUNC;
            if (is_function) found(symbol, name, symbol.st_other & IS_KERNEL ? "" : std::string(called_name(name)));
        });
    }
    // Whether a module has functions that fit. All names are reported, as they are needed if none fits.
    bool has_called_in(const Sanitizer_ResourceModuleData &data) {
        if (!has_called()) return false;
        bool has_any = false;
        each_called(data, [&](const Elf64_Sym &, const char *, const std::string &name) {
            if (name.empty()) return;
            uint64_t fits = selection_.fits_called(name);
            has_any |= fits != 0;
            std::lock_guard<std::mutex> lock(names_mutex_);
            if (seen_called_.size() < SEEN_MAX && seen_called_.insert(name).second)
                channel_.put(KIND_MET_CALLED, &fits, sizeof fits, demangled(name.c_str()));
        });
        return has_any;
    }
    // The code of those functions, by section. A section's first symbol is that of a kernel or of a separate
    // function.
    std::vector<CalledCode> called_in(const Sanitizer_ResourceModuleData &data) {
        std::map<unsigned, CalledCode> sections;
        each_called(data, [&](const Elf64_Sym &symbol, const char *symbol_name, const std::string &name) {
            CalledCode &code = sections[symbol.st_shndx];
            uint64_t size = 0;
            if (!symbol.st_value) sanitizerGetFunctionPcAndSize(data.module, symbol_name, &code.begin, &size);
            code.end = std::max(code.end, symbol.st_value + symbol.st_size);
            if (name.empty() || !selection_.fits_called(name)) return;
            uint64_t number = name_of(name.c_str());
            if (number >> CALL_NAME_BITS) return;
            code.functions.push_back(
                {uint32_t(symbol.st_value), uint32_t(symbol.st_value + symbol.st_size), uint32_t(number), 0});
        });
        std::vector<CalledCode> called;
        for (auto &[number, code] : sections) {
            if (!code.begin || code.functions.empty()) continue;
            code.end += code.begin;
            called.push_back(std::move(code));
        }
        return called;
    }
    void know_code(CUmodule module, const char *name) {
        uint64_t pc = 0, size = 0;
        if (sanitizerGetFunctionPcAndSize(module, name, &pc, &size) == SANITIZER_SUCCESS && pc)
            code_[pc] = {name_of(name), module};
    }

    static constexpr size_t SEEN_MAX = 4096;
    Channel &channel_;
    const Selection &selection_;
    std::unordered_set<CUfunction> seen_;  // under mutex_
    std::atomic<bool> is_stopped_{false}, is_unpatched_{false};
    std::mutex patching_, names_mutex_, kernels_mutex_;
    std::shared_mutex mutex_;
    std::unordered_map<CUfunction, std::shared_ptr<const Function>> functions_;
    std::unordered_map<CUmodule, std::shared_ptr<Module>> modules_;
    std::unordered_map<std::string, Kernel> kernels_;  // their addresses stay the same
    std::unordered_map<uint64_t, std::pair<uint64_t, CUmodule>> code_;
    std::unordered_map<std::string, uint64_t> names_;
    std::map<std::pair<uint64_t, uint64_t>, uint64_t> mark_names_;
    std::set<std::string> seen_called_;  // under names_mutex_
};

}  // namespace tracepipe
