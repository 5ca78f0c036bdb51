// SPDX-License-Identifier: MIT
// Records a program's NVTX annotations into the channel as the program makes them.
//
//     NVTX in the program ──InitializeInjectionNvtx2──▶ functions in its tables ──▶ a record a call ──▶ channel
//     (NVTX_INJECTION64_PATH)     InitializeInjectionNvtxExtension
//
// Each library of the program that was built with NVTX has its own tables, and has them filled at its first
// NVTX call. A range allocates nothing, takes no lock and makes no system call, except for a new Python
// stack, and in recordings with windows, where open ranges are kept. After the recording's end a call returns
// at once.
#include <atomic>
#include <cstring>
#include <dlfcn.h>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>

#include "annotation_records.h"
#include "nvtx.h"
#include "open_ranges.h"
#include "own_thread.h"
#include "python_frames.h"
#include "transport.h"
#include "window_ranges.h"
#include "windows.h"

namespace {

using namespace tracepipe;

constexpr size_t TEXT_BYTES = 4096;  // more than programs name their ranges with

// Outlives the program's destructors, which may call NVTX.
Channel &channel = *new Channel;
Windows &windows = *new Windows(channel);
WindowRanges &window_ranges = *new WindowRanges(channel, windows);
std::atomic<bool> is_recording{false};
std::atomic<uint64_t> next_range{1};
thread_local OpenRanges open_ranges;

uint64_t handle(const void *given) { return uint64_t(reinterpret_cast<uintptr_t>(given)); }

std::string_view text_of(const char *text) { return text ? std::string_view(text, strnlen(text, TEXT_BYTES)) : ""; }

// A wide text as UTF-8, up to TEXT_BYTES.
std::string text_of(const wchar_t *text) {
    std::string out;
    for (; text && *text && out.size() + 4 <= TEXT_BYTES; text++) append_utf8(out, uint32_t(*text));
    return out;
}

void label(LabelKind what, uint64_t domain, uint64_t number, std::string_view text, bool *is_sent = nullptr) {
    Label label{what, 0, domain, number};
    bool sent = is_recording && channel.put(KIND_LABEL, &label, sizeof label, text, 0);
    if (is_sent) *is_sent = sent;
}

// The Python stacks of annotations. Each stack is sent once, and identified by its hash.
class Stacks {
  public:
    void open() {
        if (!is_open_.exchange(true)) is_open_ = frames_.open();
    }
    // 0 if there is no Python, or if there are too many stacks.
    uint64_t here() {
        PythonFrame frames[PythonFrames::FRAMES_MAX];
        unsigned count = frames_.read(frames);
        if (!count) return 0;
        thread_local uint64_t sent[CACHED];
        uint64_t hash = frames_.hash(frames, count), &last = sent[hash % CACHED];
        if (last != hash && send(hash, frames, count)) last = hash;
        return last == hash ? hash : 0;
    }

  private:
    static constexpr size_t CACHED = 256, STACKS_MAX = 1 << 16;

    bool send(uint64_t hash, const PythonFrame *frames, unsigned count) {
        std::lock_guard lock(mutex_);
        if (sent_.count(hash)) return true;
        if (sent_.size() >= STACKS_MAX) return false;
        std::string text;
        for (unsigned at = 0; at < count; at++) {
            std::string line = frames_.name_of(frames[at]) + "\n";
            if (text.size() + line.size() > TEXT_BYTES) break;
            text += line;
        }
        bool is_sent = false;
        label(LABEL_STACK, 0, hash, text, &is_sent);
        if (is_sent) sent_.insert(hash);
        return is_sent;
    }

