// A libcupti.so.13 that samples no hardware, so that pm_sampler.cpp can be tried without a GPU. Sample K is from K to
// K + 1 intervals after the first start, and has P + K / 1000 as the value of the metric at place P. What else happens is in
// the file `behaviour` in the library's folder, a line each:
//
//     missing METRIC         CUPTI refuses whatever set has that metric
//     passes METRIC          a set with that metric takes two passes
//     fail FUNCTION RESULT N from its Nth call on the function returns RESULT
//     gap K N                N samples after sample K never come, and nothing reports it
//     overflow K N           the hardware's buffer is full at sample K; the N samples from it on are gone
//     die K                  the process is killed when sample K is asked for
//     early                  times are a day before CLOCK_MONOTONIC's
//     unsupported            the GPU cannot be sampled
#include <csignal>
#include <cstring>
#include <ctime>
#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include <cuda.h>
#include <cupti.h>
#include <cupti_pmsampling.h>
#include <cupti_profiler_host.h>
#include <cupti_profiler_target.h>
#include <cupti_target.h>
#include <dlfcn.h>
#include <unistd.h>

#undef cuDeviceGetUuid  // which the header calls _v2, and the program does not

namespace {

struct Behaviour {
    std::map<std::string, std::vector<std::string>> lines;
    std::map<std::string, int> calls;

    Behaviour() {
        Dl_info info;
        dladdr(reinterpret_cast<void *>(&cuptiPmSamplingStart), &info);
        std::string path = info.dli_fname;
        std::ifstream file(path.substr(0, path.rfind('/')) + "/behaviour");
        for (std::string line; std::getline(file, line);) {
            std::istringstream words(line);
            std::string what, rest;
            words >> what;
            std::getline(words >> std::ws, rest);
            lines[what].push_back(rest);
        }
    }

    bool names(const char *what, const std::string &metric) {
        for (auto &line : lines[what])
            if (line == metric) return true;
        return false;
    }

    // The number that follows K where there is such a line for sample K, else 0.
    uint64_t after(const char *what, uint64_t sample) {
        for (auto &line : lines[what]) {
            uint64_t at = 0, count = 1;
            std::istringstream(line) >> at >> count;
            if (at == sample) return count;
        }
        return 0;
    }

    CUptiResult result(const std::string &function) {
        int call = ++calls[function];
        for (auto &line : lines["fail"]) {
            std::string name;
            int result = 0, from = 1;
            std::istringstream(line) >> name >> result >> from;
            if (name == function && call >= from) return CUptiResult(result);
        }
        return CUPTI_SUCCESS;
    }
};

Behaviour &behaviour() {
    static Behaviour read;
    return read;
}
#define MAY_FAIL                                                                                   \
    do {                                                                                           \
        CUptiResult result = behaviour().result(__func__);                                         \
        if (result != CUPTI_SUCCESS) return result;                                                \
    } while (0)

struct Image {
    uint64_t samples, room;
    struct {
        uint64_t number, start_ns, end_ns;
    } sample[1];
};

CUpti_TimestampCallbackFunc now;
std::vector<std::string> added;
uint64_t interval_ns, first_ns, stopped_ns, next_sample;
bool is_full;

uint64_t now_ns() { return now() - (behaviour().lines.count("early") ? 86400ull * 1000000000 : 0); }

} // namespace

