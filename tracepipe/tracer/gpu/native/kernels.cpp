// SPDX-License-Identifier: MIT
// The engine `kernels` in a traced process: puts CUPTI's activity records, and the program's calls, into the
// channel.
//
//     libcuda ──InitializeInjection──▶ enable ──▶ CUPTI's buffers ──flush thread──▶ arrays ──▶ channel
//     (CUDA_INJECTION64_PATH)             │       on the target's threads           on the library's
//                                         └─────▶ callbacks of calls (api_calls.h)
//
// The target's threads only fill buffers. The library's own thread translates and sends the records every
// FLUSH_MS, and at the end of the recording or of the process. A thread that has waited for the GPU does so too,
// if it has failed, or if this takes a small share of the time (WAITS_SHARE). CUPTI returns
// a buffer when all work in it has ended, or when it is forced to: then work that has not ended has no times,
// and is lost. So at an end, buffers are waited for, and only after a while forced.
// Buffers are in the channel's memory (kept_layouts.h), so the capture process reads what a process that was killed,
// or left by _exit, could not send.
// Nothing here waits for the GPU. The only CUDA calls are those that list the GPUs.
//
// Only one client can have CUPTI's callbacks, or its records. When another one comes, the recording ends, and it has
// both.
#include "api_calls.h"
#include "entry_jump.h"
#include "gpu_record.h"
#include "graph_nodes.h"
#include "own_thread.h"
#include "stall_sampler.h"
#include "subscription.h"
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
// While the program calls nothing, only each so many turns flush.
constexpr unsigned IDLE_TURNS = 10;
// The longest waits for buffers: the capture process waits longer, and a process that ends has little left.
constexpr auto LAST_OF_RECORDING = std::chrono::milliseconds(2000), LAST_OF_PROCESS = std::chrono::milliseconds(250);
constexpr size_t PAGE_BYTES = 4096;
constexpr auto LOOK_MS = std::chrono::milliseconds(2);
// CUPTI writes the times of work only when it is flushed, which takes 0.2 to 0.6 ms (CUPTI 13.0). A program that flushed
// at the end of each wait took 1.2 to 1.6 times as long, and 1.1 to 1.2 times if that only woke the library's thread. So
// waits may flush for one part in so many of the time.
constexpr uint64_t WAITS_SHARE = 100;
// How long a wait stays for the library's thread, which may have begun to flush before the work ended.
constexpr uint64_t FLUSHING_NS = 20'000'000;
struct Work {
    CUpti_ActivityKind kind;
    const char *what;
};
constexpr Work WORK[] = {
    {CUPTI_ACTIVITY_KIND_MEMCPY, "copies"},
    {CUPTI_ACTIVITY_KIND_MEMCPY2, "copies between GPUs"},
    {CUPTI_ACTIVITY_KIND_MEMSET, "memsets"},
    {CUPTI_ACTIVITY_KIND_MEMORY2, "allocations"},
    {CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, "kernels"},
};

Channel channel;
Windows windows(channel);
pid_t owner;
// Used until the process ends, so never destroyed: CUPTI's own threads may outlive static objects.
Subscription &subscription = *new Subscription;
PythonStacks &stacks = *new PythonStacks;
ApiCalls &calls = *new ApiCalls(channel, subscription, stacks);
GraphNodes &nodes = *new GraphNodes(channel, subscription, stacks);
StallSampler &stalls = *new StallSampler(channel, windows, subscription);
Translator &translator = *new Translator(channel);

// Buffers are reused: a fresh one costs the requesting thread about 250 page faults. That thread also clears what was used
// of it, at once: memory that another processor has written last would cost it more with each record.
struct Spare {
    uint8_t *buffer;
    size_t used;
};
// A buffer that CUPTI has returned. It is translated later, as launches may wait for CUPTI until its callback returns.
struct Taken {
    CUcontext context;
    uint32_t stream;
    uint8_t *buffer;
    size_t bytes;
};
std::mutex &buffers_mutex = *new std::mutex;
std::vector<Spare> &spare = *new std::vector<Spare>;
std::vector<Taken> &taken = *new std::vector<Taken>;
std::atomic<int> buffers_out{0};  // that are not translated

