// SPDX-License-Identifier: MIT
// The subscription to CUPTI's callbacks, of which a process has one: the parts of an engine share it.
#pragma once
#include <atomic>
#include <cupti.h>
#include <mutex>

namespace tracepipe {

class Subscription {
  public:
    // Who wants a callback.
    enum Part : uint8_t { CALLS = 1, TRIGGERS = 2, SAMPLER = 4, NODES = 8, GRAPHS = 16 };
    using Handler = void (*)(CUpti_CallbackDomain, CUpti_CallbackId, const void *given);

    // Whether the process has it now, or had it before.
    bool open(Handler handler) {
        handler_ = handler;
        if (!is_open_) is_open_ = cuptiSubscribe(&subscriber_, &Subscription::called_back, this) == CUPTI_SUCCESS;
        return is_open_;
    }
    bool is_open() const { return is_open_; }
    // Another client may subscribe from now on. Only if no thread can be in a callback: programs died when callbacks of
    // all calls were unsubscribed during launches.
    void end() {
        std::lock_guard<std::mutex> lock(mutex_);
        if (is_open_) cuptiUnsubscribe(subscriber_);
        is_open_ = false;
    }
    // After cuptiFinalize, which ends it too.
    void forget() {
        std::lock_guard<std::mutex> lock(mutex_);
        is_open_ = false;
        for (auto &domain : parts_)
            for (auto &parts : domain) parts = 0;
    }
    void set(Part part, CUpti_CallbackDomain domain, uint32_t id, bool is_wanted) {
        std::lock_guard<std::mutex> lock(mutex_);
        if (!is_open_ || domain >= DOMAINS || id >= IDS) return;
        uint8_t before = parts_[domain][id], after = uint8_t(is_wanted ? before | part : before & ~part);
        parts_[domain][id] = after;
        if (!before != !after) cuptiEnableCallback(after != 0, subscriber_, domain, id);
    }
    // No callbacks for a part any more.
    void clear(Part part) {
        for (uint32_t domain = 0; domain < DOMAINS; domain++)
            for (uint32_t id = 0; id < IDS; id++)
                if (parts_[domain][id] & part) set(part, CUpti_CallbackDomain(domain), id, false);
    }
    bool has(Part part, CUpti_CallbackDomain domain, uint32_t id) const { return parts(domain, id) & part; }
    // Who wants a callback: some of Part.
    uint8_t parts(CUpti_CallbackDomain domain, uint32_t id) const {
        return domain < DOMAINS && id < IDS ? parts_[domain][id].load(std::memory_order_relaxed) : uint8_t(0);
    }

  private:
    static constexpr uint32_t DOMAINS = CUPTI_CB_DOMAIN_RESOURCE + 1, IDS = 2048;
    static_assert(CUPTI_DRIVER_TRACE_CBID_SIZE <= IDS && CUPTI_RUNTIME_TRACE_CBID_SIZE <= IDS);

    static void CUPTIAPI called_back(void *self, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void *given) {
        static_cast<Subscription *>(self)->handler_(domain, id, given);
    }

    std::mutex mutex_;
    std::atomic<Handler> handler_{nullptr};
    CUpti_SubscriberHandle subscriber_ = nullptr;
    bool is_open_ = false;
    std::atomic<uint8_t> parts_[DOMAINS][IDS]{};
};

}  // namespace tracepipe
