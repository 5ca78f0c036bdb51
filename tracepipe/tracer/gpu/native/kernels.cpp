// SPDX-License-Identifier: MIT
// The engine `kernels` in a traced process: puts CUPTI's activity records into the channel.
//
//     libcuda ──InitializeInjection──▶ enable ──▶ CUPTI's buffers ──flush thread──▶ arrays ──▶ channel
//     (CUDA_INJECTION64_PATH)                     on the target's threads           on the library's
//
// The target's threads only fill CUPTI's buffers. The library's own thread translates and sends the records
// every FLUSH_MS, and at the end of the recording, when CUPTI is turned off, or of the process. CUPTI returns
// a buffer when all work in it has ended, or when it is forced to: then work that has not ended has no times,
// and is lost. So at an end, buffers are waited for, and only after a while forced.
// Buffers are in the channel's memory (kept_layouts.h), so the capture process reads what a process that was killed,
// or left by _exit, could not send.
// Nothing here waits for the GPU. The only CUDA calls are the heartbeat and, in a running process, those that
// list the GPUs.
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

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cupti.h>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace {

using namespace tracepipe;

constexpr size_t BUFFER_BYTES = KEPT_BYTES;
// The first flushes follow sooner: names of kernels come only with them.
constexpr unsigned FIRST_FLUSH_MS = 1, FLUSH_MS = 25;
// The longest waits for buffers: the capture process waits longer, and a process that ends has little left.
constexpr auto LAST_OF_RECORDING = std::chrono::milliseconds(2000), LAST_OF_PROCESS = std::chrono::milliseconds(250);
constexpr size_t PAGE_BYTES = 4096;
constexpr auto LOOK_MS = std::chrono::milliseconds(2);
// So many missed heartbeats mean that another profiler has CUPTI. If threads share buffers, a beat can wait
// in a buffer with a running kernel: then only the end, which forces buffers out, can show it.
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
// CUPTI has the records of events only together with those of waits.
constexpr CUpti_ActivityKind WAITS[] = {CUPTI_ACTIVITY_KIND_SYNCHRONIZATION, CUPTI_ACTIVITY_KIND_CUDA_EVENT};

Channel channel;
Windows windows(channel);
Heartbeat heartbeat;
CallChoice &choice = *new CallChoice;  // never destroyed, as the translator uses it
CallStacks &stacks = *new CallStacks;
pid_t owner;
StallSampler &stalls = *new StallSampler(channel, windows);  // never destroyed: CUPTI may be in its callback

// Used until the process ends, so never destroyed: CUPTI's own threads may outlive static objects.
Translator &translator = *new Translator(channel, heartbeat, choice, stacks);

// Buffers are reused: a fresh one costs the requesting thread about 250 page faults.
std::mutex &spare_mutex = *new std::mutex;
std::vector<uint8_t *> &spare = *new std::vector<uint8_t *>;
std::atomic<int> buffers_out{0};
bool are_buffers_shared = false;

void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES, *records_max = 0;
    {
        std::lock_guard lock(spare_mutex);
        *buffer = spare.empty() ? nullptr : spare.back();
        if (*buffer) spare.pop_back();
    }
    if (!*buffer && !(*buffer = channel.take_buffer()))
        *buffer = static_cast<uint8_t *>(aligned_alloc(8, BUFFER_BYTES));
    if (!*buffer) return void(*bytes = 0);
    buffers_out++;
    if (KeptBuffer *kept = channel.kept(*buffer)) kept->sent = 0, kept->is_out = 1;
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid_bytes) {
    KeptBuffer *kept = channel.kept(buffer);
    if (valid_bytes) translator.translate(buffer, valid_bytes, kept);
    if (kept) {
        kept->is_out = 0;
        memset(buffer, 0, std::min(BUFFER_BYTES, valid_bytes + PAGE_BYTES));
    }
    size_t dropped = 0;
    if (cuptiActivityGetNumDroppedRecords(context, stream, &dropped) == CUPTI_SUCCESS && dropped)
        channel.drop(KIND_ANY, dropped);
    std::lock_guard lock(spare_mutex);
    spare.push_back(buffer);
    buffers_out--;
}

// At the end of the recording or of the process: other processes can have the buffers.
void give_up_buffers() {
    std::lock_guard lock(spare_mutex);
    auto is_kept = [](uint8_t *buffer) {
        KeptBuffer *kept = channel.kept(buffer);
        if (kept) kept->pid = 0;
        return kept != nullptr;
    };
    channel.end_count();
    spare.erase(std::remove_if(spare.begin(), spare.end(), is_kept), spare.end());
}

