// The ways in which a program can end, for the stand-ins, which do `end HOW` of their input, and for ends.cu.
#pragma once
#include <csignal>
#include <cstdlib>
#include <exception>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Winfinite-recursion"
__attribute__((noinline)) inline int overflow_stack(volatile int *above) {
    volatile int here[1024];
    here[0] = *above + 1;
    return overflow_stack(here) + here[0];
}

// `in_child` is what a fork does; its parent ends as by `_exit`.
inline void end_by(const std::string &how, void (*in_child)()) {
    static const std::map<std::string, int> signals{{"SIGKILL", SIGKILL}, {"SIGSEGV", SIGSEGV}, {"SIGTERM", SIGTERM},
                                                    {"SIGINT", SIGINT},   {"SIGHUP", SIGHUP},   {"SIGQUIT", SIGQUIT},
                                                    {"SIGBUS", SIGBUS},   {"SIGFPE", SIGFPE},   {"SIGILL", SIGILL}};
    if (auto found = signals.find(how); found != signals.end()) {
        signal(found->second, SIG_DFL);  // what started the tests may have left it ignored
        kill(getpid(), found->second), pause();
    }
    volatile int zero = 0;
    if (how == "null") *reinterpret_cast<volatile int *>(zero) = 1;
    if (how == "trap") __builtin_trap();
    if (how == "stack") exit(overflow_stack(&zero));
    if (how == "abort") abort();
    if (how == "terminate") std::terminate();
    if (how == "throw") std::thread([] { throw std::runtime_error("nobody catches it"); }).join();
    if (how == "exit") exit(7);
    if (how == "exit_in_thread") std::thread([] { exit(7); }).join();
    if (how == "quick_exit") quick_exit(7);
    if (how == "exec") execl("/bin/sh", "sh", "-c", "exit 7", nullptr);
    if (how == "fork" && fork() == 0) in_child(), _exit(0);
    _exit(7);  // and _Exit
}
