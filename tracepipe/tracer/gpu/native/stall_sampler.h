// SPDX-License-Identifier: MIT
// Samples the stall reasons of warps by CUPTI's PC sampling, and adds them up, so that the amount of data
// depends on time and code, and not on the number of samples.
//
//     CONTEXT_CREATED ──▶ enable     own thread, every ROUND_MS:      GetData ──▶ by function and reason ──▶ STALLS
//     …_DESTROY_STARTING ─▶ disable                                          └─▶ by instruction, sent each second
//
// Sampling is enabled when a context is created: if it is enabled later, functions have no names. The
// program's threads run this code then, when they destroy a context, and when they load or unload a module.
// CUPTI's tables of functions change meanwhile, so CUPTI's sampling functions are not called. If CUPTI
// refuses a call, that is a loss with its reason, and ends the sampling of that context.
#pragma once
#include <atomic>
#include <chrono>
#include <cstring>
#include <cupti.h>
#include <cupti_pcsampling.h>
#include <list>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "demangle.h"
#include "gpu_record.h"
#include "own_thread.h"
#include "source_lines.h"
#include "stall_records.h"
#include "subscription.h"
#include "transport.h"
#include "windows.h"

namespace tracepipe {

class StallSampler {
  public:
    StallSampler(Channel &channel, Windows &windows, Subscription &subscription)
        : channel_(channel), windows_(windows), subscription_(subscription) {}

    // Called when CUDA begins in the process, with the channel and the windows open, and the subscription if the process
    // has it. `puts_gpus`: no other code does.
    void open(bool puts_gpus) {
        owner_ = getpid(), puts_gpus_ = puts_gpus;
        if (!subscription_.is_open()) return lose(1, monotonic_ns(), "another profiler has CUPTI's callbacks");
        is_open_ = true;
        for (uint32_t id : {CUPTI_CBID_RESOURCE_CONTEXT_CREATED, CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING,
                            CUPTI_CBID_RESOURCE_MODULE_LOADED})
            set_callback(CUPTI_CB_DOMAIN_RESOURCE, id);
        for (uint32_t id = 1; id < CUPTI_DRIVER_TRACE_CBID_SIZE; id++)
            if (changes_modules(id)) set_callback(CUPTI_CB_DOMAIN_DRIVER_API, id);
        if (!start_own_thread([](void *self) { static_cast<StallSampler *>(self)->sample(); }, this))
            lose(1, monotonic_ns(), "no thread could be started in the traced process");
    }
    // Sends the remaining samples and ends sampling.
    void close() {
        if (!is_open_.exchange(false) || getpid() != owner_) return;
        subscription_.clear(Subscription::SAMPLER);
        std::unique_lock lock(mutex_, PATIENCE);
        if (!lock.owns_lock()) return lose(1, monotonic_ns(), "CUPTI did not answer at the end");
        for (Context &context : contexts_) end(context);
        contexts_.clear();
        put_losses();
    }
    // Takes a callback that it wanted.
    void take(CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *given) {
        if (!is_open_ || getpid() != owner_) return;
        if (domain == CUPTI_CB_DOMAIN_DRIVER_API) return module_changes(*static_cast<const CUpti_CallbackData *>(given));
        auto &resource = *static_cast<const CUpti_ResourceData *>(given);
        if (id == CUPTI_CBID_RESOURCE_CONTEXT_CREATED) begin(resource.context);
        if (id == CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING) forget(resource.context);
        if (id == CUPTI_CBID_RESOURCE_MODULE_LOADED && resource.resourceDescriptor) {
            auto &module = *static_cast<const CUpti_ModuleResourceData *>(resource.resourceDescriptor);
            lines_.take(module.pCubin, module.cubinSize);
        }
    }