std::mutex &end_mutex = *new std::mutex;
std::condition_variable &begun_again = *new std::condition_variable;
bool is_begun = false, is_ended = false;
// Whether CUPTI records, and since which turn of the windows. Both change under turn_mutex, whose holder must
// not wait for CUPTI's threads, as a thread of the program may hold it in a callback of CUPTI.
std::mutex &turn_mutex = *new std::mutex;
std::atomic<bool> is_recording{true};
std::atomic<uint32_t> followed_turns{1};

// The results of tracepipe_attach; kernels.py has their messages.
enum Attached { RECORDED, ALREADY_RECORDED, NOT_CONNECTED, OTHER_PROFILER, CUPTI_FAILS };

void report_taken() {
    uint64_t times_ns[] = {heartbeat.seen_until_ns(), monotonic_ns()};
    channel.put(KIND_TAKEN, times_ns, sizeof times_ns, {}, 0);
    channel.forget_buffers();
}

bool enable(const Work &work) {
    CUptiResult result = cuptiActivityEnable(work.kind);
    if (result == CUPTI_SUCCESS) return true;
    const char *why = nullptr;
    cuptiGetResultString(result, &why);
    channel.note(std::string("CUPTI does not record ") + work.what + ": " + (why ? why : "unknown error") + ".");
    return false;
}

// Disables the records of all functions that `takes` rejects. Only if no other thread can be in a CUDA call:
// CUPTI would have that call's entry without an exit, all later records of its thread would have its
// correlation, and calls would have no times (seen with CUPTI 13.0 after tens of windows, with a thread that
// launched all the time).
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

// Starts recording; whether CUPTI records kernels. It records all calls, and the translator leaves out
// unwanted ones.
bool record() {
    is_recording = true;
    bool are_kernels = true;
    for (const Work &work : WORK)
        if (!enable(work)) are_kernels &= work.kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    for (CUpti_ActivityKind kind : CALLS)
        if (!choice.is_none()) cuptiActivityEnable(kind);
    if (choice.takes("cudaStreamSynchronize")) cuptiActivityEnable(WAITS[0]);
    if (choice.takes("cudaEventRecord")) cuptiActivityEnable(WAITS[1]);
    heartbeat.start(choice.is_none());
    return are_kernels;
}

// Stops recording. A call that is in progress may leave only its kernel, never only the call: calls are
// disabled first.
void record_nothing() {
    is_recording = false;
    for (CUpti_ActivityKind kind : CALLS) cuptiActivityDisable(kind);
    for (CUpti_ActivityKind kind : WAITS) cuptiActivityDisable(kind);
    for (const Work &work : WORK) cuptiActivityDisable(work.kind);
    heartbeat.stop();
}

// Begins in the state that the windows require. Recording is started in any case, as that reports what CUPTI
// does not record, and the GPUs. `is_alone`: no other thread is in a CUDA call.
bool begin_to_record(bool is_alone) {
    bool are_kernels = record();
    // Each record costs the caller 0.2 µs: PyTorch calls cudaGetDevice ten times a kernel, and CUPTI itself
    // calls cuKernelGetName at each launch. Later windows record them all, as CUPTI then enables all
    // functions again.
    auto takes = [](std::string_view name) { return choice.takes(name) || Heartbeat::is_call(name); };
    if (is_alone && !choice.is_none()) disable_functions(takes);
    if (windows.is_open()) return are_kernels;
    record_nothing();
    // Otherwise a launch would take 1.05 times as long until the first window.
    if (is_alone) disable_functions([](std::string_view) { return false; });
    return are_kernels;
}

// Starts or stops recording as the windows require. It may run on any thread of the program, which continues
// then.
void follow_window() {
    std::lock_guard lock(turn_mutex);
    uint32_t turns = windows.turns();
    if (turns == followed_turns || channel.is_over()) return;
    followed_turns = turns;
    if (bool(turns & 1) != is_recording) turns & 1 ? void(record()) : record_nothing();
    channel.followed(turns);
}
WindowCalls &window_calls = *new WindowCalls(windows, follow_window);

std::atomic<bool> is_exiting{false};
thread_local bool is_own_thread = false;

// Whether another profiler has CUPTI, as beats do not come back. On a thread of the program, a beat would
// wait in a buffer with that thread's kernels, so buffers are forced out.
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

// Ends the recording: turns CUPTI off, unless another profiler has it, and sends the remaining records.
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
    if (is_taken) report_taken();
}

