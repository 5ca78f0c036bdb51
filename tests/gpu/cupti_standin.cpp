// A program with a CUPTI of its own, so that the library of the engine `kernels` can be tried without a GPU: it is
// linked to kernels.cpp, or that is loaded into it later, and libcuda.so.1 is cuda_standin.cpp. It does what the lines of its input say, and answers
// each with a line:
//
// With STANDIN_SUBSCRIBED, another profiler has subscribed before the program begins.
//
//     launch N     N kernels are launched and run
//     cuda N       the same by the runtime's function, which calls the driver's
//     slow N       a kernel is launched and runs for N ms
//     waits        an event is recorded in stream 13 of context 1, stream 14 waits for it, and the program for both
//     flushed      says whether CUPTI was flushed on this thread: `flushed`, or `not flushed`
//     needs R S D C   kernels have R registers, S and D bytes of static and dynamic shared memory from now on, and
//                  an SM is configured for C bytes of it; 0: the driver chooses, and 8192 are there
//     gpu          the driver says from now on what GPU 0 is: one of compute capability 9.0
//     start N      N kernels are launched, and CUPTI has no records of them
//     queue N      N kernels are launched and wait, until
//     run          they run
//     profile      the program calls cuProfilerStart, and
//     unprofile    cuProfilerStop
//     asked        says whether CUPTI is asked for any record: `asked for nothing` or `asked for some`
//     take         another profiler registers callbacks for its buffers
//     callbacks    says whether any call has callbacks: `no callbacks`, or `some callbacks`
//     stay         a thread calls cuCtxSynchronize, and is in it until
//     leave        it returns
//     graph        a graph is instantiated
//     replay N     a thread launches a graph N times, which takes 50 µs each
//     replayed     says, when it has: `apart`, or `crossed` if kinds of records changed during a launch
//     finalized    says whether CUPTI was finalized: `finalized`, or `there`
//     spoiled      says whether a function has lost its callback while a thread was in it: `spoiled` or `whole`
//     subscribe    another profiler subscribes, which no one may have done: `refused` if so
//     context N    makes a context on GPU 0 and has its callback: N is its name
//     destroy N    destroys it, with the callback before
//     sample N F O R S   of context N: S samples of function F at offset O for reason R, for the next GetData
//     drop N S     S samples of context N were dropped, as the next GetData says
//     full N       the next GetData of context N finds the hardware's buffer full
//     fail WHAT    from now on cuptiPCSamplingWHAT answers with an error
//     load FILE    a module is loaded, whose code is the file's
//     unload MS    the program unloads a module, which takes so long: nothing may be asked about samples meanwhile
//     sampling     says of all contexts which are enabled and which are sampled, as `0 on, 1 off`
//     late         from now on CUPTI puts the times of kernels into their records only when it is asked for buffers
//     hidden       from now on CUPTI puts records into a buffer only when it is asked for buffers
//     end HOW      ends as ends_standin.h says
//     quit         returns from main
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <utility>
#include <string>
#include <thread>
#include <vector>

#include <cupti.h>
#include <cupti_pcsampling.h>
#include <fstream>
#include <iterator>
#include <sys/syscall.h>
#include <unistd.h>

#include "ends_standin.h"

extern "C" __attribute__((weak)) int InitializeInjection();

