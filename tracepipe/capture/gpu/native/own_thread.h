// Threads of a library's own in the traced process.
#pragma once
#include <csignal>
#include <pthread.h>

namespace tracepipe {

// Runs `work(argument)` on a thread that nobody waits for. False if the process can have no more threads.
inline bool start_own_thread(void *(*work)(void *), void *argument) {
    // Signals to the process are its own threads' business.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    bool is_started = pthread_create(&thread, nullptr, work, argument) == 0;
    if (is_started) {
        pthread_setname_np(thread, "tracepipe-gpu");
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return is_started;
}

}  // namespace tracepipe