void clear(const Spare &one) { memset(one.buffer, 0, std::min(BUFFER_BYTES, one.used + PAGE_BYTES)); }

void CUPTIAPI give_buffer(uint8_t **buffer, size_t *bytes, size_t *records_max) {
    *bytes = BUFFER_BYTES, *records_max = 0;
    Spare found{};
    {
        std::lock_guard lock(buffers_mutex);
        if (!spare.empty()) found = spare.back(), spare.pop_back();
    }
    *buffer = found.buffer;
    if (!*buffer && !(*buffer = channel.take_buffer()))
        *buffer = static_cast<uint8_t *>(aligned_alloc(8, BUFFER_BYTES));
    if (!*buffer) return void(*bytes = 0);
    buffers_out++;
    if (KeptBuffer *kept = channel.kept(*buffer)) {
        if (found.buffer) clear(found);
        kept->sent = 0, kept->is_out = 1;
    }
}

void CUPTIAPI take_buffer(CUcontext context, uint32_t stream, uint8_t *buffer, size_t, size_t valid_bytes) {
    std::lock_guard lock(buffers_mutex);
    taken.push_back({context, stream, buffer, valid_bytes});
}

// Sends what is in the buffers that CUPTI has returned, or, without a recording, forgets it. Called with end_mutex held.
void use_taken(bool is_recorded = true) {
    std::vector<Taken> some;
    {
        std::lock_guard lock(buffers_mutex);
        some.swap(taken);
    }
    if (is_recorded && !some.empty()) calls.send();  // before their kernels, whose arguments they get
    for (const Taken &one : some) {
        KeptBuffer *kept = channel.kept(one.buffer);
        if (is_recorded && one.bytes) translator.translate(one.buffer, one.bytes, kept);
        if (kept) kept->is_out = 0;
        size_t dropped = 0;
        if (is_recorded && cuptiActivityGetNumDroppedRecords(one.context, one.stream, &dropped) == CUPTI_SUCCESS && dropped)
            channel.drop(KIND_ANY, dropped);
        std::lock_guard lock(buffers_mutex);
        spare.push_back({one.buffer, one.bytes});
        buffers_out--;
    }
}

void flush() {
    cuptiActivityFlushAll(0);
    use_taken();
}

// Other processes can have the buffers that CUPTI has not.
void give_up_spare() {
    std::lock_guard lock(buffers_mutex);
    auto is_kept = [](const Spare &one) {
        KeptBuffer *kept = channel.kept(one.buffer);
        if (kept) clear(one), kept->pid = 0;
        return kept != nullptr;
    };
    spare.erase(std::remove_if(spare.begin(), spare.end(), is_kept), spare.end());
}

// At the end of the recording or of the process.
void give_up_buffers() {
    calls.give_up_buffers();
    give_up_spare();
}

std::mutex &end_mutex = *new std::mutex;
std::condition_variable &begun_again = *new std::condition_variable;
bool is_begun = false, is_ended = false, are_gpus_put = false;
// Whether CUPTI records, and since which turn of the windows. Both change under turn_mutex, whose holder must
// not wait for CUPTI's threads, as a thread of the program may hold it in a callback of CUPTI.
std::mutex &turn_mutex = *new std::mutex;
std::atomic<bool> is_recording{true};
std::atomic<uint32_t> followed_turns{1};

// The results of tracepipe_attach; kernels.py has their messages.
enum Attached { RECORDED, ALREADY_RECORDED, NOT_CONNECTED, OTHER_PROFILER, CUPTI_FAILS };