    PythonFrames frames_;
    std::atomic<bool> is_open_{false};
    std::mutex mutex_;
    std::unordered_set<uint64_t> sent_;
};
Stacks &stacks = *new Stacks;

void put_begin(uint16_t kind, Begun begun, std::string_view text) {
    begun.stack = stacks.here();
    channel.put(kind, &begun, sizeof begun, text);
}

// Reports the open ranges, and lets the library of a GPU engine follow the window's turn, before the program
// continues.
void follow_window() {
    window_ranges.report_all();
    const char *path = secure_getenv("CUDA_INJECTION64_PATH");
    void *library = path && *path ? dlopen(path, RTLD_NOW | RTLD_NOLOAD) : nullptr;
    auto follow = library ? reinterpret_cast<void (*)()>(dlsym(library, "tracepipe_follow_window")) : nullptr;
    if (follow) follow();
}

// Registered texts: the same text gets the same handle, as a program may register it at every use. Handles
// point to memory that stays at its address.
class Texts {
  public:
    const void *handle_of(LabelKind what, const void *domain, std::string_view text) {
        std::lock_guard lock(mutex_);
        auto [place, is_new] = known_.try_emplace(std::to_string(handle(domain)) + ' ' + std::string(text), 0);
        if (is_new) label(what, handle(domain), handle(&place->second), text);
        if (is_new) texts_[handle(&place->second)] = text;
        return &place->second;
    }
    std::string text_of(uint64_t handle) {
        std::lock_guard lock(mutex_);
        return texts_[handle];
    }

