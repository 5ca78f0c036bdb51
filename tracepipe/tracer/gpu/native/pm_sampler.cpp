// SPDX-License-Identifier: MIT
// Samples the hardware counters of one GPU by CUPTI's PM sampling. It is a separate program, which touches no
// other process.
//
//     pm_sampler INDEX UUID INTERVAL_NS CHOICE…        CHOICE: METRIC[=PEAK][,METRIC[=PEAK]…], the first that fits
//                                                      PEAK: a metric, or `memory`, the GPU's memory bandwidth
//
//     capture ──standard input, until it ends──▶ sampler ──standard output, records──▶ capture
//
// INDEX is CUDA's index of the GPU here, and UUID (32 hexadecimal digits) must be that GPU's. From each
// choice, the first metric is taken that the GPU has and that can be sampled in one pass with those before
// it. Samples are read from the hardware's buffer every 20 to 100 ms. When standard input ends, the remaining
// samples are sent, and the program ends.
//
// Record, little-endian:
//
//     0          4       6     8
//     | length   | kind  | 0   | payload …             length is the payload's
//
//     CHOSEN   | choice u32 | metric u32 | peak f64 |  a sampled metric, by its indices; peak 0: not known
//     READY    |                                       all CHOSEN were sent, and samples follow
//     SAMPLE   | start_ns u64 | end_ns u64 | value f64, one for each metric that is sampled |   on CLOCK_MONOTONIC
//     OVERFLOW |                                       the hardware's buffer was full: samples are missing here
//     FAILED   | CUptiResult u32, 0: not of CUPTI | text: what failed |   the program ends then
//     END      |                                       all samples have been sent
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include <cuda.h>
#include <cupti.h>
#include <cupti_pmsampling.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_target.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

namespace {

// Between readings of the hardware's buffer. A reading takes some 10 ms of a processor, however few samples there are.
constexpr int LEAST_DRAIN_MS = 20, MOST_DRAIN_MS = 100;
// The longest wait for the first sample, from which peaks are computed; without it they are not known.
constexpr int FIRST_SAMPLE_MS = 2000;
// The hardware's buffer is much larger than what is read at a time; a sample was about 20 KB on Hopper.
constexpr size_t BUFFER_BYTES = size_t(128) << 20;
constexpr uint32_t SAMPLES_AT_ONCE = 512;

enum Kind : uint16_t { CHOSEN = 1, READY, SAMPLE, OVERFLOW, FAILED, END };

struct Failure {
    uint32_t result;
    std::string what;
};

void must(CUptiResult result, const char *what) {
    if (result != CUPTI_SUCCESS) throw Failure{uint32_t(result), what};
}

// Parameters of CUPTI's functions begin with their size.
template <typename Params> Params params(size_t size) {
    Params made;
    memset(&made, 0, sizeof made);
    made.structSize = size;
    return made;
}
#define PARAMS(type) params<type>(type##_STRUCT_SIZE)

uint64_t CUPTIAPI monotonic_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

// Records on their way to the capture process.
class Output {
  public:
    explicit Output(int file) : file_(file) {}

    void put(Kind kind, const void *payload = nullptr, size_t bytes = 0, const std::string &text = "") {
        uint32_t length = uint32_t(bytes + text.size());
        uint16_t head[] = {kind, 0};
        add(&length, sizeof length), add(head, sizeof head);
        add(payload, bytes), add(text.data(), text.size());
    }

    // If the capture process has ended, SIGPIPE ends this one.
    void send() {
        for (size_t sent = 0; sent < bytes_.size();) {
            ssize_t written = write(file_, bytes_.data() + sent, bytes_.size() - sent);
            if (written < 0 && errno != EINTR) _exit(1);
            if (written > 0) sent += size_t(written);
        }
        bytes_.clear();
    }

