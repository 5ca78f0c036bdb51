// SPDX-License-Identifier: MIT
// The CUDA calls of the program, with their Python stacks, from CUPTI's callbacks.
//
//     calling thread ──entry──▶ open call: begin, stack ──exit──▶ the thread's buffer ──every FLUSH_MS──▶ channel
//
// CUPTI can make records of calls itself, but not only of chosen functions in a process that runs already. And with its
// records of events and waits, each launch takes 2 µs longer, while the arguments of a call cost nothing.
#pragma once
#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <cupti.h>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "call_choice.h"
#include "call_flags.h"
#include "gate.h"
#include "kept_layouts.h"
#include "kernel_records.h"
#include "own_thread.h"
#include "python_stacks.h"
#include "subscription.h"
#include "transport.h"

namespace tracepipe {

class ApiCalls {
  public:
    ApiCalls(Channel &channel, Subscription &subscription, PythonStacks &stacks)
        : channel_(channel), subscription_(subscription), stacks_(stacks) {}

    // Sends what a new capture does not have from an earlier one.
    void begin_anew() {
        CallChoice choice;
        choice.read_settings();
        for (auto domain : {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API})
            for (uint32_t id = 1; id < functions(domain); id++) {
                const char *name = nullptr;
                bool is_known = cuptiGetCallbackName(domain, id, &name) == CUPTI_SUCCESS && name;
                Function &function = functions_[domain][id] = {};
                if (!is_known || !choice.takes(name)) continue;
                uint32_t head[] = {uint32_t(domain), id};
                channel_.put(KIND_CALL_NAME, head, sizeof head, name, 0);
                function.flags = call_flags(domain == CUPTI_CB_DOMAIN_RUNTIME_API, name);
                function.given = given_to(name);
                function.is_replay = strstr(name, "GraphLaunch") != nullptr;
                function.is_of_thread = strstr(name, "_ptsz") != nullptr;
            }
    }
    // The chosen functions have callbacks from now on.
    void open() {
        if (!is_open_) session_++;
        is_open_ = true;
        for (auto domain : {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API})
            for (uint32_t id = 1; id < functions(domain); id++)
                if (functions_[domain][id].flags) subscription_.set(Subscription::CALLS, domain, id, true);
    }
    // Takes the callbacks away. Whether none is left: not while a thread is in a call. A function whose records of calls
    // were disabled meanwhile left CUPTI with an entry without an exit, and all later records of that thread, also those
    // of another client, had the number of that call. Callbacks that were disabled at the end of each window left one of
    // thirty windows with calls and no kernel of theirs (CUPTI 13.0). So they stay between windows.
    // Launches of graphs keep theirs before the first window: it must see those that are in progress when it begins.
    bool close(bool keeps_replays = false) {
        for (auto domain : {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_CB_DOMAIN_RUNTIME_API})
            for (uint32_t id = 1; id < functions(domain); id++) {
                if (!subscription_.has(Subscription::CALLS, domain, id)) continue;
                if (keeps_replays && functions_[domain][id].is_replay) continue;
                if (is_any_inside()) return false;
                subscription_.set(Subscription::CALLS, domain, id, false);
            }
        is_open_ = keeps_replays;
        return true;
    }
    // Starts or stops recording; calls that are open then are not recorded. One thread at a time may call it.
    void record(bool is_recorded) {
        if (is_recorded != is_on(turn_)) turn_++;
    }
    // Does `work` while no thread launches a graph, unless one stays in that call for long. A program crashed in CUPTI
    // when its kinds of records were enabled and disabled during launches of graphs: in one of seven runs of 150 times,
    // and in none of six whose program kept them apart (CUPTI 13.0).
    template <typename Work> void between_replays(Work work) {
        bool is_closed = replays_.close(monotonic_ns() + REPLAY_NS);
        work();
        if (is_closed) replays_.open();
    }
    // Takes a callback; whether a call that waited for the GPU has returned.
    //
    // Between two calls a program of Python uses the caches for itself. So the memory that is touched here decides:
    // 2.7 µs a call there, and 0.8 µs in a loop of launches.
    bool take(CUpti_CallbackDomain domain, uint32_t id, const CUpti_CallbackData &data) {
        Thread &thread = here();
        Open &open = thread.open;
        uint32_t session = session_.load(std::memory_order_relaxed);
        bool is_inside = thread.inside.load(std::memory_order_relaxed) == session;
        if (data.callbackSite == CUPTI_API_ENTER) {
            // Inside: a call of the driver, in one of the runtime.
            if (!is_inside && !is_own_thread()) enter(thread, session, domain, id, data);
            return false;
        }
        bool is_same = open.id == id && open.domain == domain && open.correlation == data.correlationId;
        return is_inside && is_same && leave(thread, data);
    }
    // Sends all calls that have returned, and gives up the buffers of threads that have ended. Whether there were any.
    bool send() {
        bool are_any = false;
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto thread = threads_.begin(); thread != threads_.end();) {
            bool is_ended = tgkill(this_process(), pid_t((*thread)->tid), 0) != 0;
            are_any |= send(**thread);
            if (is_ended) give_up(**thread);
            thread = is_ended ? threads_.erase(thread) : std::next(thread);
        }
        return are_any;
    }
    // At the end of the recording or of the process: other processes can have the buffers.
    void give_up_buffers() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto &thread : threads_) send(*thread), give_up(*thread);
    }

  private:
    struct Thread;

    void enter(Thread &thread, uint32_t session, CUpti_CallbackDomain domain, uint32_t id, const CUpti_CallbackData &data) {
        const Function &function = functions_[domain][id];
        uint32_t turn = turn_.load(std::memory_order_relaxed);
        thread.inside = session;
        if (__builtin_expect(function.is_replay, false)) replays_.enter(replay(thread));
        thread.open = {turn, domain, id, data.correlationId, 0, 0};
        if (!is_on(turn)) return;
        uint64_t now_ns = monotonic_ns();
        if (function.flags & CALL_HAS_STACK && stacks_.is_open())
            thread.open.stack = stacks_.here(channel_, now_ns), now_ns = monotonic_ns();
        thread.open.start_ns = now_ns;
    }
    bool leave(Thread &thread, const CUpti_CallbackData &data) {
        const Open &open = thread.open;
        const Function &function = functions_[open.domain][open.id];
        thread.inside.store(0, std::memory_order_release);
        if (__builtin_expect(function.is_replay, false)) replays_.leave(replay(thread));
        if (!is_on(open.turn) || open.turn != turn_.load(std::memory_order_relaxed)) return false;
        uint32_t result = data.functionReturnValue ? *static_cast<const uint32_t *>(data.functionReturnValue) : 0;
        Call call{open.start_ns, monotonic_ns(), open.stack, open.domain, open.id, thread.tid, open.correlation,
                  result, ~0u, ~0u, ~0u};
        if (function.given && !result) put_given(function, data, call);
        put(thread, call);
        return function.flags & CALL_WAITS;
    }

    // Which handles a function is given first.
    enum Given : uint8_t { NOTHING, STREAM, EVENT, EVENT_AND_STREAM, STREAM_AND_EVENT };
    struct Function {
        uint16_t flags = 0;  // 0: it is not recorded
        Given given = NOTHING;
        bool is_of_thread = false;  // 0 is the stream of the thread
        bool is_replay = false;     // it launches a graph
    };
    struct Open {
        uint32_t turn, domain, id, correlation;
        uint64_t stack, start_ns;
    };
    // Held by a thread while it writes a call, and by the library's thread while it sends them.
    class Lock {
      public:
        void lock() {
            while (is_held_.exchange(true, std::memory_order_acquire)) Gate::pause();
        }
        void unlock() { is_held_.store(false, std::memory_order_release); }

      private:
        std::atomic<bool> is_held_{false};
    };
    struct alignas(64) Thread {
        std::atomic<uint32_t> inside{0};  // the session in which it entered the call that it is in
        const uint32_t tid = thread_id();
        Open open{};                    // the thread's own
        Gate::Place *replay = nullptr;  // the same
        alignas(64) Lock lock;          // for what is below
        uint8_t *buffer = nullptr;
        size_t used = 0, sent = 0;
        KeptBuffer *kept = nullptr;
        size_t most = 0;  // of the buffer was used at once
    };
    static constexpr uint64_t REPLAY_NS = 250'000'000;
    static constexpr size_t SENT_AT_ONCE = (1 << 16) / sizeof(Call);

    static constexpr uint32_t functions(CUpti_CallbackDomain domain) {
        return domain == CUPTI_CB_DOMAIN_DRIVER_API ? uint32_t(CUPTI_DRIVER_TRACE_CBID_SIZE)
                                                     : uint32_t(CUPTI_RUNTIME_TRACE_CBID_SIZE);
    }
    static bool is_on(uint32_t turn) { return turn & 1; }
    static int tgkill(pid_t process, pid_t thread, int signal) { return int(syscall(SYS_tgkill, process, thread, signal)); }
    static Given given_to(const char *function) {
        const char *name = function + (strncmp(function, "cuda", 4) == 0 ? 4 : 2);
        auto is = [&](const char *begin) { return strncmp(name, begin, strlen(begin)) == 0; };
        return is("StreamSynchronize")  ? STREAM
               : is("EventSynchronize") ? EVENT
               : is("EventRecord")      ? EVENT_AND_STREAM
               : is("StreamWaitEvent")  ? STREAM_AND_EVENT
                                        : NOTHING;
    }
    void put_given(const Function &function, const CUpti_CallbackData &data, Call &call) {
        auto *handles = static_cast<const void *const *>(data.functionParams);
        if (!handles) return;
        Given given = function.given;
        bool has_stream = given != EVENT, is_stream_first = given == STREAM || given == STREAM_AND_EVENT;
        bool has_event = given != STREAM;
        auto stream = static_cast<CUstream>(const_cast<void *>(handles[is_stream_first ? 0 : 1]));
        call.context = data.contextUid;
        uint32_t number;
        if (has_stream && cuptiGetStreamIdEx(data.context, stream, function.is_of_thread, &number) == CUPTI_SUCCESS)
            call.stream = number;
        if (has_event) call.event = number_of(handles[is_stream_first ? 1 : 0]);
    }
    // A number for an event. A later one may have the handle, and so the number, of one that was destroyed.
    uint32_t number_of(const void *event) {
        std::lock_guard<std::mutex> lock(events_mutex_);
        return events_.try_emplace(event, uint32_t(events_.size() + 1)).first->second;
    }

    bool is_any_inside() {
        std::lock_guard<std::mutex> lock(mutex_);
        for (auto &thread : threads_)
            if (thread->inside == session_) return true;
        return false;
    }
    Thread &here() {
        // After a fork, the thread's buffer is the parent's.
        thread_local Thread *thread = nullptr;
        if (__builtin_expect(!thread, false)) thread = add_thread();
        return *thread;
    }
    __attribute__((noinline)) Thread *add_thread() {
        auto *thread = new Thread;
        std::lock_guard<std::mutex> lock(mutex_);
        threads_.emplace_back(thread);
        return thread;
    }
    Gate::Place &replay(Thread &thread) {
        if (!thread.replay) replays_.add(*(thread.replay = new Gate::Place));
        return *thread.replay;
    }
    void put(Thread &thread, const Call &call) {
        std::lock_guard<Lock> lock(thread.lock);
        bool has_room = thread.buffer && thread.used + sizeof(KeptCall) <= KEPT_BYTES;
        if (__builtin_expect(!has_room, false) && !make_room(thread)) return channel_.drop(KIND_CALL, 1);
        auto *to = reinterpret_cast<KeptCall *>(thread.buffer + thread.used);
        to->call = call;
        thread.used += sizeof *to;
        if (thread.used + sizeof *to <= KEPT_BYTES) to[1].kind = 0;
        __atomic_store_n(&to->kind, KEPT_CALL, __ATOMIC_RELEASE);
    }
    __attribute__((noinline)) bool make_room(Thread &thread) {
        if (thread.buffer) return send_all(thread), true;
        thread.buffer = channel_.take_buffer();
        if (!thread.buffer) thread.buffer = static_cast<uint8_t *>(calloc(1, KEPT_BYTES));
        if ((thread.kept = channel_.kept(thread.buffer))) thread.kept->sent = 0, thread.kept->is_out = 1;
        return thread.buffer != nullptr;
    }
    bool send(Thread &thread) {
        std::lock_guard<Lock> lock(thread.lock);
        bool are_any = thread.used != 0;
        send_all(thread);
        return are_any;
    }
    void send_all(Thread &thread) {
        std::vector<Call> calls;
        while (thread.sent < thread.used) {
            auto *from = reinterpret_cast<const KeptCall *>(thread.buffer + thread.sent);
            size_t count = std::min((thread.used - thread.sent) / sizeof *from, SENT_AT_ONCE);
            calls.clear();
            for (size_t at = 0; at < count; at++) calls.push_back(from[at].call);
            channel_.put(KIND_CALL, calls.data(), count * sizeof(Call), {}, count);
            thread.sent += count * sizeof *from;
            if (thread.kept) thread.kept->sent = thread.sent;
        }
        if (!thread.used) return;
        // The rest is overwritten by the thread that has it in its caches.
        __atomic_store_n(&reinterpret_cast<KeptCall *>(thread.buffer)->kind, 0, __ATOMIC_RELEASE);
        thread.most = std::max(thread.most, thread.used);
        thread.used = thread.sent = 0;
        if (thread.kept) thread.kept->sent = 0;
    }
    void give_up(Thread &thread) {
        std::lock_guard<Lock> lock(thread.lock);
        if (thread.kept) {
            memset(thread.buffer, 0, thread.most);
            thread.kept->is_out = 0, thread.kept->pid = 0;
        } else {
            free(thread.buffer);
        }
        thread.buffer = nullptr, thread.kept = nullptr, thread.most = 0;
    }

    Channel &channel_;
    Subscription &subscription_;
    PythonStacks &stacks_;
    std::atomic<uint32_t> turn_{0}, session_{0};  // sessions count from 1
    Gate replays_;
    bool is_open_ = false;  // the functions have callbacks
    Function functions_[CUPTI_CB_DOMAIN_RUNTIME_API + 1][std::max<size_t>(CUPTI_DRIVER_TRACE_CBID_SIZE,
                                                                         CUPTI_RUNTIME_TRACE_CBID_SIZE)];
    std::mutex mutex_, events_mutex_;
    std::vector<std::unique_ptr<Thread>> threads_;
    std::unordered_map<const void *, uint32_t> events_;
};

}  // namespace tracepipe
