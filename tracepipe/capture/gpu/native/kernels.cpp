// SPDX-License-Identifier: MIT
// The engine `kernels` inside of a traced process: CUPTI's activity records, put into the channel.
//
//     libcuda ──InitializeInjection──▶ enable ──▶ CUPTI's buffers ──flush thread──▶ arrays ──▶ channel
//     (CUDA_INJECTION64_PATH)                     on the target's threads           on ours
//
// The target's threads only ever fill CUPTI's buffers; records are taken apart and sent on a thread of our
// own, every FLUSH_MS and at the end: of the recording, when CUPTI is asked for nothing more, or of the process.
// A buffer comes back when all that is in it has ended, or when it is demanded: what runs or waits to run then has no
// times, and is lost. So at an end buffers are waited for, and demanded after a while.
// Nothing here waits for the GPU, or makes a CUDA call but the heartbeat's and, in a process that runs already, those that
// ask what GPUs there are.
#include "call_choice.h"
#include "call_stacks.h"
#include "heartbeat.h"
#include "own_thread.h"
#include "redirect.h"
#include "stall_sampler.h"
#include "translator.h"
#include "transport.h"
#include "window_calls.h"
#include "windows.h"

#include <chrono>
#include <condition_variable>
#include <cupti.h>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace tracepipe;

constexpr size_t BUFFER_BYTES = 1 << 20;
// A process that is killed or calls _exit takes what was recorded since with it.
constexpr auto FLUSH_MS = std::chrono::milliseconds(25);
// How long buffers are waited for: the capture waits longer, and a process that ends has little to wait for.
constexpr auto LAST_OF_RECORDING = std::chrono::milliseconds(2000), LAST_OF_PROCESS = std::chrono::milliseconds(250);
constexpr auto LOOK_MS = std::chrono::milliseconds(2);
// This many heartbeats unseen mean that another profiler has CUPTI. Where threads share buffers, a beat stays in one with a
// kernel that still runs: there only the end, which demands them, can show it.
constexpr uint64_t MISSED_AT_END = 2, MISSED_BETWEEN = 80;
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
StallSampler &stalls = *new StallSampler(channel, windows);  // as the translator: CUPTI may be in its callback

// Used until the process is gone, so never destroyed: CUPTI's own threads may outlive static objects.
Translator &translator = *new Translator(channel, heartbeat, choice, stacks);

// Buffers are kept: a fresh one costs the thread that asks for it some 250 page faults.
std::mutex &spare_mutex = *new std::mutex;
std::vector<uint8_t *> &spare = *new std::vector<uint8_t *>;
std::atomic<int> buffers_out{0};
bool are_buffers_shared = false;

void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES, *records_max = 0;
    {
        std::lock_guard lock(spare_mutex);
        if (!spare.empty()) {
            *buffer = spare.back();
            spare.pop_back();
            buffers_out++;
            return;
        }
    }
    *buffer = static_cast<uint8_t *>(aligned_alloc(8, BUFFER_BYTES));
    *buffer ? void(buffers_out++) : void(*bytes = 0);
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid_bytes) {
    if (valid_bytes) translator.translate(buffer, valid_bytes);
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS && dropped)
        channel.drop(KIND_ANY, dropped);
    std::lock_guard lock(spare_mutex);
    spare.push_back(buffer);
    buffers_out--;
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

bool enable(const Work &work) {
    CUptiResult result = cuptiActivityEnable(work.kind);
    if (result == CUPTI_SUCCESS) return true;
    const char *why = nullptr;
    cuptiGetResultString(result, &why);
    channel.note(std::string("CUPTI does not record ") + work.what + ": " + (why ? why : "unknown error") + ".");
    return false;
}