  private:
    static constexpr long ROUND_MS = 10;
    static constexpr auto PATIENCE = std::chrono::seconds(1);
    static constexpr uint64_t PCS_EVERY_NS = 1'000'000'000, IDLE_NS = 25'000'000;
    static constexpr uint32_t PERIOD_LOG2 = 18;
    static constexpr size_t HARDWARE_BYTES = 32 << 20;
    static constexpr size_t PCS_AT_ONCE = 4096, PCS_MAX = 1 << 16, CONTEXTS_MAX = 64, REASONS_MAX = 256;
    static constexpr size_t FUNCTIONS_MAX = 1 << 16;
    static constexpr int GETS_A_ROUND = 256;
    static constexpr size_t ENTRIES_A_RECORD = 1024;  // a record may take a quarter of the channel, which has 64 KiB at least
    static constexpr uint64_t OF_STALLS = uint64_t(1) << 62;  // separates its ids of names from those of other records

    // A buffer for CUPTI: instructions, each with room for all reasons.
    struct Pcs {
        CUpti_PCSamplingData data{};
        std::vector<CUpti_PCSamplingPCData> pcs;
        std::vector<CUpti_PCSamplingStallReason> reasons;

        void make(size_t count) {
            pcs.assign(PCS_AT_ONCE, {});
            reasons.assign(PCS_AT_ONCE * count, {});
            for (size_t at = 0; at < PCS_AT_ONCE; at++)
                pcs[at].size = sizeof pcs[at], pcs[at].stallReason = &reasons[at * count];
            data.size = sizeof data, data.collectNumPcs = PCS_AT_ONCE, data.pPcData = pcs.data();
        }
    };
    using Instruction = std::tuple<uint64_t, uint64_t, uint64_t, uint32_t>;  // function, module, offset, reason
    struct Context {
        CUcontext handle = nullptr;
        uint32_t gpu = 0;
        bool is_controlled = false, is_started = true, was_idle = true;
        uint64_t until_ns = 0, pcs_from_ns = 0;  // earlier samples were sent
        std::vector<bool> is_counted;            // by number of the reason
        Pcs got, last;                           // from CUPTI's GetData, and from its Disable
        std::map<std::pair<uint64_t, uint32_t>, uint64_t> bin;
        std::map<Instruction, uint64_t> instructions;
    };

    void set_callback(CUpti_CallbackDomain domain, uint32_t id) {
        subscription_.set(Subscription::SAMPLER, domain, id, true);
    }
    static bool changes_modules(uint32_t id) {
        const char *given = nullptr;
        if (cuptiGetCallbackName(CUPTI_CB_DOMAIN_DRIVER_API, id, &given) != CUPTI_SUCCESS || !given) return false;
        std::string_view name = given;
        for (std::string_view begins : {"cuModuleLoad", "cuModuleUnload", "cuLibraryLoad", "cuLibraryUnload"})
            if (name.substr(0, begins.size()) == begins) return true;
        return false;
    }
    // A call that loads or unloads a module begins or ends. CUPTI's sampling functions are not called until
    // its end; samples of a module that is about to be unloaded are read before.
    void module_changes(const CUpti_CallbackData &call) {
        if (call.callbackSite == CUPTI_API_EXIT) return void(modules_change_--);
        modules_change_++;
        std::unique_lock lock(mutex_, PATIENCE);
        if (!lock.owns_lock() || !call.functionName || !strstr(call.functionName, "Unload")) return;
        for (Context &context : contexts_)
            if (context.is_started) collect(context);
    }

