// CUPTI's PC sampling for cupti_standin.cpp, which includes it: contexts that hold the samples that they are given, until
// they are asked for.

struct SamplingStandin {
    static constexpr uint32_t FIRST = 3;  // numbers of reasons need not begin with 0
    static constexpr const char *REASONS[] = {"long_scoreboard", "long_scoreboard_not_issued", "barrier", "selected"};
    static constexpr const char *FUNCTIONS[] = {"_Z6matmulPf", "reduce"};

    struct Sample {
        uint32_t function, offset, reason, count;
    };
    struct Context {
        bool is_enabled = false, is_controlled = false, is_started = false, is_full = false;
        uint64_t dropped = 0;
        std::vector<Sample> samples;
        CUpti_PCSamplingData *last = nullptr;
    };
    std::map<CUcontext, Context> contexts;
    std::set<std::string> failing;
    bool is_unloading = false;

    CUptiResult answer(const char *what) {
        std::lock_guard lock(mutex);
        return failing.count(what) ? CUPTI_ERROR_INVALID_OPERATION : CUPTI_SUCCESS;
    }
    CUptiResult enable(CUcontext context) {
        std::lock_guard lock(mutex);
        if (failing.count("Enable")) return CUPTI_ERROR_INSUFFICIENT_PRIVILEGES;
        contexts[context].is_enabled = contexts[context].is_started = true;
        return CUPTI_SUCCESS;
    }
    // What was not asked for yet goes to the buffer of the configuration.
    CUptiResult disable(CUcontext handle) {
        std::lock_guard lock(mutex);
        Context &context = contexts.at(handle);
        if (!context.is_enabled) return CUPTI_ERROR_INVALID_OPERATION;
        if (context.last) give(context, *context.last);
        context.is_enabled = context.is_started = false;
        return answer("Disable");
    }
    CUptiResult turn(CUcontext handle, const char *what) {
        std::lock_guard lock(mutex);
        Context &context = contexts.at(handle);
        if (!context.is_controlled || failing.count(what)) return CUPTI_ERROR_INVALID_OPERATION;
        context.is_started = *what == 'S' && what[2] == 'a';
        return CUPTI_SUCCESS;
    }
    CUptiResult configure(const CUpti_PCSamplingConfigurationInfoParams &params) {
        std::lock_guard lock(mutex);
        Context &context = contexts.at(params.ctx);
        for (size_t at = 0; at < params.numAttributes; at++) {
            auto &info = params.pPCSamplingConfigurationInfo[at];
            if (info.attributeType == CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_ENABLE_START_STOP_CONTROL) {
                context.is_controlled = info.attributeData.enableStartStopControlData.enableStartStopControl;
                context.is_started = !context.is_controlled;
            }
            if (info.attributeType == CUPTI_PC_SAMPLING_CONFIGURATION_ATTR_TYPE_SAMPLING_DATA_BUFFER)
                context.last = static_cast<CUpti_PCSamplingData *>(info.attributeData.samplingDataBufferData.samplingDataBuffer);
        }
        return answer("SetConfigurationAttribute");
    }
    CUptiResult get(CUcontext handle, CUpti_PCSamplingData &data) {
        std::lock_guard lock(mutex);
        auto found = contexts.find(handle);
        // As CUPTI may.
        if (is_unloading || found == contexts.end() || !found->second.is_enabled) abort();
        if (found->second.is_full) {
            found->second.is_full = false, data.hardwareBufferFull = 1;
            return CUPTI_ERROR_OUT_OF_MEMORY;
        }
        give(found->second, data);
        return answer("GetData");
    }
    // One instruction at a time, as if the caller had room for no more.
    void give(Context &context, CUpti_PCSamplingData &data) {
        data.droppedSamples = std::exchange(context.dropped, 0);
        data.totalNumPcs = 0, data.remainingNumPcs = 0;
        if (context.samples.empty()) return;
        Sample sample = context.samples.front();
        context.samples.erase(context.samples.begin());
        CUpti_PCSamplingPCData &pc = data.pPcData[0];
        pc.cubinCrc = 0xabc, pc.pcOffset = sample.offset, pc.functionIndex = sample.function;
        pc.functionName = const_cast<char *>(FUNCTIONS[sample.function]);
        pc.stallReasonCount = 1;
        pc.stallReason[0].pcSamplingStallReasonIndex = sample.reason + FIRST, pc.stallReason[0].samples = sample.count;
        data.totalNumPcs = 1, data.remainingNumPcs = context.samples.size();
    }

    bool takes(const std::string &word) const {
        static const std::set<std::string> words{"context", "destroy", "sample", "drop", "full", "fail", "load", "unload", "sampling"};
        return words.count(word);
    }
    // Carries out a line, of which the first word was read, and answers.
    std::string done(const std::string &word) {
        if (word == "sampling") return sampled();
        char text[256];
        if (scanf("%255s", text) != 1) return "what?";
        if (word == "fail") return failing.insert(text), word;
        if (word == "load") return load(text), word;
        if (word == "unload") return unload(unsigned(atoi(text))), word;
        auto handle = reinterpret_cast<CUcontext>(strtoul(text, nullptr, 10) + 1);
        if (word == "context") {
            {
                std::lock_guard lock(mutex);
                contexts[handle] = {};
            }
            resource(CUPTI_CBID_RESOURCE_CONTEXT_CREATED, handle, nullptr);
        }
        if (word == "destroy") {
            resource(CUPTI_CBID_RESOURCE_CONTEXT_DESTROY_STARTING, handle, nullptr);
            std::lock_guard lock(mutex);
            contexts.erase(handle);
        }
        std::lock_guard lock(mutex);
        Sample sample{};
        if (word == "sample" && scanf("%u %u %u %u", &sample.function, &sample.offset, &sample.reason, &sample.count) == 4)
            contexts[handle].samples.push_back(sample);
        if (word == "drop" && scanf("%lu", &contexts[handle].dropped) != 1) return "what?";
        if (word == "full") contexts[handle].is_full = true;
        return word;
    }
    std::string sampled() {
        std::lock_guard lock(mutex);
        std::string text;
        for (auto &[handle, context] : contexts)
            text += (text.empty() ? "" : ", ") + std::to_string(reinterpret_cast<uintptr_t>(handle) - 1) +
                    (context.is_enabled && context.is_started ? " on" : " off");
        return text.empty() ? "none" : text;
    }
    void load(const char *path) {
        std::ifstream file(path, std::ios::binary);
        std::string code((std::istreambuf_iterator<char>(file)), {});
        CUpti_ModuleResourceData module{};
        module.cubinSize = code.size(), module.pCubin = code.data();
        resource(CUPTI_CBID_RESOURCE_MODULE_LOADED, nullptr, &module);
    }
    void unload(unsigned ms) {
        call_back(CUPTI_DRIVER_TRACE_CBID_cuModuleUnload, true);
        set_unloading(true);
        usleep(ms * 1000);
        set_unloading(false);
        call_back(CUPTI_DRIVER_TRACE_CBID_cuModuleUnload, false);
    }
    void set_unloading(bool is) {
        std::lock_guard lock(mutex);
        is_unloading = is;
    }
    static void resource(CUpti_CallbackIdResource id, CUcontext context, void *descriptor) {
        if (!is_called_for(CUPTI_CB_DOMAIN_RESOURCE, id)) return;
        CUpti_ResourceData data{};
        data.context = context, data.resourceDescriptor = descriptor;
        called_back(of_subscriber, CUPTI_CB_DOMAIN_RESOURCE, id, &data);
    }
};
SamplingStandin &sampling = *new SamplingStandin;  // asked at the program's exit too
