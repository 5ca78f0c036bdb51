// SPDX-License-Identifier: MIT
// Records only stall reasons in a traced process, with stall_sampler.h, and no kernels or calls.
#include "stall_sampler.h"

namespace {

using namespace tracepipe;

// Used until the process ends, so never destroyed.
Channel &channel = *new Channel;
Windows &windows = *new Windows(channel);
Subscription &subscription = *new Subscription;
StallSampler &sampler = *new StallSampler(channel, windows, subscription);
pid_t owner;

void let_go() {
    sampler.close();
    channel.close();
}
void end() {
    if (getpid() == owner) let_go();
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
    if (owner || !channel.open()) return 1;
    owner = getpid();
    windows.open();
    subscription.open([](CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *given) {
        sampler.take(domain, id, given);
    });
    sampler.open(true);
    auto wait = [](void *) {
        channel.wait_until_over();
        let_go();
    };
    if (!start_own_thread(wait, nullptr)) channel.note("No thread could be started in the traced process.");
    atexit(end);
    at_quick_exit(end);
    return 1;
}
