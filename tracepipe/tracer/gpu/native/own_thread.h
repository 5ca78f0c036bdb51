// SPDX-License-Identifier: MIT
// Threads that a library starts in the traced process.
#pragma once
#include <csignal>
#include <pthread.h>
#include <unistd.h>

namespace tracepipe {

// Whether this thread's driver calls are the library's, which its callbacks ignore.
inline bool &is_own_thread() {
    thread_local bool own = false;
    return own;
}
// Marks the library's calls on a thread of the program.
class OwnCalls {
  public:
    OwnCalls() { is_own_thread() = true; }
    ~OwnCalls() { is_own_thread() = false; }
    OwnCalls(const OwnCalls &) = delete;
    OwnCalls &operator=(const OwnCalls &) = delete;
};

// Runs `work(argument)` on a detached thread. False if the process can have no more threads.
//
// The thread stays until the process ends. If it ended, the driver's destructors of thread data would run,
// and in a process that is exiting what they need may be gone.
inline bool start_own_thread(void (*work)(void *), void *argument) {
    struct Work {
        void (*function)(void *);
        void *argument;
    };
    auto run = [](void *given) -> void * {
        auto *own = static_cast<Work *>(given);
        own->function(own->argument);
        for (;;) pause();
    };
    // The process's own threads handle its signals.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    auto *given = new Work{work, argument};
    bool is_started = pthread_create(&thread, nullptr, run, given) == 0;
    if (is_started) {
        pthread_setname_np(thread, "tracepipe-gpu");
        pthread_detach(thread);
    }
    if (!is_started) delete given;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
}

}  // namespace tracepipe