namespace {

std::recursive_mutex mutex;
CUpti_BuffersCallbackRequestFunc request;
CUpti_BuffersCallbackCompleteFunc complete;
// A thread's, with records of kernels that have not run.
struct Buffer {
    uint8_t *memory = nullptr;
    size_t bytes = 0, used = 0;
    std::vector<CUpti_ActivityKernel10 *> waiting;
};
std::map<pid_t, Buffer> buffers;
std::set<CUpti_ActivityKind> kinds;
bool is_subscribed = getenv("STANDIN_SUBSCRIBED");
CUpti_CallbackFunc called_back;
void *of_subscriber;
std::set<std::pair<CUpti_CallbackDomain, uint32_t>> called_for;
std::multiset<std::pair<CUpti_CallbackDomain, uint32_t>> entered;
bool is_spoiled, is_finalized, is_crossed, is_flushed_here;
void look_for_replay();
bool is_late, is_hidden;
std::atomic<bool> has_gpu;
// A flush by the library's thread, which has taken what was there, lasts until the program waits for the GPU.
enum Lasting { BRIEF, ASKED, LASTS, IS_WAITED_FOR };
std::atomic<Lasting> lasting;
std::map<pid_t, std::vector<std::string>> held;  // by thread, what CUPTI has not put into buffers
std::atomic<uint32_t> correlations;
thread_local uint32_t correlation;  // of the thread's call
CUpti_TimestampCallbackFunc now;

// As CUPTI marks a record that has no times yet.
void mark(CUpti_ActivityKernel10 &record, bool is_waiting) {
    constexpr uint32_t WAITS = 1u << 31;
    uint32_t kind = uint32_t(record.kind) & ~WAITS;
    record.kind = CUpti_ActivityKind(is_waiting ? kind | WAITS : kind);
}
template <typename Record> void add(const Record &record, bool is_waiting = false) {
    if (!request) return;
    if (is_hidden) return void(held[gettid()].emplace_back(reinterpret_cast<const char *>(&record), sizeof record));
    size_t records_max;
    Buffer &buffer = buffers[gettid()];
    if (buffer.memory && buffer.used + sizeof record + 8 > buffer.bytes) cuptiActivityFlushAll(0);
    if (!buffer.memory) request(&buffer.memory, &buffer.bytes, &records_max);
    auto *there = memcpy(buffer.memory + buffer.used, &record, sizeof record);
    if (is_waiting) {
        buffer.waiting.push_back(static_cast<CUpti_ActivityKernel10 *>(there));
        mark(*buffer.waiting.back(), true);
    }
    buffer.used += (sizeof record + 7) / 8 * 8;
}
bool is_called_for(CUpti_CallbackDomain domain, uint32_t cbid) {
    std::lock_guard lock(mutex);
    return called_for.count({domain, cbid});
}
// A callback of a function, at its entry or its exit. `params`: what it was given.
void call_back(uint32_t cbid, bool is_entry, const char *kernel = nullptr,
               CUpti_CallbackDomain domain = CUPTI_CB_DOMAIN_DRIVER_API, const void *params = nullptr) {
    if (!is_called_for(domain, cbid)) return;
    {
        std::lock_guard lock(mutex);
        auto place = entered.find({domain, cbid});
        if (is_entry)
            entered.insert({domain, cbid});
        else if (place != entered.end())
            entered.erase(place);
    }
    static uint32_t result = 0;
    CUpti_CallbackData data{};
    data.callbackSite = is_entry ? CUPTI_API_ENTER : CUPTI_API_EXIT, data.symbolName = kernel;
    data.correlationId = correlation, data.contextUid = 1;
    data.functionParams = params, data.functionReturnValue = &result;
    if (cbid == CUPTI_DRIVER_TRACE_CBID_cuModuleUnload) data.functionName = "cuModuleUnload";
    called_back(of_subscriber, domain, cbid, &data);
}
void call(uint32_t cbid, const void *params = nullptr) {
    correlation = ++correlations;
    for (bool is_entry : {true, false}) call_back(cbid, is_entry, nullptr, CUPTI_CB_DOMAIN_DRIVER_API, params);
}
struct Needs {
    int registers = 0, static_bytes = 0, dynamic_bytes = 0, configured_bytes = 0;
} needs;
enum Runs { NEVER, NOW, LATER };
void run(CUpti_ActivityKernel10 &record, unsigned ms) {
    record.start = now();
    if (ms) usleep(ms * 1000);
    record.end = ms ? now() : record.start + 10;
    mark(record, false);
}
void launch_now(Runs runs, unsigned ms) {
    std::lock_guard lock(mutex);
    if (runs == NEVER || !kinds.count(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)) return;
    CUpti_ActivityKernel10 record{};
    record.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, record.correlationId = correlation;
    record.name = "f", record.gridX = record.gridY = record.gridZ = 1;
    record.blockX = 256, record.blockY = record.blockZ = 1;
    record.registersPerThread = uint16_t(needs.registers);
    record.staticSharedMemory = needs.static_bytes, record.dynamicSharedMemory = needs.dynamic_bytes;
    record.isSharedMemoryCarveoutRequested = needs.configured_bytes != 0;
    record.sharedMemoryExecuted = needs.configured_bytes ? uint32_t(needs.configured_bytes) : 8192;
    if (runs == NOW && !is_late) run(record, ms);
    add(record, runs == LATER || (runs == NOW && is_late));
}
void launch_by_driver(Runs runs, unsigned ms = 0) {
    call_back(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, true, "f");
    launch_now(runs, ms);
    call_back(CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, false, "f");
}
void launch(Runs runs, unsigned ms = 0) {
    correlation = ++correlations;
    launch_by_driver(runs, ms);
}
// As cudaLaunchKernel, which calls the driver's function: both have one number.
void launch_by_runtime() {
    correlation = ++correlations;
    for (bool is_entry : {true, false}) {
        call_back(CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000, is_entry, "f", CUPTI_CB_DOMAIN_RUNTIME_API);
        if (is_entry) launch_by_driver(NOW);
    }
}
// A call that another thread makes, from one word of the input to another.
class Staying {
  public:
    void begin() {
        thread_ = std::thread([this] {
            correlation = ++correlations;
            call_back(CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, true);
            is_in_ = true;
            while (is_in_) usleep(100);
            call_back(CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, false);
        });
        while (!is_in_) usleep(100);
    }
    void end() { is_in_ = false, thread_.join(); }