    // On the thread that creates the context.
    void begin(CUcontext handle) {
        std::unique_lock lock(mutex_, PATIENCE);
        if (!lock.owns_lock()) return lose(1, monotonic_ns(), "CUPTI did not answer when a context was created");
        if (contexts_.size() >= CONTEXTS_MAX) return lose(1, monotonic_ns(), "more contexts than are sampled");
        Context &context = contexts_.emplace_back();
        context.handle = handle, context.is_controlled = windows_.are_asked();
        context.is_started = !context.is_controlled;
        context.until_ns = context.pcs_from_ns = monotonic_ns();
        if (!enable(context)) contexts_.pop_back();
    }
    // CUPTI requires this order: enable it, ask for the names of reasons, configure it.
    bool enable(Context &context) {
        cuptiGetDeviceId(context.handle, &context.gpu);
        CUpti_PCSamplingEnableParams enabling{};
        enabling.size = CUpti_PCSamplingEnableParamsSize, enabling.ctx = context.handle;
        if (!is_done(context, "cuptiPCSamplingEnable", cuptiPCSamplingEnable(&enabling))) return false;
        if (name_reasons(context) && configure(context)) return true;
        disable(context);
        return false;
    }
    bool name_reasons(Context &context) {
        size_t count = 0;
        CUpti_PCSamplingGetNumStallReasonsParams counting{};
        counting.size = CUpti_PCSamplingGetNumStallReasonsParamsSize, counting.ctx = context.handle;
        counting.numStallReasons = &count;
        if (!is_done(context, "cuptiPCSamplingGetNumStallReasons", cuptiPCSamplingGetNumStallReasons(&counting)))
            return false;
        if (!count || count > REASONS_MAX) {
            lose(1, context.until_ns, "CUPTI has no stall reasons for this GPU");
            return false;
        }
        std::vector<uint32_t> numbers(count);
        std::vector<char> texts(count * CUPTI_STALL_REASON_STRING_SIZE);
        std::vector<char *> names(count);
        for (size_t at = 0; at < count; at++) names[at] = &texts[at * CUPTI_STALL_REASON_STRING_SIZE];
        CUpti_PCSamplingGetStallReasonsParams naming{};
        naming.size = CUpti_PCSamplingGetStallReasonsParamsSize, naming.ctx = context.handle;
        naming.numStallReasons = count, naming.stallReasonIndex = numbers.data(), naming.stallReasons = names.data();
        if (!is_done(context, "cuptiPCSamplingGetStallReasons", cuptiPCSamplingGetStallReasons(&naming))) return false;
        std::map<std::string, uint32_t> known;
        for (size_t at = 0; at < count; at++)
            known[std::string(names[at], strnlen(names[at], CUPTI_STALL_REASON_STRING_SIZE))] = numbers[at];
        for (auto &[name, number] : known) {
            if (number >= REASONS_MAX) continue;
            if (context.is_counted.size() <= number) context.is_counted.resize(number + 1);
            // A sample of X is also counted as X_not_issued.
            size_t base = name.rfind("_not_issued");
            context.is_counted[number] = base == std::string::npos || !known.count(name.substr(0, base));
            if (context.is_counted[number]) channel_.put(KIND_STALL_REASON, &number, sizeof number, name, 0);
        }
        context.got.make(count), context.last.make(count);
        return true;
    }
    bool configure(Context &context) {
        CUpti_PCSamplingConfigurationInfo infos[6]{};
        infos[0].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_COLLECTION_MODE;
        infos[0].attributeData.collectionModeData.collectionMode = CUPTI_PC_SAMPLING_COLLECTION_MODE_CONTINUOUS;
        infos[1].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_PERIOD;
        infos[1].attributeData.samplingPeriodData.samplingPeriod = PERIOD_LOG2;
        infos[2].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_HARDWARE_BUFFER_SIZE;
        infos[2].attributeData.hardwareBufferSizeData.hardwareBufferSize = HARDWARE_BYTES;
        infos[3].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_WORKER_THREAD_PERIODIC_SLEEP_SPAN;
        infos[3].attributeData.workerThreadPeriodicSleepSpanData.workerThreadPeriodicSleepSpan = uint32_t(ROUND_MS);
        infos[4].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_ENABLE_START_STOP_CONTROL;
        infos[4].attributeData.enableStartStopControlData.enableStartStopControl = context.is_controlled;
        infos[5].attributeType = CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_DATA_BUFFER;
        infos[5].attributeData.samplingDataBufferData.samplingDataBuffer = &context.last.data;
        CUpti_PCSamplingConfigurationInfoParams configuring{};
        configuring.size = CUpti_PCSamplingConfigurationInfoParamsSize, configuring.ctx = context.handle;
        configuring.numAttributes = std::size(infos), configuring.pPCSamplingConfigurationInfo = infos;
        return is_done(context, "cuptiPCSamplingSetConfigurationAttribute",
                       cuptiPCSamplingSetConfigurationAttribute(&configuring));
    }
    // On the thread that destroys the context. If CUPTI does not answer, it is not called again.
    void forget(CUcontext handle) {
        std::unique_lock lock(mutex_, PATIENCE);
        if (!lock.owns_lock()) {
            is_open_ = false;
            return lose(1, monotonic_ns(), "CUPTI did not answer when a context was destroyed");
        }
        contexts_.remove_if([&](Context &context) { return context.handle == handle && (end(context), true); });
    }
    void end(Context &context) {
        bool was_started = context.is_started;
        if (context.is_controlled && was_started) stop(context);
        bool is_good = was_started && collect(context);
        disable(context);
        if (is_good) add(context, context.last.data);
        send_bin(context, monotonic_ns());
        finish(context);
    }
    // Sends what remains when sampling has ended.
    void finish(Context &context) {
        send_pcs(context);
        if (!context.was_idle) put_bin(context, {}, context.until_ns, context.until_ns);
        context.was_idle = true;
    }
    void disable(Context &context) {
        CUpti_PCSamplingDisableParams disabling{};
        disabling.size = CUpti_PCSamplingDisableParamsSize, disabling.ctx = context.handle;
        is_done(context, "cuptiPCSamplingDisable", cuptiPCSamplingDisable(&disabling));
    }
    bool start(Context &context) {
        CUpti_PCSamplingStartParams starting{};
        starting.size = CUpti_PCSamplingStartParamsSize, starting.ctx = context.handle;
        context.is_started = true;
        context.until_ns = context.pcs_from_ns = monotonic_ns();
        return is_done(context, "cuptiPCSamplingStart", cuptiPCSamplingStart(&starting));
    }
    bool stop(Context &context) {
        CUpti_PCSamplingStopParams stopping{};
        stopping.size = CUpti_PCSamplingStopParamsSize, stopping.ctx = context.handle;
        context.is_started = false;
        return is_done(context, "cuptiPCSamplingStop", cuptiPCSamplingStop(&stopping));
    }