  private:
    void add(const void *from, size_t bytes) {
        if (bytes) bytes_.append(static_cast<const char *>(from), bytes);
    }
    int file_;
    std::string bytes_;
};

struct Metric {
    std::string name, peak;
};
using Choice = std::vector<Metric>;

Choice choice_of(const std::string &text) {
    Choice made;
    for (size_t at = 0; at <= text.size();) {
        size_t end = std::min(text.find(',', at), text.size());
        std::string one = text.substr(at, end - at);
        size_t equal = std::min(one.find('='), one.size());
        made.push_back({one.substr(0, equal), equal < one.size() ? one.substr(equal + 1) : ""});
        at = end + 1;
    }
    return made;
}

// A function of the driver; null if there is none.
template <typename Function> Function of_driver(const char *name) {
    static void *const driver = dlopen("libcuda.so.1", RTLD_NOW);
    return reinterpret_cast<Function>(driver ? dlsym(driver, name) : nullptr);
}

// The GPU with this index, if it has this UUID: with other settings, CUDA counts GPUs in another order.
CUdevice find_device(int index, const std::string &uuid) {
    auto init = of_driver<CUresult (*)(unsigned)>("cuInit");
    auto get = of_driver<CUresult (*)(CUdevice *, int)>("cuDeviceGet");
    auto ask = of_driver<CUresult (*)(CUuuid *, CUdevice)>("cuDeviceGetUuid");
    if (!init || !get || !ask) throw Failure{0, "libcuda.so.1 cannot be loaded"};
    CUdevice device;
    CUuuid found;
    if (init(0) || get(&device, index) || ask(&found, device)) throw Failure{0, "the driver does not give the GPU"};
    std::string digits;
    for (char byte : found.bytes)
        for (int shift : {4, 0}) digits += "0123456789abcdef"[(uint8_t(byte) >> shift) & 15];
    if (digits != uuid) throw Failure{0, "the driver counts its GPUs in another order here"};
    return device;
}

// Bytes per second, by the memory's clock, which transfers twice a cycle, and its width; 0 if the driver does not say.
double memory_bandwidth(CUdevice device) {
    auto ask = of_driver<CUresult (*)(int *, CUdevice_attribute, CUdevice)>("cuDeviceGetAttribute");
    int kilohertz = 0, bits = 0;
    if (!ask || ask(&kilohertz, CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE, device) ||
        ask(&bits, CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH, device))
        return 0;
    return 2e3 * kilohertz * bits / 8;
}

void check_support(CUdevice device) {
    auto asked = PARAMS(CUpti_Profiler_DeviceSupported_Params);
    asked.cuDevice = device, asked.api = CUPTI_PROFILER_PM_SAMPLING;
    must(cuptiProfilerDeviceSupported(&asked), "asking whether the GPU can be sampled");
    bool is_too_old = asked.architecture == CUPTI_PROFILER_CONFIGURATION_UNSUPPORTED;
    if (asked.isSupported != CUPTI_PROFILER_CONFIGURATION_SUPPORTED)
        throw Failure{0, is_too_old ? "its architecture has no sampling" : "its driver or setup has profiling switched off"};
}

// The metrics that the hardware is to count, and their evaluation from its buffer.
class Metrics {
  public:
    Metrics(int index, CUdevice device) : memory_bandwidth_(memory_bandwidth(device)) {
        auto chip = PARAMS(CUpti_Device_GetChipName_Params);
        chip.deviceIndex = size_t(index);
        must(cuptiDeviceGetChipName(&chip), "asking for the chip's name");
        chip_ = chip.pChipName;
        auto available = PARAMS(CUpti_PmSampling_GetCounterAvailability_Params);
        available.deviceIndex = size_t(index);
        must(cuptiPmSamplingGetCounterAvailability(&available), "asking which counters there are");
        available_.resize(available.counterAvailabilityImageSize);
        available.pCounterAvailabilityImage = available_.data();
        must(cuptiPmSamplingGetCounterAvailability(&available), "asking which counters there are");
    }