// Ends the recording while the program continues. CUPTI stays in the process: after cuptiFinalize, threads
// that are in a CUDA call at that moment crash in CUPTI, even if it is called where its documentation says,
// at the exit of a call (CUPTI 13.0, driver 580). No subscription is left that could block another profiler.
void let_go(bool is_taken, std::chrono::milliseconds longest) {
    send_last(is_taken, longest);
    give_up_buffers();
    channel.close(buffers_out != 0);
}

// Called when another profiler registers its buffers with CUPTI. CUPTI would first fill the library's buffers
// and return them to that profiler, which does not know them, so its profile would lack their records.
// PyTorch's profile had no kernels in some runs.
CUptiResult other_registers(CUpti_BuffersCallbackRequestFunc gives, CUpti_BuffersCallbackCompleteFunc takes) {
    {
        std::lock_guard lock(end_mutex);
        // This is a thread of the program, and must not wait.
        if (getpid() == owner && !is_ended) let_go(true, std::chrono::milliseconds(0));
    }
    return cuptiActivityRegisterCallbacks(gives, takes);
}
Redirect &redirect = *new Redirect("libcupti.so", "cuptiActivityRegisterCallbacks",
                                   reinterpret_cast<void *>(&other_registers));

// Waits for a while, or for a begin or end of a window; whether the recording is over.
bool wait_for_flush(std::unique_lock<std::mutex> &lock, unsigned &wait_ms) {
    uint32_t seen = followed_turns;
    lock.unlock();
    windows.wait(seen, wait_ms);
    wait_ms = std::min(2 * wait_ms, FLUSH_MS);
    lock.lock();
    return is_ended;
}

void flush_often(void *) {
    is_own_thread = true;
    std::unique_lock lock(end_mutex);
    for (;; begun_again.wait(lock, [] { return !is_ended; })) {
        for (unsigned wait_ms = FIRST_FLUSH_MS; !wait_for_flush(lock, wait_ms);) {
            follow_window();
            if (channel.is_over()) {
                let_go(false, LAST_OF_RECORDING);
                break;
            }
            redirect.look();
            if (is_recording) heartbeat.beat();
            cuptiActivityFlushAll(0);
            if (!buffers_out) channel.forget_readings();
            if (are_buffers_shared || heartbeat.missed() < MISSED_BETWEEN) continue;
            is_ended = true;
            stalls.close();
            stacks.close();
            report_taken();
            channel.close();
        }
    }
}

void end() {
    if (getpid() != owner) return;  // a fork: neither CUPTI nor its locks can be used
    is_exiting = true;
    std::lock_guard lock(end_mutex);
    if (is_ended) return;
    wait_for_buffers(LAST_OF_PROCESS);
    send_last(false, std::chrono::milliseconds(0));
    give_up_buffers();
}

uint64_t realtime_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

// Runs on any thread, also on those that call CUDA.
uint64_t CUPTIAPI cupti_clock() {
    channel.count_reading();
    uint64_t now_ns = monotonic_ns();
    stacks.note(now_ns, channel);
    return now_ns;
}

void put_hello() {
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

// CUPTI reports the GPUs if it is initialised with CUDA, but not if it is initialised later.
void put_gpus() {
    constexpr CUdevice GPUS_MAX = 256;
    if (!driver().open()) return;
    for (CUdevice device = 0; device < GPUS_MAX && put_gpu(channel, device);) device++;
}

// Requests a buffer for each thread, which is the default from CUPTI 13 on. The setting must not change after
// records were made, as another profiler may have done in a running process.
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
    channel.begin_to_count();
    bool is_first = owner != getpid();
    is_begun = true, is_ended = false;
    owner = getpid();
    translator.begin_anew();
    stacks.open();
    put_hello();
    if (is_late) put_gpus();
    cuptiSetThreadIdType(CUPTI_ACTIVITY_THREAD_ID_TYPE_SYSTEM);
    part_buffers(is_late);
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) {
        channel.note("CUPTI does not take buffers: another profiler uses it in the traced process.");
        return give_up();
    }
    {
        std::lock_guard turning(turn_mutex);
        windows.open();
        followed_turns = windows.turns();
        if (!begin_to_record(!is_late)) return give_up();
        channel.followed(followed_turns);
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
    pthread_atfork(nullptr, nullptr, [] { channel.leave_buffers(); });
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

// Begins a recording in a running process, with the settings in `text` (settings.h); returns an Attached. It
// may be called again when the recording is over. It refuses if another profiler has subscribed, which would
// lose its records.
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