  private:
    std::mutex mutex_;
    std::unordered_map<std::string, uint64_t> known_;  // the addresses of its values are the handles
    std::unordered_map<uint64_t, std::string> texts_;
};
Texts &domains = *new Texts, &texts = *new Texts;

void begin(uint16_t kind, const Begun &begun, std::string_view text) {
    if (!windows.are_asked()) return put_begin(kind, begun, text);
    if (kind == KIND_MARK) return windows.is_open() ? put_begin(kind, begun, text) : void();
    std::string name = begun.registered ? texts.text_of(begun.registered) : std::string(text);
    if (windows.begins.is("nvtx") && name == windows.begins.name && windows.begin()) follow_window();
    window_ranges.begin(kind, begun, text, name, put_begin);
}

void end_range(uint16_t kind, const Ended &ended) {
    if (!windows.are_asked()) return void(channel.put(kind, &ended, sizeof ended));
    std::string name = window_ranges.end(kind, ended);
    if (windows.ends.is("nvtx") && name == windows.ends.name && windows.is_last_hit() && windows.end()) follow_window();
}

// `number` was assigned before, so that it is right even if records are lost.
void begin(uint16_t kind, uint64_t domain, uint64_t number, const nvtx::Attributes *given) {
    Begun begun{domain, 0, number, 0, 0, 0, 0, 0, 0};
    if (!given || given->size < sizeof *given) return begin(kind, begun, "");
    begun.payload = given->payload, begun.payload_type = uint32_t(given->payload_type);
    begun.flags = given->color_type == nvtx::COLOR_ARGB ? HAS_COLOR : 0, begun.color = given->color;
    begun.category = given->category;
    switch (given->message_type) {
    case nvtx::MESSAGE_ASCII:
        return begin(kind, begun, text_of(given->message.ascii));
    case nvtx::MESSAGE_UNICODE:
        return begin(kind, begun, text_of(given->message.unicode));
    case nvtx::MESSAGE_REGISTERED:
        begun.registered = handle(given->message.registered);
    }
    begin(kind, begun, "");
}

template <typename Letter> void begin(uint16_t kind, uint64_t domain, uint64_t number, const Letter *text) {
    begin(kind, Begun{domain, 0, number, 0, 0, 0, 0, 0, 0}, text_of(text));
}

template <typename Given> void mark(uint64_t domain, const Given *given) {
    if (is_recording) begin(KIND_MARK, domain, 0, given);
}

template <typename Given> int push(uint64_t domain, const Given *given) {
    uint64_t depth = open_ranges.push(domain);
    if (is_recording) begin(KIND_PUSH, domain, depth, given);
    return int(depth);
}

int pop(uint64_t domain) {
    uint64_t depth;
    if (!open_ranges.pop(domain, depth)) return -1;
    Ended ended{domain, depth};
    if (is_recording) end_range(KIND_POP, ended);
    return int(depth);
}

template <typename Given> uint64_t start(uint64_t domain, const Given *given) {
    uint64_t number = next_range.fetch_add(1, std::memory_order_relaxed);
    if (is_recording) begin(KIND_START, domain, number, given);
    return number;
}

void end(uint64_t domain, uint64_t number) {
    Ended ended{domain, number};
    if (is_recording) end_range(KIND_END, ended);
}

template <typename Letter> const void *domain_of(const Letter *name) {
    return domains.handle_of(LABEL_DOMAIN, nullptr, text_of(name));
}
template <typename Letter> const void *registered_of(const void *domain, const Letter *text) {
    return texts.handle_of(LABEL_TEXT, domain, text_of(text));
}

using nvtx::Attributes;
using nvtx::Domain;

template <typename Work> void fill(nvtx::Function **table, unsigned size, unsigned at, Work *function) {
    if (at < size && table[at]) *table[at] = reinterpret_cast<nvtx::Function>(function);
}

void fill_core(nvtx::Function **table, unsigned size) {
    auto set = [&](unsigned at, auto *function) { fill(table, size, at, function); };
    set(nvtx::MARK_EX, +[](const Attributes *given) { mark(0, given); });
    set(nvtx::MARK_A, +[](const char *text) { mark(0, text); });
    set(nvtx::MARK_W, +[](const wchar_t *text) { mark(0, text); });
    set(nvtx::RANGE_START_EX, +[](const Attributes *given) { return start(0, given); });
    set(nvtx::RANGE_START_A, +[](const char *text) { return start(0, text); });
    set(nvtx::RANGE_START_W, +[](const wchar_t *text) { return start(0, text); });
    set(nvtx::RANGE_END, +[](uint64_t number) { end(0, number); });
    set(nvtx::RANGE_PUSH_EX, +[](const Attributes *given) { return push(0, given); });
    set(nvtx::RANGE_PUSH_A, +[](const char *text) { return push(0, text); });
    set(nvtx::RANGE_PUSH_W, +[](const wchar_t *text) { return push(0, text); });
    set(nvtx::RANGE_POP, +[] { return pop(0); });
    set(nvtx::NAME_CATEGORY_A, +[](uint32_t category, const char *name) {
        label(LABEL_CATEGORY, 0, category, text_of(name));
    });
    set(nvtx::NAME_CATEGORY_W, +[](uint32_t category, const wchar_t *name) {
        label(LABEL_CATEGORY, 0, category, text_of(name));
    });
    set(nvtx::NAME_OS_THREAD_A, +[](uint32_t thread, const char *name) {
        label(LABEL_THREAD, 0, thread, text_of(name));
    });
    set(nvtx::NAME_OS_THREAD_W, +[](uint32_t thread, const wchar_t *name) {
        label(LABEL_THREAD, 0, thread, text_of(name));
    });
}

void fill_core2(nvtx::Function **table, unsigned size) {
    auto set = [&](unsigned at, auto *function) { fill(table, size, at, function); };
    set(nvtx::DOMAIN_MARK_EX, +[](Domain domain, const Attributes *given) { mark(handle(domain), given); });
    set(nvtx::DOMAIN_RANGE_START_EX, +[](Domain domain, const Attributes *given) {
        return start(handle(domain), given);
    });
    set(nvtx::DOMAIN_RANGE_END, +[](Domain domain, uint64_t number) { end(handle(domain), number); });
    set(nvtx::DOMAIN_RANGE_PUSH_EX, +[](Domain domain, const Attributes *given) {
        return push(handle(domain), given);
    });
    set(nvtx::DOMAIN_RANGE_POP, +[](Domain domain) { return pop(handle(domain)); });
    set(nvtx::DOMAIN_NAME_CATEGORY_A, +[](Domain domain, uint32_t category, const char *name) {
        label(LABEL_CATEGORY, handle(domain), category, text_of(name));
    });
    set(nvtx::DOMAIN_NAME_CATEGORY_W, +[](Domain domain, uint32_t category, const wchar_t *name) {
        label(LABEL_CATEGORY, handle(domain), category, text_of(name));
    });
    set(nvtx::DOMAIN_REGISTER_STRING_A, +[](Domain domain, const char *text) { return registered_of(domain, text); });
    set(nvtx::DOMAIN_REGISTER_STRING_W, +[](Domain domain, const wchar_t *text) { return registered_of(domain, text); });
    set(nvtx::DOMAIN_CREATE_A, +[](const char *name) { return domain_of(name); });
    set(nvtx::DOMAIN_CREATE_W, +[](const wchar_t *name) { return domain_of(name); });
}

// Payloads are not recorded, so what such a call begins by a payload alone has no name.
void fill_payloads(const nvtx::ExtensionSegment &segment) {
    auto set = [&](size_t at, auto *function) {
        if (at < segment.slot_count) segment.slots[at] = reinterpret_cast<intptr_t>(function);
    };
    using Payload = const nvtx::PayloadData *;
    constexpr const Attributes *UNNAMED = nullptr;
    set(nvtx::MARK_PAYLOAD, +[](Domain domain, Payload, size_t) { mark(handle(domain), UNNAMED); });
    set(nvtx::RANGE_PUSH_PAYLOAD, +[](Domain domain, Payload, size_t) { return push(handle(domain), UNNAMED); });
    set(nvtx::RANGE_POP_PAYLOAD, +[](Domain domain, Payload, size_t) { return pop(handle(domain)); });
    set(nvtx::RANGE_START_PAYLOAD, +[](Domain domain, Payload, size_t) { return start(handle(domain), UNNAMED); });
    set(nvtx::RANGE_END_PAYLOAD, +[](Domain domain, uint64_t number, Payload, size_t) { end(handle(domain), number); });
}

void wait_for_end(void *) {
    constexpr long LOOK_MS = 25;
    if (!windows.are_asked()) channel.wait_until_over();
    for (uint32_t seen = 0; windows.are_asked();) {
        windows.wait(seen, LOOK_MS);
        seen = windows.turns();
        window_ranges.report_all();
        if (channel.is_over()) break;
    }
    is_recording = false;
    channel.close();
}

pid_t forked_from;

// A child inherits its parent's handles, which the capture process knows only for the parent. So the fork is
// recorded.
void follow_forks() {
    pthread_atfork([] { forked_from = getpid(); }, nullptr, [] {
        window_ranges.forget_other_threads();
        label(LABEL_FORK, 0, uint64_t(forked_from), "");
    });
}

// Whether there is a recording, decided at the first call in this process.
bool is_begun() {
    static const bool begun = [] {
        if (!channel.open()) return false;
        windows.open();
        is_recording = true;
        follow_forks();
        start_own_thread(wait_for_end, nullptr);
        return true;
    }();
    return begun;
}

}  // namespace

// Returns 0 if there is no recording; then NVTX behaves as without a tool.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtx2(nvtx::GetExportTable get_export_table) {
    auto *callbacks = static_cast<const nvtx::Callbacks *>(get_export_table(nvtx::CALLBACKS));
    if (!callbacks || callbacks->struct_size < sizeof *callbacks || !is_begun()) return 0;
    stacks.open();
    nvtx::Function **table = nullptr;
    unsigned size = 0;
    if (callbacks->get_module_function_table(nvtx::CORE, &table, &size)) fill_core(table, size);
    if (callbacks->get_module_function_table(nvtx::CORE2, &table, &size)) fill_core2(table, size);
    return 1;
}

// Called once for each extension of each library. Functions that are not filled in do nothing.
extern "C" __attribute__((visibility("default"))) int InitializeInjectionNvtxExtension(nvtx::Extension *extension) {
    if (extension->struct_size < sizeof *extension || !is_begun()) return 0;
    if (extension->module == nvtx::PAYLOADS && extension->segment_count) fill_payloads(extension->segments[0]);
    return 1;
}