    // Takes the first fitting metric of each choice; each is tried, as CUPTI refuses a whole set for one bad
    // metric.
    void choose(const std::vector<Choice> &choices) {
        for (uint32_t choice = 0; choice < choices.size(); choice++)
            for (uint32_t metric = 0; metric < choices[choice].size(); metric++) {
                names_.push_back(choices[choice][metric].name.c_str());
                if (fits()) {
                    peaks_.push_back(choices[choice][metric].peak.c_str());
                    places_.push_back({choice, metric});
                    break;
                }
                names_.pop_back();
            }
        if (names_.empty()) throw Failure{0, "it has none of the counters"};
        if (!fits()) throw Failure{0, "CUPTI refuses counters that it took before"};
    }

    void put(Output &output, const uint8_t *image, size_t bytes) {
        for (size_t at = 0; at < names_.size(); at++) {
            double peak = 0;
            if (!strcmp(peaks_[at], "memory"))
                peak = memory_bandwidth_;
            else if (image && *peaks_[at] && evaluate(image, bytes, 0, &peaks_[at], 1, &peak) != CUPTI_SUCCESS)
                peak = 0;
            struct {
                uint32_t choice, metric;
                double peak;
            } chosen = {places_[at].first, places_[at].second, std::isfinite(peak) ? peak : 0};
            output.put(CHOSEN, &chosen, sizeof chosen);
        }
    }

    CUptiResult values(const uint8_t *image, size_t bytes, size_t sample, double *values) {
        return evaluate(image, bytes, sample, names_.data(), names_.size(), values);
    }

    std::vector<const char *> &names() { return names_; }
    const std::vector<uint8_t> &config() const { return config_; }

  private:
    // Whether all of `names_` can be sampled in one pass; then `config_` has the configuration.
    bool fits() {
        if (host_) {
            auto old = PARAMS(CUpti_Profiler_Host_Deinitialize_Params);
            old.pHostObject = host_;
            must(cuptiProfilerHostDeinitialize(&old), "giving metrics back");
            host_ = nullptr;
        }
        auto made = PARAMS(CUpti_Profiler_Host_Initialize_Params);
        made.profilerType = CUPTI_PROFILER_TYPE_PM_SAMPLING;
        made.pChipName = chip_.c_str();
        made.pCounterAvailabilityImage = available_.data();
        must(cuptiProfilerHostInitialize(&made), "preparing metrics");
        host_ = made.pHostObject;
        auto added = PARAMS(CUpti_Profiler_Host_ConfigAddMetrics_Params);
        added.pHostObject = host_, added.ppMetricNames = names_.data(), added.numMetrics = names_.size();
        if (cuptiProfilerHostConfigAddMetrics(&added) != CUPTI_SUCCESS) return false;
        auto size = PARAMS(CUpti_Profiler_Host_GetConfigImageSize_Params);
        size.pHostObject = host_;
        if (cuptiProfilerHostGetConfigImageSize(&size) != CUPTI_SUCCESS) return false;
        config_.resize(size.configImageSize);
        auto image = PARAMS(CUpti_Profiler_Host_GetConfigImage_Params);
        image.pHostObject = host_, image.configImageSize = config_.size(), image.pConfigImage = config_.data();
        if (cuptiProfilerHostGetConfigImage(&image) != CUPTI_SUCCESS) return false;
        auto passes = PARAMS(CUpti_Profiler_Host_GetNumOfPasses_Params);
        passes.configImageSize = config_.size(), passes.pConfigImage = config_.data();
        return cuptiProfilerHostGetNumOfPasses(&passes) == CUPTI_SUCCESS && passes.numOfPasses == 1;
    }

    CUptiResult evaluate(const uint8_t *image, size_t bytes, size_t sample, const char **names, size_t count, double *to) {
        auto asked = PARAMS(CUpti_Profiler_Host_EvaluateToGpuValues_Params);
        asked.pHostObject = host_;
        asked.pCounterDataImage = image, asked.counterDataImageSize = bytes, asked.rangeIndex = sample;
        asked.ppMetricNames = names, asked.numMetrics = count, asked.pMetricValues = to;
        return cuptiProfilerHostEvaluateToGpuValues(&asked);
    }