  private:
    std::thread thread_;
    std::atomic<bool> is_in_{false};
};
// Launches of a graph on a thread of their own. Called with the mutex held.
std::thread replaying;
std::atomic<bool> is_replaying{false};
void replay(int count) {
    replaying = std::thread([count] {
        for (int at = 0; at < count; at++) {
            correlation = ++correlations;
            call_back(CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, true);
            is_replaying = true;
            usleep(50);
            is_replaying = false;
            call_back(CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, false);
        }
    });
}
void look_for_replay() {
    if (is_replaying) is_crossed = true;
}
void instantiate() {
    CUpti_ResourceData data{};
    if (is_called_for(CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING))
        called_back(of_subscriber, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING, &data);
}
void *handle(uintptr_t number) { return reinterpret_cast<void *>(number); }
#include "graphs_standin.h"
// Calls that record an event and wait. A stream's handle is its number.
void wait() {
    if (lasting == LASTS) lasting = IS_WAITED_FOR;
    const void *event = handle(0x5000), *recorded[] = {event, handle(13)}, *waits[] = {handle(14), event};
    call(CUPTI_DRIVER_TRACE_CBID_cuEventRecord, recorded);
    call(CUPTI_DRIVER_TRACE_CBID_cuStreamWaitEvent, waits);
    call(CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize, waits);
    call(CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize, recorded);
}
void run_waiting() {
    std::lock_guard lock(mutex);
    for (auto &[thread, buffer] : buffers) {
        for (CUpti_ActivityKernel10 *record : buffer.waiting) run(*record, 0);
        buffer.waiting.clear();
    }
}
void other_gives(uint8_t **given, size_t *bytes, size_t *) {
    static uint8_t memory[1 << 20];
    *given = memory, *bytes = sizeof memory;
}
void other_takes(CUcontext, uint32_t, uint8_t *, size_t, size_t) {}

#include "sampling_standin.h"

}  // namespace