// Of all functions that `takes` has not. Only where no other thread can be in a call of CUDA's: of one that is, CUPTI has
// the entry and then no exit, and all later records of its thread have that call's correlation, calls no times
// (CUPTI 13.0: so it was after some tens of windows of a thread that launches all the time).
template <typename Takes> void disable_functions(Takes takes) {
    auto are_left = [&](CUpti_CallbackDomain domain, uint32_t cbid) {
        const char *name = nullptr;
        return cuptiGetCallbackName(domain, cbid, &name) == CUPTI_SUCCESS && name && takes(name);
    };
    for (uint32_t cbid = 1; cbid < CUPTI_RUNTIME_TRACE_CBID_SIZE; cbid++)
        if (!are_left(CUPTI_CB_DOMAIN_RUNTIME_API, cbid)) cuptiActivityEnableRuntimeApi(cbid, 0);
    for (uint32_t cbid = 1; cbid < CUPTI_DRIVER_TRACE_CBID_SIZE; cbid++)
        if (!are_left(CUPTI_CB_DOMAIN_DRIVER_API, cbid)) cuptiActivityEnableDriverApi(cbid, 0);
}

// Whether CUPTI records kernels from now on. Of calls all, of which the translator leaves out those that are not wanted.
bool record() {
    is_recording = true;
    bool are_kernels = true;
    for (const Work &work : WORK)
        if (!enable(work)) are_kernels &= work.kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    // Not SYNCHRONIZATION: with it each synchronising call takes 0.6 ms more (H200, CUPTI 13.0).
    for (CUpti_ActivityKind kind : CALLS)
        if (!choice.is_none()) cuptiActivityEnable(kind);
    heartbeat.start(choice.is_none());
    return are_kernels;
}

// Of a call that a thread is in meanwhile there may be the kernel alone, and never the call alone: calls end first.
void record_nothing() {
    is_recording = false;
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityDisable(kind);
    for (const Work &work : WORK) cuptiActivityDisable(work.kind);
    heartbeat.stop();
}

// As it is to begin with, which the windows say. What CUPTI does not record is said before the first one too, and which
// GPUs there are. `is_alone`: no other thread is in a call of CUDA's.
bool begin_to_record(bool is_alone) {
    bool are_kernels = record();
    // Each record costs the caller 0.2 µs: PyTorch calls cudaGetDevice ten times a kernel, and CUPTI itself
    // cuKernelGetName at each launch. A later window records them all, as CUPTI then enables all functions again.
    auto takes = [](std::string_view name) { return choice.takes(name) || Heartbeat::is_call(name); };
    if (is_alone && !choice.is_none()) disable_functions(takes);
    if (windows.is_open()) return are_kernels;
    record_nothing();
    // Or a launch would take 1.05 times as long until the first window.
    if (is_alone) disable_functions([](std::string_view) { return false; });
    return are_kernels;
}

// Records as the windows say: on any thread of the program's, which goes on when that is so.
void follow_window() {
    std::lock_guard lock(turn_mutex);
    uint32_t turns = windows.turns();
    if (turns == followed_turns || channel.is_over()) return;
    followed_turns = turns;
    if (bool(turns & 1) != is_recording) turns & 1 ? void(record()) : record_nothing();
}
WindowCalls &window_calls = *new WindowCalls(windows, follow_window);

std::atomic<bool> is_exiting{false};
thread_local bool is_own_thread = false;

// Whether another profiler has CUPTI, as beats do not come back. One on a thread of the program's would stay in a buffer
// with that thread's kernels.
bool is_silent() {
    bool is_demanded = are_buffers_shared || !is_own_thread;
    for (uint64_t beat = 0; is_recording && beat < MISSED_AT_END; beat++) {
        heartbeat.beat();
        cuptiActivityFlushAll(is_demanded ? CUPTI_ACTIVITY_FLAG_FLUSH_FORCED : 0);
    }
    return is_recording && heartbeat.missed() >= MISSED_AT_END;
}

