// The engine `kernels` inside of a traced process: CUPTI's activity records, put into the channel.
//
//     libcuda ──InitializeInjection──▶ enable ──▶ CUPTI's buffers ──flush thread──▶ arrays ──▶ channel
//     (CUDA_INJECTION64_PATH)                     on the target's threads           on ours
//
// The target's threads only ever fill CUPTI's buffers; records are taken apart and sent on a thread of our
// own, every FLUSH_MS and at the end: of the recording, when CUPTI is asked for nothing more, or of the process.
// Nothing here waits for the GPU, or makes a CUDA call but the heartbeat's and, in a process that runs already, those that
// ask what GPUs there are.
#include "call_choice.h"
#include "call_stacks.h"
#include "heartbeat.h"
#include "own_thread.h"
#include "redirect.h"
#include "translator.h"
#include "transport.h"
#include "window_calls.h"
#include "windows.h"

#include <chrono>
#include <condition_variable>
#include <cupti.h>
#include <mutex>
#include <string>
#include <vector>

namespace {

using namespace tracepipe;

constexpr size_t BUFFER_BYTES = 1 << 20;
// A process that is killed or calls _exit takes what was recorded since with it.
constexpr auto FLUSH_MS = std::chrono::milliseconds(25);
// So many heartbeats unseen mean that another profiler has CUPTI. Older ones keep a beat back in a buffer with
// a kernel that still runs: there only the end's flush, which is forced, can tell.
constexpr uint64_t MISSED_AT_END = 2, MISSED_BETWEEN = CUPTI_API_VERSION >= 130000 ? 80 : ~uint64_t(0);
struct Work {
    CUpti_ActivityKind kind;
    const char *what;
};
constexpr Work WORK[] = {
    {CUPTI_ACTIVITY_KIND_DEVICE, "the GPUs"},
    {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, "kernels"},
    {CUPTI_ACTIVITY_KIND_MEMCPY, "copies"},
    {CUPTI_ACTIVITY_KIND_MEMCPY2, "copies between GPUs"},
    {CUPTI_ACTIVITY_KIND_MEMSET, "memsets"},
    {CUPTI_ACTIVITY_KIND_MEMORY2, "allocations"},
};
constexpr CUpti_ActivityKind CALLS[] = {CUPTI_ACTIVITY_KIND_RUNTIME, CUPTI_ACTIVITY_KIND_DRIVER};

Channel channel;
Windows windows(channel);
Heartbeat heartbeat;
CallChoice &choice = *new CallChoice;  // as the translator, which asks it
CallStacks &stacks = *new CallStacks;
pid_t owner;

// Used until the process is gone, so never destroyed: CUPTI's own threads may outlive static objects.
Translator &translator = *new Translator(channel, heartbeat, choice, stacks);

// Buffers are kept: a fresh one costs the thread that asks for it some 250 page faults.
std::mutex &spare_mutex = *new std::mutex;
std::vector<uint8_t *> &spare = *new std::vector<uint8_t *>;

void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES, *records_max = 0;
    {
        std::lock_guard lock(spare_mutex);
        if (!spare.empty()) {
            *buffer = spare.back();
            spare.pop_back();
            return;
        }
    }
    *buffer = static_cast<uint8_t *>(aligned_alloc(8, BUFFER_BYTES));
    if (!*buffer) *bytes = 0;
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid_bytes) {
    if (valid_bytes) translator.translate(buffer, valid_bytes);
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS && dropped)
        channel.drop(KIND_ANY, dropped);
    std::lock_guard lock(spare_mutex);
    spare.push_back(buffer);
}

std::mutex &end_mutex = *new std::mutex;
std::condition_variable &begun_again = *new std::condition_variable;
bool is_begun = false, is_ended = false;
// Whether CUPTI records, and by which turn of the windows: changed under turn_mutex, with which nothing waits for CUPTI's
// threads, as a thread of the program's may have it in a callback of CUPTI's.
std::mutex &turn_mutex = *new std::mutex;
std::atomic<bool> is_recording{true};
std::atomic<uint32_t> followed_turns{1};

// What tracepipe_attach returns; kernels.py says it.
enum Attached { RECORDED, ALREADY_RECORDED, NOT_CONNECTED, OTHER_PROFILER, CUPTI_FAILS };

void tell_taken() {
    uint64_t times_ns[] = {heartbeat.seen_until_ns(), monotonic_ns()};
    channel.put(KIND_TAKEN, times_ns, sizeof times_ns, {}, 0);
}