    // On the library's own thread, until the end. It follows a begin or end of a window at once.
    void sample() {
        while (is_open_) {
            uint32_t seen = windows_.turns();
            take_round();
            windows_.wait(seen, ROUND_MS);
        }
    }
    void take_round() {
        std::lock_guard lock(mutex_);
        if (modules_change_ || !is_open_) return;
        contexts_.remove_if([this](Context &context) {
            if (follow(context)) return false;
            finish(context);
            disable(context);
            return true;
        });
    }
    // False if the sampling of the context has ended.
    bool follow(Context &context) {
        if (puts_gpus_ && put_gpus_.insert(context.gpu).second && driver().open())
            put_gpu(channel_, CUdevice(context.gpu));
        bool is_wanted = !context.is_controlled || windows_.is_open();
        if (is_wanted && !context.is_started && !start(context)) return false;
        if (!context.is_started) return true;
        if (!is_wanted && !stop(context)) return false;
        if (!collect(context)) return false;
        uint64_t now_ns = monotonic_ns();
        send_bin(context, now_ns);
        if (!is_wanted)
            finish(context);
        else if (now_ns - context.pcs_from_ns >= PCS_EVERY_NS)
            send_pcs(context);
        return true;
    }
    // Reads CUPTI's samples. False if that fails.
    bool collect(Context &context) {
        CUpti_PCSamplingGetDataParams getting{};
        getting.size = CUpti_PCSamplingGetDataParamsSize, getting.ctx = context.handle;
        CUpti_PCSamplingData &data = context.got.data;
        getting.pcSamplingData = &data;
        for (int gets = 0; gets < GETS_A_ROUND; gets++) {
            data.totalNumPcs = data.remainingNumPcs = data.droppedSamples = 0, data.hardwareBufferFull = 0;
            CUptiResult result = cuptiPCSamplingGetData(&getting);
            if (result == CUPTI_ERROR_OUT_OF_MEMORY || data.hardwareBufferFull) {
                lose(1, context.until_ns, "the GPU's buffer for samples was full");
                return true;
            }
            if (!is_done(context, "cuptiPCSamplingGetData", result)) return false;
            add(context, data);
            if (!data.remainingNumPcs) return true;
        }
        return true;
    }
    void add(Context &context, const CUpti_PCSamplingData &data) {
        if (data.droppedSamples) lose(data.droppedSamples, context.until_ns, "the GPU had no room for samples");
        for (size_t at = 0; at < std::min(data.totalNumPcs, PCS_AT_ONCE); at++) {
            const CUpti_PCSamplingPCData &pc = data.pPcData[at];
            uint64_t function = name_of(pc);
            for (size_t one = 0; one < std::min(pc.stallReasonCount, context.got.reasons.size() / PCS_AT_ONCE); one++) {
                uint32_t reason = pc.stallReason[one].pcSamplingStallReasonIndex, samples = pc.stallReason[one].samples;
                if (!samples || reason >= context.is_counted.size() || !context.is_counted[reason]) continue;
                context.bin[{function, reason}] += samples;
                if (context.instructions.size() < PCS_MAX)
                    context.instructions[{function, pc.cubinCrc, pc.pcOffset, reason}] += samples;
            }
        }
    }
    // CUPTI has samples a little less often than it is asked for them (11 ms, of an H200): a round without samples
    // only makes the stretch of the next one longer.
    void send_bin(Context &context, uint64_t now_ns) {
        if (context.bin.empty() && !context.was_idle && now_ns - context.until_ns < IDLE_NS) return;
        if (!context.bin.empty() || !context.was_idle) put_bin(context, context.bin, context.until_ns, now_ns);
        context.was_idle = context.bin.empty();
        context.bin.clear();
        context.until_ns = now_ns;
    }
    void put_bin(Context &context, const std::map<std::pair<uint64_t, uint32_t>, uint64_t> &bin, uint64_t start_ns,
                 uint64_t end_ns) {
        std::vector<Stall> stalls;
        for (auto &[key, samples] : bin) stalls.push_back({key.first, key.second, at_most_32(samples)});
        put(context, KIND_STALLS, stalls, start_ns, end_ns);
    }
    void send_pcs(Context &context) {
        std::vector<StallPc> pcs;
        for (auto &[key, samples] : context.instructions) {
            auto [function, module, offset, reason] = key;
            pcs.push_back({function, module, offset, line_of(function, module, offset), reason, at_most_32(samples)});
        }
        lines_.rest();
        put_losses();
        uint64_t from_ns = std::exchange(context.pcs_from_ns, monotonic_ns());
        if (!pcs.empty()) put(context, KIND_STALL_PCS, pcs, from_ns, context.pcs_from_ns);
        context.instructions.clear();
    }
    // Puts records of a part of the entries each, and one record if there are no entries.
    template <typename Entry>
    void put(const Context &context, uint16_t kind, const std::vector<Entry> &entries, uint64_t start_ns, uint64_t end_ns) {
        StallsHead head{start_ns, end_ns, context.gpu, PERIOD_LOG2};
        size_t bytes_max = std::min(ENTRIES_A_RECORD * sizeof(Entry), channel_.payload_limit() / 2);
        for (size_t at = 0, count; at < entries.size() || !at; at += std::max(count, size_t(1))) {
            count = std::min(entries.size() - at, bytes_max / sizeof(Entry));
            uint64_t samples = 0;
            for (size_t one = at; one < at + count; one++) samples += entries[one].samples;
            channel_.put(kind, &head, sizeof head, {reinterpret_cast<const char *>(entries.data() + at), count * sizeof(Entry)},
                         samples);
            if (entries.empty()) break;
        }
    }
    static uint32_t at_most_32(uint64_t samples) { return uint32_t(std::min<uint64_t>(samples, UINT32_MAX)); }