void wait_for_buffers(std::chrono::milliseconds longest) {
    auto began = std::chrono::steady_clock::now();
    auto is_early = [&] {
        auto waited = std::chrono::steady_clock::now() - began;
        return waited < longest && !(is_exiting && waited >= LAST_OF_PROCESS);
    };
    while (cuptiActivityFlushAll(0), buffers_out && is_early()) std::this_thread::sleep_for(LOOK_MS);
}

// The recording is over: CUPTI records nothing more, where it is not another profiler's, and what there is yet is sent.
// Called with end_mutex held.
void send_last(bool is_taken, std::chrono::milliseconds longest) {
    is_ended = true;
    stalls.close();
    stacks.close();
    if (is_silent()) {
        is_taken = true;
    } else {
        {
            std::lock_guard turning(turn_mutex);
            record_nothing();
            window_calls.close();
        }
        wait_for_buffers(longest);
        if (buffers_out) cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED);
    }
    if (is_taken) tell_taken();
}

// The program goes on. CUPTI stays in the process: after cuptiFinalize other threads crash in CUPTI that are in a call of
// CUDA's just then, also if it is called where its documentation says, at the exit of a call (CUPTI 13.0, driver 580). We
// have no subscription that could stand in another profiler's way, but where windows waited for calls, until now.
void let_go(bool is_taken, std::chrono::milliseconds longest) {
    send_last(is_taken, longest);
    channel.close();
}

// Another profiler is about to give CUPTI buffers. CUPTI would fill ours first, and give them to it, which does not
// know them: its profile would lack what is in them. PyTorch's came without any kernel in some runs.
CUptiResult other_registers(CUpti_BuffersCallbackRequestFunc gives, CUpti_BuffersCallbackCompleteFunc takes) {
    {
        std::lock_guard lock(end_mutex);
        // It is on a thread of the program's, and waits for nothing.
        if (getpid() == owner && !is_ended) let_go(true, std::chrono::milliseconds(0));
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
    is_own_thread = true;
    std::unique_lock lock(end_mutex);
    for (;; begun_again.wait(lock, [] { return !is_ended; })) {
        while (!wait_for_flush(lock)) {
            follow_window();
            if (channel.is_over()) {
                let_go(false, LAST_OF_RECORDING);
                break;
            }
            redirect.look();
            if (is_recording) heartbeat.beat();
            cuptiActivityFlushAll(0);
            if (are_buffers_shared || heartbeat.missed() < MISSED_BETWEEN) continue;
            is_ended = true;
            stalls.close();
            stacks.close();
            tell_taken();
            channel.close();
        }
    }
}

void end() {
    if (getpid() != owner) return;  // a fork: neither CUPTI nor its locks are in a state to be used
    is_exiting = true;
    std::lock_guard lock(end_mutex);
    if (is_ended) return;
    wait_for_buffers(LAST_OF_PROCESS);
    send_last(false, std::chrono::milliseconds(0));
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

// A buffer for each thread, as it is from CUPTI 13 on if nobody asks. It may not be changed once records were made, by
// another profiler, in a process that runs already.
void part_buffers(bool is_late) {
    uint8_t is_by_thread = 1;
    size_t bytes = sizeof is_by_thread;
    if (!is_late) cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, &bytes, &is_by_thread);
    cuptiActivityGetAttribute(CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, &bytes, &is_by_thread);
    are_buffers_shared = !is_by_thread;
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
    part_buffers(is_late);
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) {
        channel.note("CUPTI does not take buffers: another profiler is at work in the traced process.");
        return give_up();
    }
    {
        std::lock_guard turning(turn_mutex);
        windows.open();
        followed_turns = windows.turns();
        if (!begin_to_record(!is_late)) return give_up();
    }
    redirect.look();
    if (windows.are_asked() && !window_calls.open())
        channel.note("Another profiler has CUPTI's callbacks: windows begin some ms late.");
    if (settings().get("TRACEPIPE_GPU_STALLS")) stalls.open(false);
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