void report_taken() {
    uint64_t now_ns = monotonic_ns(), times_ns[] = {now_ns, now_ns};
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

// Starts recording; whether CUPTI records kernels.
bool record() {
    is_recording = true;
    bool are_kernels = true;
    calls.open();
    calls.between_replays([&] {
        for (const Work &work : WORK)
            if (!enable(work)) are_kernels &= work.kind != CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL;
    });
    calls.record(true);
    return are_kernels;
}

// Stops recording. A call that is in progress may leave only its kernel, never only the call: calls come first.
// They still have callbacks.
void record_nothing() {
    is_recording = false;
    calls.record(false);
    calls.between_replays([] {
        for (const Work &work : WORK) cuptiActivityDisable(work.kind);
    });
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
WindowCalls &window_calls = *new WindowCalls(windows, subscription, follow_window);

std::atomic<bool> is_exiting{false};
// Whether the process had a CUDA graph while the library was there, or may have had one before.
std::atomic<bool> has_graphs{false};
// When a wait may flush again.
std::atomic<uint64_t> flush_from_ns{0};

// Puts the GPUs of this process. CUDA has begun when CUPTI has a buffer.
void put_gpus() {
    constexpr CUdevice GPUS_MAX = 256;
    if (are_gpus_put || !has_device_functions()) return;
    for (CUdevice device = 0; device < GPUS_MAX && put_gpu(channel, device);) device++, are_gpus_put = true;
}

// Sends what is recorded: what follows may end the process.
void flush_after_wait(bool has_failed) {
    uint64_t now_ns = monotonic_ns();
    if (!has_failed && now_ns < flush_from_ns) return;
    std::unique_lock lock(end_mutex, std::try_to_lock);
    while (!lock.owns_lock() && monotonic_ns() - now_ns < FLUSHING_NS) Gate::pause(), lock.try_lock();
    if (!lock.owns_lock() || is_ended) return;
    OwnCalls own;
    put_gpus();
    calls.send();
    flush();
    uint64_t end_ns = monotonic_ns();
    flush_from_ns = end_ns + WAITS_SHARE * (end_ns - now_ns);
}

// A call that nobody but the recording wants: most are.
void take_call(CUpti_CallbackDomain domain, CUpti_CallbackId id, const CUpti_CallbackData &data) {
    if (!calls.take(domain, id, data)) return;
    flush_after_wait(data.functionReturnValue && *static_cast<const uint32_t *>(data.functionReturnValue));
}

void called_back(CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *given) {
    if (this_process() != owner) return;
    if (subscription.parts(domain, id) == Subscription::CALLS)
        return take_call(domain, id, *static_cast<const CUpti_CallbackData *>(given));
    if (subscription.has(Subscription::SAMPLER, domain, id)) stalls.take(domain, id, given);
    if (subscription.has(Subscription::GRAPHS, domain, id)) has_graphs = true;
    if (subscription.has(Subscription::NODES, domain, id)) nodes.take(id, *static_cast<const CUpti_ResourceData *>(given));
    if (domain == CUPTI_CB_DOMAIN_RESOURCE) return;
    auto &data = *static_cast<const CUpti_CallbackData *>(given);
    bool is_entry = data.callbackSite == CUPTI_API_ENTER;
    // The launch that begins or ends a window is in it.
    if (is_entry && subscription.has(Subscription::TRIGGERS, domain, id)) window_calls.take(domain, id, data);
    if (subscription.has(Subscription::CALLS, domain, id)) take_call(domain, id, data);
    if (!is_entry && subscription.has(Subscription::TRIGGERS, domain, id)) window_calls.take(domain, id, data);
}

void wait_for_buffers(std::chrono::milliseconds longest) {
    auto began = std::chrono::steady_clock::now();
    auto is_early = [&] {
        auto waited = std::chrono::steady_clock::now() - began;
        return waited < longest && !(is_exiting && waited >= LAST_OF_PROCESS);
    };
    while (flush(), buffers_out && is_early()) std::this_thread::sleep_for(LOOK_MS);
}

// Ends the recording: turns CUPTI off, and sends the remaining records. Whether CUPTI had to be forced. Called with
// end_mutex held.
bool send_last(bool is_taken, std::chrono::milliseconds longest) {
    is_ended = true;
    stalls.close();
    {
        std::lock_guard turning(turn_mutex);
        record_nothing();
        subscription.clear(Subscription::TRIGGERS);
        subscription.clear(Subscription::NODES);
    }
    wait_for_buffers(longest);
    bool is_forced = buffers_out != 0;
    if (is_forced) cuptiActivityFlushAll(CUPTI_ACTIVITY_FLAG_FLUSH_FORCED), use_taken();
    calls.send();
    if (is_taken) report_taken();
    return is_forced;
}

// Ends the recording while the program continues; whether CUPTI may leave the process.
//
// As long as CUPTI is there, launches are slower, as much as 12%. With cuptiFinalize they are as they were: in 1500
// trials in programs whose one to four threads launched, copied, allocated and waited meanwhile, nothing happened to
// them. But each program that launched graphs failed with "unspecified launch failure", also where cuptiFinalize was
// called at the exit of a call, as its documentation says, and where no graph was in progress (CUPTI 13.0, driver 580).
// And after records were forced out, some crashed. Otherwise CUPTI stays, and the subscription until another client asks
// for it. It loses its callbacks as soon as no thread is in a call.
bool let_go(bool is_taken, std::chrono::milliseconds longest) {
    bool is_forced = send_last(is_taken, longest), is_sampled = settings().get("TRACEPIPE_GPU_STALLS");
    give_up_buffers();
    channel.close(buffers_out != 0);
    subscription.clear(Subscription::GRAPHS);
    return subscription.is_open() && !is_taken && !is_forced && !is_sampled && !has_graphs;
}

// Another client is about to subscribe, or to register its buffers, and has the process's CUPTI from now on. CUPTI
// would first fill the library's buffers and return them to that client, which does not know them: PyTorch's
// profile had no kernels in some runs.
void leave_to_other();

CUptiResult other_registers(CUpti_BuffersCallbackRequestFunc gives, CUpti_BuffersCallbackCompleteFunc takes) {
    leave_to_other();
    return cuptiActivityRegisterCallbacks(gives, takes);
}
CUptiResult other_subscribes(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc called, void *given) {
    leave_to_other();
    return cuptiSubscribe(subscriber, called, given);
}
CUptiResult (*subscribe_v2)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *, void *);  // from CUPTI 13 on
CUptiResult other_subscribes_v2(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc called, void *given, void *more) {
    leave_to_other();
    return subscribe_v2(subscriber, called, given, more);
}

std::vector<EntryJump> &jumps = *new std::vector<EntryJump>;

// Sees another client's first call from now on.
bool watch_for_others() {
    if (jumps.empty()) {
        auto add = [](auto *function, auto *ours) {
            jumps.emplace_back(reinterpret_cast<void *>(function), reinterpret_cast<void *>(ours));
        };
        add(&cuptiActivityRegisterCallbacks, &other_registers);
        add(&cuptiSubscribe, &other_subscribes);
        subscribe_v2 = reinterpret_cast<decltype(subscribe_v2)>(dlsym(RTLD_NEXT, "cuptiSubscribe_v2"));
        if (subscribe_v2) add(subscribe_v2, &other_subscribes_v2);
    }
    bool are_set = true;
    for (EntryJump &jump : jumps) are_set &= jump.set();
    return are_set;
}

void leave_to_other() {
    std::lock_guard lock(end_mutex);
    if (this_process() == owner) {
        // This is a thread of the program, and must not wait for long.
        if (!is_ended) let_go(true, std::chrono::milliseconds(0));
        for (int tries = 0; tries < 10 && !calls.close(); tries++) std::this_thread::sleep_for(std::chrono::microseconds(100));
        subscription.end();
    }
    for (EntryJump &jump : jumps) jump.remove();
}

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
    is_own_thread() = true;
    std::unique_lock lock(end_mutex);
    for (;;) {
        bool may_leave = false;
        unsigned idle = 0;  // turns without a call and without a buffer
        for (unsigned wait_ms = FIRST_FLUSH_MS; !wait_for_flush(lock, wait_ms);) {
            follow_window();
            if (channel.is_over()) {
                may_leave = let_go(false, LAST_OF_RECORDING);
                break;
            }
            if (buffers_out) put_gpus();
            idle = calls.send() || buffers_out ? 0 : idle + 1;
            idle % IDLE_TURNS == 0 ? flush() : use_taken();
        }
        // Not of a process that exits, where CUPTI's own data may be gone.
        if (may_leave && !is_exiting && cuptiFinalize() == CUPTI_SUCCESS) subscription.forget();
        while (is_ended && !is_exiting && !calls.close()) begun_again.wait_for(lock, std::chrono::milliseconds(FLUSH_MS));
        begun_again.wait(lock, [] { return !is_ended; });
    }
}