extern "C" {
int standin_driver_version(int *version) { return *version = 13000, 0; }
int standin_has_gpu() { return has_gpu; }
CUptiResult cuptiActivityEnable(CUpti_ActivityKind kind) {
    std::lock_guard lock(mutex);
    look_for_replay();
    return kinds.insert(kind), CUPTI_SUCCESS;
}
CUptiResult cuptiActivityDisable(CUpti_ActivityKind kind) {
    std::lock_guard lock(mutex);
    look_for_replay();
    return kinds.erase(kind), CUPTI_SUCCESS;
}
CUptiResult cuptiGetStreamIdEx(CUcontext, CUstream stream, uint8_t, uint32_t *number) {
    return *number = uint32_t(reinterpret_cast<uintptr_t>(stream)), CUPTI_SUCCESS;
}
CUptiResult cuptiActivityFlushAll(uint32_t flag) {
    std::unique_lock lock(mutex);
    is_flushed_here |= syscall(SYS_gettid) == getpid();
    if (is_late) run_waiting();
    for (auto &[thread, records] : std::exchange(held, {}))
        for (const std::string &record : records) {
            Buffer &buffer = buffers[thread];
            size_t records_max;
            if (!buffer.memory) request(&buffer.memory, &buffer.bytes, &records_max);
            memcpy(buffer.memory + buffer.used, record.data(), record.size());
            buffer.used += (record.size() + 7) / 8 * 8;
        }
    for (auto &[thread, buffer] : buffers) {
        if (!buffer.memory || (!buffer.waiting.empty() && flag != CUPTI_ACTIVITY_FLAG_FLUSH_FORCED)) continue;
        for (CUpti_ActivityKernel10 *record : buffer.waiting) mark(*record, false);
        Buffer full = std::move(buffer);
        buffer = {};
        complete(nullptr, 0, full.memory, full.bytes, full.used);
    }
    lock.unlock();
    Lasting asked = ASKED;
    if (syscall(SYS_gettid) != getpid() && lasting.compare_exchange_strong(asked, LASTS)) {
        while (lasting == LASTS) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivitySetAttribute(CUpti_ActivityAttribute, size_t *, void *) { return CUPTI_SUCCESS; }
CUptiResult cuptiActivityGetAttribute(CUpti_ActivityAttribute, size_t *, void *value) {
    return *static_cast<uint8_t *>(value) = 1, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNextRecord(uint8_t *from, size_t bytes, CUpti_Activity **record) {
    // Never destroyed: records are asked for at the program's exit too.
    static const auto &sizes = *new std::map<CUpti_ActivityKind, size_t>{
        {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, sizeof(CUpti_ActivityKernel10)}};
    auto *next = *record ? reinterpret_cast<uint8_t *>(*record) + (sizes.at((*record)->kind) + 7) / 8 * 8 : from;
    if (next >= from + bytes) return CUPTI_ERROR_MAX_LIMIT_REACHED;
    *record = reinterpret_cast<CUpti_Activity *>(next);
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityGetNumDroppedRecords(CUcontext, uint32_t, size_t *dropped) {
    return *dropped = 0, CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterCallbacks(CUpti_BuffersCallbackRequestFunc gives,
                                           CUpti_BuffersCallbackCompleteFunc takes) {
    std::lock_guard lock(mutex);
    request = gives, complete = takes;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiActivityRegisterTimestampCallback(CUpti_TimestampCallbackFunc clock) { return now = clock, CUPTI_SUCCESS; }
CUptiResult cuptiSetThreadIdType(CUpti_ActivityThreadIdType) { return CUPTI_SUCCESS; }
CUptiResult cuptiGetTimestamp(uint64_t *ns) { return *ns = 1, CUPTI_SUCCESS; }
CUptiResult cuptiGetVersion(uint32_t *version) { return *version = CUPTI_API_VERSION, CUPTI_SUCCESS; }
CUptiResult cuptiGetResultString(CUptiResult, const char **text) { return *text = "an error", CUPTI_SUCCESS; }
CUptiResult cuptiGetCallbackName(CUpti_CallbackDomain domain, uint32_t cbid, const char **name) {
    bool is_driver = domain == CUPTI_CB_DOMAIN_DRIVER_API;
    *name = is_driver ? "cuGetSomething" : "cudaGetSomething";
    static const std::map<uint32_t, const char *> names{
        {CUPTI_DRIVER_TRACE_CBID_cuLaunchKernel, "cuLaunchKernel"},
        {CUPTI_DRIVER_TRACE_CBID_cuGraphLaunch, "cuGraphLaunch"},
        {CUPTI_DRIVER_TRACE_CBID_cuModuleUnload, "cuModuleUnload"},
        {CUPTI_DRIVER_TRACE_CBID_cuEventRecord, "cuEventRecord"},
        {CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, "cuCtxSynchronize"},
        {CUPTI_DRIVER_TRACE_CBID_cuStreamWaitEvent, "cuStreamWaitEvent"},
        {CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize, "cuStreamSynchronize"},
        {CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize, "cuEventSynchronize"}};
    if (auto known = names.find(cbid); is_driver && known != names.end()) *name = known->second;
    if (!is_driver && cbid == CUPTI_RUNTIME_TRACE_CBID_cudaLaunchKernel_v7000) *name = "cudaLaunchKernel_v7000";
    return CUPTI_SUCCESS;
}
CUptiResult cuptiGetDeviceId(CUcontext, uint32_t *device) { return *device = 0, CUPTI_SUCCESS; }
CUptiResult cuptiPCSamplingEnable(CUpti_PCSamplingEnableParams *params) { return sampling.enable(params->ctx); }
CUptiResult cuptiPCSamplingDisable(CUpti_PCSamplingDisableParams *params) { return sampling.disable(params->ctx); }
CUptiResult cuptiPCSamplingStart(CUpti_PCSamplingStartParams *params) { return sampling.turn(params->ctx, "Start"); }
CUptiResult cuptiPCSamplingStop(CUpti_PCSamplingStopParams *params) { return sampling.turn(params->ctx, "Stop"); }
CUptiResult cuptiPCSamplingGetData(CUpti_PCSamplingGetDataParams *params) {
    return sampling.get(params->ctx, *static_cast<CUpti_PCSamplingData *>(params->pcSamplingData));
}
CUptiResult cuptiPCSamplingGetNumStallReasons(CUpti_PCSamplingGetNumStallReasonsParams *params) {
    *params->numStallReasons = std::size(SamplingStandin::REASONS);
    return sampling.answer("GetNumStallReasons");
}
CUptiResult cuptiPCSamplingGetStallReasons(CUpti_PCSamplingGetStallReasonsParams *params) {
    for (size_t at = 0; at < params->numStallReasons; at++) {
        params->stallReasonIndex[at] = uint32_t(at) + SamplingStandin::FIRST;
        snprintf(params->stallReasons[at], CUPTI_STALL_REASON_STRING_SIZE, "smsp__pcsamp_warps_issue_stalled_%s",
                 SamplingStandin::REASONS[at]);
    }
    return sampling.answer("GetStallReasons");
}
CUptiResult cuptiPCSamplingSetConfigurationAttribute(CUpti_PCSamplingConfigurationInfoParams *params) {
    return sampling.configure(*params);
}
CUptiResult cuptiGetCubinCrc(CUpti_GetCubinCrcParams *params) { return params->cubinCrc = 0xabc, CUPTI_SUCCESS; }
CUptiResult cuptiGetSassToSourceCorrelation(CUpti_GetSassToSourceCorrelationParams *params) {
    params->fileName = strdup("kernel.cu"), params->dirName = strdup("/src");
    params->lineNumber = uint32_t(params->pcOffset / 16);
    return CUPTI_SUCCESS;
}
CUptiResult cuptiUnsubscribe(CUpti_SubscriberHandle) {
    std::lock_guard lock(mutex);
    called_for.clear();
    return is_subscribed = false, CUPTI_SUCCESS;
}
CUptiResult cuptiFinalize() {
    std::lock_guard lock(mutex);
    called_for.clear(), kinds.clear(), entered.clear();
    is_subscribed = false, is_finalized = true, request = nullptr, complete = nullptr;
    return CUPTI_SUCCESS;
}
CUptiResult cuptiSubscribe(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc function, void *given) {
    std::lock_guard lock(mutex);
    if (is_subscribed) return CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED;
    called_back = function, of_subscriber = given;
    *handle = reinterpret_cast<CUpti_SubscriberHandle>(&is_subscribed);
    return is_subscribed = true, CUPTI_SUCCESS;
}
CUptiResult cuptiSubscribe_v2(CUpti_SubscriberHandle *handle, CUpti_CallbackFunc function, void *given,
                              CUpti_SubscriberParams *) {
    return cuptiSubscribe(handle, function, given);
}
CUptiResult cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle, CUpti_CallbackDomain domain, CUpti_CallbackId cbid) {
    std::lock_guard lock(mutex);
    enable ? void(called_for.insert({domain, cbid})) : void(called_for.erase({domain, cbid}));
    is_spoiled |= !enable && entered.count({domain, cbid});
    return CUPTI_SUCCESS;
}
}

// For a program that loads this as a library.
extern "C" void standin_launch() { launch(NOW); }
extern "C" void standin_capture() { graphs.capture(); }
extern "C" void standin_graph(const char *what) { graphs.apply(what); }
extern "C" CUptiResult cuptiGetGraphNodeId(CUgraphNode node, uint64_t *number) {
    return *number = graphs.number_of(node), CUPTI_SUCCESS;
}

int main() {
    int version;
    cuDriverGetVersion(&version);
    if (InitializeInjection) InitializeInjection();
    puts("begun");
    fflush(stdout);
    char word[32];
    while (scanf("%31s", word) == 1) {
        std::string what = word;
        int count = 0;
        static const std::map<std::string, Runs> launches{{"launch", NOW}, {"start", NEVER}, {"queue", LATER}};
        if ((launches.count(what) || what == "slow" || what == "cuda" || what == "replay") && scanf("%d", &count) != 1) return 2;
        if (what == "replay") replay(count), count = 0;
        if (what == "replayed") replaying.join(), what = is_crossed ? "crossed" : "apart";
        if (what == "graph") instantiate();
        if (what == "finalized" && !is_finalized) what = "there";
        if (what == "flushed" && !is_flushed_here) what = "not flushed";
        if (what == "slow") launch(NOW, unsigned(count)), count = 0;
        for (int at = 0; at < count; at++) what == "cuda" ? launch_by_runtime() : launch(launches.at(what));
        if (what == "needs" && scanf("%d %d %d %d", &needs.registers, &needs.static_bytes, &needs.dynamic_bytes,
                                     &needs.configured_bytes) != 4)
            return 2;
        if (what == "gpu") has_gpu = true;
        if (what == "run") run_waiting();
        if (what == "waits") wait();
        if (what == "take") cuptiActivityRegisterCallbacks(other_gives, other_takes);
        static auto &staying = *new Staying;
        if (what == "stay") staying.begin();
        if (what == "leave") staying.end();
        if (what == "spoiled" && !is_spoiled) what = "whole";
        if (what == "callbacks") {
            std::lock_guard lock(mutex);
            what = called_for.empty() ? "no callbacks" : "some callbacks";
        }
        if (what == "subscribe") {
            CUpti_SubscriberHandle handle;
            auto called = [](void *, CUpti_CallbackDomain, CUpti_CallbackId, const void *) {};
            if (cuptiSubscribe(&handle, called, nullptr) != CUPTI_SUCCESS) what = "refused";
        }
        if (sampling.takes(what)) what = sampling.done(what);
        if (what == "profile") call(CUPTI_DRIVER_TRACE_CBID_cuProfilerStart);
        if (what == "unprofile") call(CUPTI_DRIVER_TRACE_CBID_cuProfilerStop);
        if (what == "asked") {
            std::lock_guard lock(mutex);
            what = kinds.empty() ? "asked for nothing" : "asked for some";
        }
        if (what == "late") is_late = true;
        if (what == "lasts")
            for (lasting = ASKED; lasting != LASTS;) std::this_thread::yield();
        if (what == "hidden") is_hidden = true;
        if (what == "end" && scanf("%31s", word) == 1) end_by(word, [] { launch(NOW), launch(NOW); });
        if (what == "quit") break;
        puts(what.c_str());
        fflush(stdout);
    }
}