    // A function is identified by its number in the module, and the module by the CRC of its code. CUPTI owns
    // the text of the name, which its other records may share.
    uint64_t name_of(const CUpti_PCSamplingPCData &pc) {
        auto known = functions_.find({pc.cubinCrc, pc.functionIndex});
        if (known != functions_.end()) return known->second;
        bool is_one_more = functions_.size() >= FUNCTIONS_MAX;
        if (is_one_more && others_) return others_;
        std::string mangled = is_one_more ? "further functions" : pc.functionName ? pc.functionName : "function without a name";
        uint64_t id = put_name(demangled(mangled.c_str()));
        if (is_one_more) return others_ = id;
        mangled_[id] = std::move(mangled);
        return functions_[{pc.cubinCrc, pc.functionIndex}] = id;
    }
    uint64_t line_of(uint64_t function, uint64_t module, uint64_t offset) {
        auto mangled = mangled_.find(function);
        if (mangled == mangled_.end()) return 0;
        const std::string *line = lines_.of(module, mangled->second, offset);
        if (!line || line->empty()) return 0;
        uint64_t &id = line_names_[*line];
        if (!id) id = put_name(*line);
        return id;
    }
    // Sends a name with a new id, and returns the id.
    uint64_t put_name(std::string text) {
        if (text.size() > channel_.payload_limit() / 2) text.resize(channel_.payload_limit() / 2);
        uint64_t id = OF_STALLS | ++names_;
        channel_.put(KIND_NAME, &id, sizeof id, text, 0);
        return id;
    }