// Sends what there is yet, once. Called with end_mutex held.
void send_last() {
    is_ended = true;
    stacks.close();
    if (!is_recording) return void(cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED));
    for (uint64_t beat = 0; beat < MISSED_AT_END; beat++) {
        heartbeat.beat();
        cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    }
}

bool enable(const Work &work) {
    CUptiResult result = cuptiActivityEnable(work.kind);
    if (result == CUPTI_SUCCESS) return true;
    const char *why = nullptr;
    cuptiGetResultString(result, &why);
    channel.note(std::string("CUPTI does not record ") + work.what + ": " + (why ? why : "unknown error") + ".");
    return false;
}

// Each record costs the caller 0.2 µs: PyTorch calls cudaGetDevice ten times a kernel, and CUPTI itself
// cuKernelGetName at each launch.
void disable_unwanted(CUpti_CallbackDomain domain, uint32_t functions) {
    for (uint32_t cbid = 1; cbid < functions; cbid++) {
        const char *name = nullptr;
        if (cuptiGetCallbackName(domain, cbid, &name) == CUPTI_SUCCESS && name && choice.takes(name)) continue;
        if (domain == CUPTI_CB_DOMAIN_DRIVER_API)
            cuptiActivityEnableDriverApi(cbid, 0);
        else
            cuptiActivityEnableRuntimeApi(cbid, 0);
    }
}

// All functions, and then without those that are not wanted: where each was enabled by itself, a launch took 1.08
// times the native time after all had been disabled, and 1.02 times it so (H200, CUPTI 13.0).
void enable_calls() {
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityEnable(kind);
    disable_unwanted(CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_SIZE);
    disable_unwanted(CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_SIZE);
}

// What CUPTI records, from now on. Whether it records kernels, if that is wanted.
bool record(bool is_wanted) {
    is_recording = is_wanted;
    bool are_kernels = true;
    for (const Work &work : WORK) {
        if (!is_wanted)
            cuptiActivityDisable(work.kind);
        else if (!enable(work))
            are_kernels &= work.kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    }
    // Not SYNCHRONIZATION: with it each synchronising call takes 0.6 ms more (H200, CUPTI 13.0).
    if (is_wanted) return enable_calls(), heartbeat.start(), are_kernels;
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityDisable(kind);
    for (uint32_t cbid = 1; cbid < CUPTI_RUNTIME_TRACE_CBID_SIZE; cbid++) cuptiActivityEnableRuntimeApi(cbid, 0);
    for (uint32_t cbid = 1; cbid < CUPTI_DRIVER_TRACE_CBID_SIZE; cbid++) cuptiActivityEnableDriverApi(cbid, 0);
    return true;
}

// Records as the windows say: on any thread of the program's, which goes on when that is so.
void follow_window() {
    std::lock_guard lock(turn_mutex);
    uint32_t turns = windows.turns();
    if (turns == followed_turns || channel.is_over()) return;
    followed_turns = turns;
    if (bool(turns & 1) != is_recording) record(turns & 1);
}
WindowCalls &window_calls = *new WindowCalls(windows, follow_window);

bool is_silent() { return is_recording && heartbeat.missed() >= MISSED_AT_END; }

// The recording is over and the program goes on: CUPTI records nothing more, where it is not another profiler's.
// It stays in the process: after cuptiFinalize other threads crash in CUPTI that are in a call of CUDA's just then,
// also if it is called where its documentation says, at the exit of a call (CUPTI 13.0, driver 580). We have no
// subscription that could stand in another profiler's way, but where windows waited for calls, until now.
void let_go(bool is_taken = false) {
    send_last();
    if (is_silent()) {
        is_taken = true;
    } else {
        {
            std::lock_guard turning(turn_mutex);
            record(false);
            window_calls.close();
        }
        cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    }
    if (is_taken) tell_taken();
    channel.close();
}

// Another profiler is about to give CUPTI buffers. CUPTI would fill ours first, and give them to it, which does not
// know them: its profile would lack what is in them. PyTorch's came without any kernel in some runs.
CUptiResult other_registers(CUpti_BuffersCallbackRequestFunc gives, CUpti_BuffersCallbackCompleteFunc takes) {
    {
        std::lock_guard lock(end_mutex);
        if (getpid() == owner && !is_ended) let_go(true);
    }
    return cuptiActivityRegisterCallbacks(gives, takes);
}
Redirect &redirect = *new Redirect("libcupti.so", "cuptiActivityRegisterCallbacks",
                                   reinterpret_cast<void *>(&other_registers));