    const double memory_bandwidth_;
    std::string chip_;
    std::vector<uint8_t> available_, config_;
    std::vector<const char *> names_, peaks_;
    std::vector<std::pair<uint32_t, uint32_t>> places_;
    CUpti_Profiler_Host_Object *host_ = nullptr;
};

// Samples with the hardware, from the construction on.
class Sampling {
  public:
    Sampling(int index, uint64_t interval_ns, Metrics &metrics, Output &output) : metrics_(metrics), output_(output) {
        auto enabled = PARAMS(CUpti_PmSampling_Enable_Params);
        enabled.deviceIndex = size_t(index);
        must(cuptiPmSamplingEnable(&enabled), "enabling sampling");
        object_ = enabled.pPmSamplingObject;
        auto config = PARAMS(CUpti_PmSampling_SetConfig_Params);
        config.pPmSamplingObject = object_;
        config.configSize = metrics.config().size(), config.pConfig = metrics.config().data();
        config.hardwareBufferSize = BUFFER_BYTES, config.samplingInterval = interval_ns;
        config.triggerMode = CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL;
        config.hwBufferAppendMode = CUPTI_PM_SAMPLING_HARDWARE_BUFFER_APPEND_MODE_KEEP_LATEST;
        must(cuptiPmSamplingSetConfig(&config), "setting the interval and the counters");
        auto size = PARAMS(CUpti_PmSampling_GetCounterDataSize_Params);
        size.pPmSamplingObject = object_;
        size.pMetricNames = metrics.names().data(), size.numMetrics = metrics.names().size();
        size.maxSamples = SAMPLES_AT_ONCE;
        must(cuptiPmSamplingGetCounterDataSize(&size), "asking how long samples are");
        image_.resize(size.counterDataSize);
        values_.resize(metrics.names().size());
        empty();
        turn(&cuptiPmSamplingStart, PARAMS(CUpti_PmSampling_Start_Params), "starting to sample");
    }

    // Waits for the first sample, at most FIRST_SAMPLE_MS, and sends which metrics are sampled.
    void begin() {
        size_t samples = 0;
        for (int waited_ms = 0; !samples && waited_ms < FIRST_SAMPLE_MS; waited_ms += LEAST_DRAIN_MS) {
            poll(nullptr, 0, LEAST_DRAIN_MS);
            if (!decode(samples)) restart();
        }
        metrics_.put(output_, samples ? image_.data() : nullptr, image_.size());
        output_.put(READY);
        put(samples);
    }

    // Reads and sends all samples in the hardware's buffer. With a full image there may be more, whatever reason CUPTI
    // gives for having stopped.
    void drain() {
        for (;;) {
            size_t samples;
            bool is_whole = decode(samples);
            put(samples);
            if (!is_whole) {
                output_.put(OVERFLOW);
                restart();
            } else if (samples < SAMPLES_AT_ONCE) {
                return output_.send();
            }
        }
    }

    void stop() { turn(&cuptiPmSamplingStop, PARAMS(CUpti_PmSampling_Stop_Params), "stopping to sample"); }

    void disable() { turn(&cuptiPmSamplingDisable, PARAMS(CUpti_PmSampling_Disable_Params), "disabling sampling"); }

  private:
    template <typename Function, typename Params> void turn(Function function, Params params, const char *what) {
        params.pPmSamplingObject = object_;
        must(function(&params), what);
    }

    void empty() {
        auto emptied = PARAMS(CUpti_PmSampling_CounterDataImage_Initialize_Params);
        emptied.pPmSamplingObject = object_;
        emptied.counterDataSize = image_.size(), emptied.pCounterData = image_.data();
        must(cuptiPmSamplingCounterDataImageInitialize(&emptied), "making room for samples");
    }

    // Starts again, as an overflow ends a session.
    void restart() {
        stop();
        turn(&cuptiPmSamplingStart, PARAMS(CUpti_PmSampling_Start_Params), "starting to sample again");
    }