    bool is_done(const Context &context, const char *what, CUptiResult result) {
        if (result == CUPTI_SUCCESS) return true;
        lose(1, context.until_ns, std::string(what) + ": " + text_of(result));
        return false;
    }
    static std::string text_of(CUptiResult result) {
        const char *text = nullptr;
        cuptiGetResultString(result, &text);
        return text ? text : "error " + std::to_string(result);
    }
    // Further losses for the same reason are sent with the next instructions, and not each round.
    void lose(uint64_t samples, uint64_t since_ns, const std::string &why) {
        std::lock_guard lock(losses_mutex_);
        StallLoss &loss = losses_[why];
        if (!loss.samples) loss.start_ns = since_ns;
        loss.samples += samples, loss.end_ns = monotonic_ns();
        if (reported_losses_.insert(why).second) put_loss(why, loss);
    }
    void put_losses() {
        std::lock_guard lock(losses_mutex_);
        for (auto &[why, loss] : losses_)
            if (loss.samples) put_loss(why, loss);
    }
    void put_loss(const std::string &why, StallLoss &loss) {
        channel_.put(KIND_STALL_LOSS, &loss, sizeof loss, why, loss.samples);
        loss = {};
    }

    Channel &channel_;
    Windows &windows_;
    Subscription &subscription_;
    std::atomic<bool> is_open_{false};
    std::atomic<int> modules_change_{0};
    pid_t owner_ = 0;
    bool puts_gpus_ = false;
    std::timed_mutex mutex_;  // for what is below, and for CUPTI's sampling functions
    std::list<Context> contexts_;
    std::set<uint32_t> put_gpus_;
    std::map<std::pair<uint64_t, uint32_t>, uint64_t> functions_;
    std::unordered_map<uint64_t, std::string> mangled_;
    std::unordered_map<std::string, uint64_t> line_names_;
    uint64_t names_ = 0, others_ = 0;
    SourceLines lines_;
    std::mutex losses_mutex_;
    std::map<std::string, StallLoss> losses_;
    std::set<std::string> reported_losses_;
};

}  // namespace tracepipe