void end() {
    if (getpid() != owner) return;  // a fork: neither CUPTI nor its locks can be used
    is_exiting = true;
    std::lock_guard lock(end_mutex);
    if (is_ended) return;
    if (buffers_out) put_gpus();
    wait_for_buffers(LAST_OF_PROCESS);
    send_last(false, std::chrono::milliseconds(0));
    give_up_buffers();
}

uint64_t realtime_ns() {
    timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return uint64_t(now.tv_sec) * 1000000000u + uint64_t(now.tv_nsec);
}

void put_hello() {
    bool is_monotonic = cuptiActivityRegisterTimestampCallback(monotonic_ns) == CUPTI_SUCCESS;
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
    calls.record(false);
    calls.close();
    channel.close();
    return CUPTI_FAILS;
}

// Requests a buffer for each thread, as CUPTI does by itself from 13 on. The setting must not change after records were
// made, as another profiler may have done in a running process.
void part_buffers() {
    uint8_t is_by_thread = 1;
    size_t bytes = sizeof is_by_thread;
    if (CUPTI_API_VERSION < 130000)
        cuptiActivitySetAttribute(CUPTI_ACTIVITY_ATTR_PER_THREAD_ACTIVITY_BUFFER, &bytes, &is_by_thread);
}

// Called with end_mutex held.
Attached begin(bool is_late) {
    // What came after an earlier recording: in the next channel, other processes may have these buffers.
    if (owner == getpid()) use_taken(false), give_up_spare();
    if (!channel.open()) return NOT_CONNECTED;
    bool is_first = owner != getpid();
    is_begun = true, is_ended = are_gpus_put = false;
    owner = getpid();
    translator.begin_anew();
    if (!subscription.open(called_back)) {
        channel.note("Another profiler has CUPTI's callbacks: windows begin some ms late.");
        channel.drop(KIND_CALL_NAME, 1);
    }
    if (is_late) has_graphs = true;
    if (!has_graphs)
        subscription.set(Subscription::GRAPHS, CUPTI_CB_DOMAIN_RESOURCE, CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING, true);
    bool has_stacks = stacks.open();
    calls.begin_anew();
    if (has_stacks) nodes.open();
    put_hello();
    if (is_late)
        put_gpus();
    else
        part_buffers();
    if (cuptiActivityRegisterCallbacks(give_buffer, take_buffer) != CUPTI_SUCCESS) {
        channel.note("CUPTI does not take buffers: another profiler uses it in the traced process.");
        return give_up();
    }
    {
        std::lock_guard turning(turn_mutex);
        windows.open();
        followed_turns = windows.turns();
        // In any case, as CUPTI reports then what it does not record.
        if (!record()) return give_up();
        if (!windows.is_open()) {
            record_nothing();
            calls.close(true);
        }
        channel.followed(followed_turns);
    }
    if (windows.are_asked()) window_calls.open();
    if (!watch_for_others())
        channel.note("Code cannot be changed here: another profiler in the traced process would have no records.");
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
    for (EntryJump &jump : jumps) jump.remove();  // the next calls are the library's
    if (!subscription.open(called_back)) return OTHER_PROFILER;
    settings().take(text);
    Attached result = begin(true);
    if (result != RECORDED) watch_for_others();
    return result;
}