// Whether it is over. A window that begins or ends is a reason to look too.
bool wait_for_flush(std::unique_lock<std::mutex> &lock) {
    uint32_t seen = followed_turns;
    lock.unlock();
    windows.wait(seen, FLUSH_MS.count());
    lock.lock();
    return is_ended;
}

void flush_often(void *) {
    std::unique_lock lock(end_mutex);
    for (;; begun_again.wait(lock, [] { return !is_ended; })) {
        while (!wait_for_flush(lock)) {
            follow_window();
            if (channel.is_over()) {
                let_go();
                break;
            }
            redirect.look();
            if (is_recording) heartbeat.beat();
            cuptiActivityFlushAll(0);
            if (heartbeat.missed() < MISSED_BETWEEN) continue;
            is_ended = true;
            stacks.close();
            tell_taken();
            channel.close();
        }
    }
}

void end() {
    if (getpid() != owner) return;  // a fork: neither CUPTI nor its locks are in a state to be used
    std::lock_guard lock(end_mutex);
    if (is_ended) return;
    send_last();
    if (is_silent()) tell_taken();
}

uint64_t realtime_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

// On any thread, those that call CUDA among them.
uint64_t CUPTIAPI cupti_clock() {
    uint64_t now_ns = monotonic_ns();
    stacks.note(now_ns, channel);
    return now_ns;
}

void say_hello() {
    bool is_monotonic = cuptiActivityRegisterTimestampCallback(cupti_clock) == CUPTI_SUCCESS;
    auto clock = is_monotonic ? monotonic_ns : realtime_ns;
    Hello hello{};
    cuptiGetVersion(&hello.cupti_version);
    hello.clock = is_monotonic ? CLOCK_IS_MONOTONIC : CLOCK_IS_REALTIME;
    hello.before_ns = clock();
    cuptiGetTimestamp(&hello.cupti_ns);
    hello.after_ns = clock();
    channel.put(KIND_HELLO, &hello, sizeof hello);
}

Attached give_up() {
    is_ended = true;
    channel.close();
    return CUPTI_FAILS;
}

// CUPTI says which GPUs there are when it is initialised with CUDA, and not when that is later.
void say_gpus() {
    constexpr CUdevice GPUS_MAX = 256;
    if (!driver().open()) return;
    for (CUdevice device = 0; device < GPUS_MAX && put_gpu(channel, device);) device++;
}

// Called with end_mutex held.
Attached begin(bool is_late) {
    if (!channel.open()) return NOT_CONNECTED;
    bool is_first = owner != getpid();
    is_begun = true, is_ended = false;
    owner = getpid();
    translator.begin_anew();
    stacks.open();
    say_hello();
    if (is_late) say_gpus();
    cuptiSetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM);
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) {
        channel.note("CUPTI does not take buffers: another profiler is at work in the traced process.");
        return give_up();
    }
    {
        std::lock_guard turning(turn_mutex);
        windows.open();
        followed_turns = windows.turns();
        // Before the first window too: what CUPTI does not record is said, and which GPUs there are.
        if (!record(true)) return give_up();
        if (!windows.is_open()) record(false);
    }
    redirect.look();
    if (windows.are_asked() && !window_calls.open())
        channel.note("Another profiler has CUPTI's callbacks: windows begin some ms late.");
    if (!is_first) {
        begun_again.notify_all();
        return RECORDED;
    }
    if (!start_own_thread(flush_often, nullptr))
        channel.note("No thread could be started in the traced process: its GPU events come at its end.");
    atexit(end);
    at_quick_exit(end);
    return RECORDED;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) void tracepipe_follow_window() {
    if (channel.is_open() && getpid() == owner) follow_window();
}

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
    std::lock_guard lock(end_mutex);
    if (!is_begun) begin(false);
    return 1;
}

// In a process that runs already, by the text that settings.h reads: an Attached. When a recording is over, it may be
// called again. Another profiler that has subscribed would have its records taken away.
extern "C" __attribute__((visibility("default"))) int tracepipe_attach(const char *text) {
    std::lock_guard lock(end_mutex);
    if (is_begun && !is_ended) return ALREADY_RECORDED;
    CUpti_SubscriberHandle subscriber;
    auto nothing = [](void *, CUpti_CallbackDomain, CUpti_CallbackId, const void *) {};
    if (cuptiSubscribe(&subscriber, nothing, nullptr) != CUPTI_SUCCESS) return OTHER_PROFILER;
    cuptiUnsubscribe(subscriber);
    settings().take(text);
    return begin(true);
}