extern "C" {

CUptiResult cuptiGetResultString(CUptiResult result, const char **text) {
    *text = result == CUPTI_ERROR_INSUFFICIENT_PRIVILEGES ? "CUPTI_ERROR_INSUFFICIENT_PRIVILEGES" : "CUPTI_ERROR_OF_STANDIN";
    return CUPTI_SUCCESS;
}

CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc callback) {
    MAY_FAIL;
    now = callback;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerInitialize(CUpti_Profiler_Initialize_Params *) {
    MAY_FAIL;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerDeviceSupported(CUpti_Profiler_DeviceSupported_Params *asked) {
    MAY_FAIL;
    bool is_supported = !behaviour().lines.count("unsupported");
    asked->architecture = CUPTI_PROFILER_CONFIGURATION_SUPPORTED;
    asked->isSupported = is_supported ? CUPTI_PROFILER_CONFIGURATION_SUPPORTED : CUPTI_PROFILER_CONFIGURATION_UNSUPPORTED;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiDeviceGetChipName(CUpti_Device_GetChipName_Params *asked) {
    MAY_FAIL;
    asked->pChipName = "STANDIN";
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterAvailability(CUpti_PmSampling_GetCounterAvailability_Params *asked) {
    MAY_FAIL;
    asked->counterAvailabilityImageSize = 8;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostInitialize(CUpti_Profiler_Host_Initialize_Params *made) {
    MAY_FAIL;
    added.clear();
    made->pHostObject = reinterpret_cast<CUpti_Profiler_Host_Object *>(&added);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostDeinitialize(CUpti_Profiler_Host_Deinitialize_Params *) {
    MAY_FAIL;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostConfigAddMetrics(CUpti_Profiler_Host_ConfigAddMetrics_Params *asked) {
    MAY_FAIL;
    for (size_t at = 0; at < asked->numMetrics; at++) {
        if (behaviour().names("missing", asked->ppMetricNames[at])) return CUPTI_ERROR_INVALID_METRIC_NAME;
        added.push_back(asked->ppMetricNames[at]);
    }
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetConfigImageSize(CUpti_Profiler_Host_GetConfigImageSize_Params *asked) {
    MAY_FAIL;
    asked->configImageSize = 1;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetConfigImage(CUpti_Profiler_Host_GetConfigImage_Params *asked) {
    MAY_FAIL;
    asked->pConfigImage[0] = 1;
    for (auto &name : added)
        if (behaviour().names("passes", name)) asked->pConfigImage[0] = 2;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostGetNumOfPasses(CUpti_Profiler_Host_GetNumOfPasses_Params *asked) {
    MAY_FAIL;
    asked->numOfPasses = asked->pConfigImage[0];
    return CUPTI_SUCCESS;
}

CUptiResult cuptiProfilerHostEvaluateToGpuValues(CUpti_Profiler_Host_EvaluateToGpuValues_Params *asked) {
    MAY_FAIL;
    auto image = reinterpret_cast<const Image *>(asked->pCounterDataImage);
    for (size_t at = 0; at < asked->numMetrics; at++) {
        bool is_peak = strstr(asked->ppMetricNames[at], ".peak_");
        asked->pMetricValues[at] = is_peak ? 4e12 : double(at) + double(image->sample[asked->rangeIndex].number) / 1000;
    }
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingEnable(CUpti_PmSampling_Enable_Params *asked) {
    MAY_FAIL;
    asked->pPmSamplingObject = reinterpret_cast<CUpti_PmSampling_Object *>(&added);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingSetConfig(CUpti_PmSampling_SetConfig_Params *asked) {
    MAY_FAIL;
    if (asked->triggerMode != CUPTI_PM_SAMPLING_TRIGGER_MODE_GPU_TIME_INTERVAL || asked->pConfig[0] != 1)
        return CUPTI_ERROR_INVALID_PARAMETER;
    interval_ns = asked->samplingInterval;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterDataSize(CUpti_PmSampling_GetCounterDataSize_Params *asked) {
    MAY_FAIL;
    asked->counterDataSize = sizeof(Image) + asked->maxSamples * sizeof(Image::sample);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingCounterDataImageInitialize(CUpti_PmSampling_CounterDataImage_Initialize_Params *asked) {
    MAY_FAIL;
    auto image = reinterpret_cast<Image *>(asked->pCounterData);
    image->samples = 0;
    image->room = (asked->counterDataSize - sizeof(Image)) / sizeof(Image::sample);
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingStart(CUpti_PmSampling_Start_Params *) {
    MAY_FAIL;
    stopped_ns = 0;
    is_full = false;
    if (!first_ns) first_ns = now_ns();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingStop(CUpti_PmSampling_Stop_Params *) {
    MAY_FAIL;
    stopped_ns = now_ns();
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingDisable(CUpti_PmSampling_Disable_Params *) {
    MAY_FAIL;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingDecodeData(CUpti_PmSampling_DecodeData_Params *asked) {
    MAY_FAIL;
    auto image = reinterpret_cast<Image *>(asked->pCounterDataImage);
    uint64_t until_ns = stopped_ns ? stopped_ns : now_ns();
    asked->overflow = 0;
    asked->decodeStopReason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_END_OF_RECORDS;
    if (is_full) return CUPTI_ERROR_OUT_OF_MEMORY;
    while (first_ns + (next_sample + 1) * interval_ns <= until_ns) {
        if (image->samples == image->room) {
            asked->decodeStopReason = CUPTI_PM_SAMPLING_DECODE_STOP_REASON_COUNTER_DATA_FULL;
            break;
        }
        if (behaviour().after("die", next_sample)) kill(getpid(), SIGKILL);
        if (uint64_t lost = behaviour().after("overflow", next_sample)) {
            next_sample += lost;
            is_full = true;
            break;
        }
        uint64_t start_ns = first_ns + next_sample * interval_ns;
        image->sample[image->samples++] = {next_sample, start_ns, start_ns + interval_ns};
        next_sample += 1 + behaviour().after("gap", next_sample);
    }
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingGetCounterDataInfo(CUpti_PmSampling_GetCounterDataInfo_Params *asked) {
    MAY_FAIL;
    asked->numCompletedSamples = reinterpret_cast<const Image *>(asked->pCounterDataImage)->samples;
    return CUPTI_SUCCESS;
}

CUptiResult cuptiPmSamplingCounterDataGetSampleInfo(CUpti_PmSampling_CounterData_GetSampleInfo_Params *asked) {
    MAY_FAIL;
    auto &sample = reinterpret_cast<const Image *>(asked->pCounterDataImage)->sample[asked->sampleIndex];
    asked->startTimestamp = sample.start_ns, asked->endTimestamp = sample.end_ns;
    return CUPTI_SUCCESS;
}

// libcuda.so.1's, which is a link to this library: two GPUs, whose UUIDs are 00…00 and 11…11.
CUresult cuInit(unsigned) { return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int index) {
    *device = index;
    return index < 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_DEVICE;
}
// A memory of 6400 bits and 2.5 GHz: 4 TB/s.
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE ? 2'500'000 : 6400;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice device) {
    memset(uuid, 0x11 * device, sizeof *uuid);
    return CUDA_SUCCESS;
}
}