    // Decodes as many samples as the image can hold; whether none was lost before.
    bool decode(size_t &samples) {
        auto decoded = PARAMS(CUpti_PmSampling_DecodeData_Params);
        decoded.pPmSamplingObject = object_;
        decoded.pCounterDataImage = image_.data(), decoded.counterDataImageSize = image_.size();
        CUptiResult result = cuptiPmSamplingDecodeData(&decoded);
        samples = 0;
        if (result == CUPTI_ERROR_OUT_OF_MEMORY) return false;
        must(result, "decoding samples");
        auto info = PARAMS(CUpti_PmSampling_GetCounterDataInfo_Params);
        info.pCounterDataImage = image_.data(), info.counterDataImageSize = image_.size();
        must(cuptiPmSamplingGetCounterDataInfo(&info), "counting samples");
        samples = info.numCompletedSamples;
        return !decoded.overflow;
    }

    void put(size_t samples) {
        for (size_t at = 0; at < samples; at++) {
            auto info = PARAMS(CUpti_PmSampling_CounterData_GetSampleInfo_Params);
            info.pPmSamplingObject = object_;
            info.pCounterDataImage = image_.data(), info.counterDataImageSize = image_.size(), info.sampleIndex = at;
            must(cuptiPmSamplingCounterDataGetSampleInfo(&info), "asking when a sample was");
            must(metrics_.values(image_.data(), image_.size(), at, values_.data()), "evaluating a sample");
            uint64_t times_ns[] = {info.startTimestamp, info.endTimestamp};
            std::string values(reinterpret_cast<const char *>(values_.data()), values_.size() * sizeof(double));
            output_.put(SAMPLE, times_ns, sizeof times_ns, values);
        }
        if (samples) empty();
    }

    Metrics &metrics_;
    Output &output_;
    CUpti_PmSampling_Object *object_ = nullptr;
    std::vector<uint8_t> image_;
    std::vector<double> values_;
};

void sample(int index, const std::string &uuid, uint64_t interval_ns, const std::vector<Choice> &choices, Output &output) {
    CUdevice device = find_device(index, uuid);
    must(cuptiActivityRegisterTimestampCallback(monotonic_ns), "choosing the clock");
    auto initialize = PARAMS(CUpti_Profiler_Initialize_Params);
    must(cuptiProfilerInitialize(&initialize), "preparing the profiler");
    check_support(device);
    Metrics metrics(index, device);
    metrics.choose(choices);
    Sampling sampling(index, interval_ns, metrics, output);
    sampling.begin();
    // Half an image at a time. Standard input has nothing to read until it ends.
    uint64_t half_ms = interval_ns * SAMPLES_AT_ONCE / 2 / 1'000'000;
    int drain_ms = int(std::clamp<uint64_t>(half_ms, LEAST_DRAIN_MS, MOST_DRAIN_MS));
    for (pollfd input = {STDIN_FILENO, POLLIN, 0}; poll(&input, 1, drain_ms) <= 0;) sampling.drain();
    sampling.stop();
    sampling.drain();
    output.put(END);
    output.send();
    sampling.disable();
}

} // namespace

int main(int count, char **arguments) {
    pid_t parent = getppid();
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (count < 5 || getppid() != parent) return 2;
    // Keeps what NVIDIA's libraries print out of the records.
    int file = fcntl(STDOUT_FILENO, F_DUPFD_CLOEXEC, 3);
    dup2(STDERR_FILENO, STDOUT_FILENO);
    Output output(file);
    std::vector<Choice> choices;
    for (int at = 4; at < count; at++) choices.push_back(choice_of(arguments[at]));
    try {
        sample(atoi(arguments[1]), arguments[2], strtoull(arguments[3], nullptr, 10), choices, output);
    } catch (const Failure &failure) {
        const char *why = nullptr;
        if (failure.result) cuptiGetResultString(CUptiResult(failure.result), &why);
        output.put(FAILED, &failure.result, sizeof failure.result, failure.what + (why ? std::string(": ") + why : ""));
        output.send();
        return 1;
    }
    return 0;
}
