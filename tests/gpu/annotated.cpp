// A program that says of itself what NVTX can say.
//
//     annotated all          one of each
//     annotated payloads     ranges and a mark with extended payloads, as NCCL's
//     annotated many N       N ranges, each with one inside, on each of 4 threads
//     annotated fork         a range open over a fork, and one in the child
//     annotated steps N      N ranges in one of the thread, and all in one of the process
//     annotated for_ms N     a range each millisecond, for so long; then it says how many there were
//     annotated slow_ms N    a range that takes no time and one that takes so long, and waits for the end of its input
//     annotated cost N       ns for a push and its pop: median, 10th and 90th percentile of N / 1000 times 1000
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <nvtx3/nvToolsExt.h>
#include <nvtx3/nvToolsExtPayload.h>
#include <string>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <thread>
#include <unistd.h>
#include <vector>

#include "nvtx.h"

// Our copy of what all versions of NVTX have in common is what its headers say.
using Ours = tracepipe::nvtx::Attributes;
static_assert(sizeof(Ours) == sizeof(nvtxEventAttributes_t));
static_assert(offsetof(Ours, category) == offsetof(nvtxEventAttributes_t, category));
static_assert(offsetof(Ours, color_type) == offsetof(nvtxEventAttributes_t, colorType));
static_assert(offsetof(Ours, color) == offsetof(nvtxEventAttributes_t, color));
static_assert(offsetof(Ours, payload_type) == offsetof(nvtxEventAttributes_t, payloadType));
static_assert(offsetof(Ours, payload) == offsetof(nvtxEventAttributes_t, payload));
static_assert(offsetof(Ours, message_type) == offsetof(nvtxEventAttributes_t, messageType));
static_assert(offsetof(Ours, message) == offsetof(nvtxEventAttributes_t, message));
static_assert(sizeof(tracepipe::nvtx::Callbacks) == sizeof(NvtxExportTableCallbacks));
static_assert(tracepipe::nvtx::CORE == NVTX_CB_MODULE_CORE && tracepipe::nvtx::CORE2 == NVTX_CB_MODULE_CORE2);
static_assert(tracepipe::nvtx::CALLBACKS == NVTX_ETID_CALLBACKS);
static_assert(unsigned(tracepipe::nvtx::RANGE_END) == NVTX_CBID_CORE_RangeEnd);
static_assert(unsigned(tracepipe::nvtx::NAME_OS_THREAD_W) == NVTX_CBID_CORE_NameOsThreadW);
static_assert(unsigned(tracepipe::nvtx::DOMAIN_RANGE_POP) == NVTX_CBID_CORE2_DomainRangePop);
static_assert(unsigned(tracepipe::nvtx::DOMAIN_CREATE_W) == NVTX_CBID_CORE2_DomainCreateW);
static_assert(int(tracepipe::nvtx::MESSAGE_REGISTERED) == NVTX_MESSAGE_TYPE_REGISTERED);
static_assert(int(tracepipe::nvtx::PAYLOAD_FLOAT) == NVTX_PAYLOAD_TYPE_FLOAT);
static_assert(int(tracepipe::nvtx::COLOR_ARGB) == NVTX_COLOR_ARGB);

static_assert(tracepipe::nvtx::PAYLOADS == NVTX_EXT_PAYLOAD_MODULEID);
static_assert(size_t(tracepipe::nvtx::MARK_PAYLOAD) == NVTX3EXT_CBID_nvtxMarkPayload);
static_assert(size_t(tracepipe::nvtx::RANGE_POP_PAYLOAD) == NVTX3EXT_CBID_nvtxRangePopPayload);
static_assert(size_t(tracepipe::nvtx::RANGE_END_PAYLOAD) == NVTX3EXT_CBID_nvtxRangeEndPayload);
static_assert(offsetof(tracepipe::nvtx::Extension, module) == offsetof(nvtxExtModuleInfo_t, moduleId));
static_assert(offsetof(tracepipe::nvtx::Extension, segments) == offsetof(nvtxExtModuleInfo_t, segments));
static_assert(sizeof(tracepipe::nvtx::Extension) <= sizeof(nvtxExtModuleInfo_t));
static_assert(sizeof(tracepipe::nvtx::ExtensionSegment) == sizeof(nvtxExtModuleSegment_t));
static_assert(offsetof(tracepipe::nvtx::ExtensionSegment, slots) == offsetof(nvtxExtModuleSegment_t, functionSlots));

static nvtxEventAttributes_t named(const char *name) {
    nvtxEventAttributes_t given{};
    given.version = NVTX_VERSION, given.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
    given.messageType = NVTX_MESSAGE_TYPE_ASCII, given.message.ascii = name;
    return given;
}

static void payload(const char *name, nvtxPayloadType_t type, decltype(nvtxEventAttributes_t::payload) value) {
    nvtxEventAttributes_t given = named(name);
    given.payloadType = type, given.payload = value;
    nvtxMarkEx(&given);
}

static void all() {
    nvtxNameOsThreadA(uint32_t(syscall(SYS_gettid)), "trainer");
    nvtxNameCategoryA(3, "weights");
    int outer = nvtxRangePushA("outer"), inner = nvtxRangePushW(L"größer 時 𝄞");
    printf("%d %d", outer, inner);
    inner = nvtxRangePop(), outer = nvtxRangePop();
    printf(" %d %d %s\n", inner, outer, nvtxRangePop() < 0 ? "none" : "one");

    nvtxEventAttributes_t given = named("colour");
    given.category = 3, given.colorType = NVTX_COLOR_ARGB, given.color = 0xff76b900;
    nvtxMarkEx(&given);
    decltype(given.payload) value{};
    payload("u64", NVTX_PAYLOAD_TYPE_UNSIGNED_INT64, (value.ullValue = ~0ull, value));
    payload("i64", NVTX_PAYLOAD_TYPE_INT64, (value.llValue = -5, value));
    payload("double", NVTX_PAYLOAD_TYPE_DOUBLE, (value.dValue = 0.1, value));
    payload("infinite", NVTX_PAYLOAD_TYPE_DOUBLE, (value.dValue = INFINITY, value));
    payload("u32", NVTX_PAYLOAD_TYPE_UNSIGNED_INT32, (value.uiValue = 4000000000u, value));
    payload("i32", NVTX_PAYLOAD_TYPE_INT32, (value.iValue = -6, value));
    payload("float", NVTX_PAYLOAD_TYPE_FLOAT, (value.fValue = 0.5f, value));

    nvtxDomainHandle_t data = nvtxDomainCreateA("data");
    if (data != nvtxDomainCreateA("data")) puts("the same domain has two handles");
    nvtxDomainNameCategoryA(data, 3, "batches");
    nvtxStringHandle_t text = nvtxDomainRegisterStringA(data, "registered");
    given = named("");
    given.messageType = NVTX_MESSAGE_TYPE_REGISTERED, given.message.registered = text, given.category = 3;
    // The ranges of two domains need not nest in each other.
    nvtxRangePushA("across");
    nvtxDomainRangePushEx(data, &given);
    nvtxRangePop();
    nvtxDomainRangePop(data);

    nvtxRangeId_t first = nvtxRangeStartA("first");
    given = named("second");
    nvtxRangeId_t second = nvtxDomainRangeStartEx(data, &given), third = nvtxRangeStartA("third");
    nvtxRangeEnd(first);
    nvtxRangeId_t fourth = nvtxRangeStartA("fourth");
    std::thread([&] { nvtxDomainRangeEnd(data, second), nvtxRangeEnd(third); }).join();
    nvtxRangeEnd(fourth);
    nvtxMarkA(nullptr);
    nvtxRangePushA("open at the end");
}

static void payloads() {
    nvtxDomainHandle_t data = nvtxDomainCreateA("data");
    nvtxEventAttributes_t given = named("pushed with a name");
    int32_t ranks = 4;
    nvtxPayloadData_t payload{NVTX_PAYLOAD_ENTRY_TYPE_INT32, sizeof ranks, &ranks};
    nvtxDomainRangePushEx(data, &given);
    int inner = nvtxRangePushPayload(data, &payload, 1);
    nvtxMarkPayload(data, &payload, 1);
    nvtxDomainRangePop(data);
    printf("%d %d\n", inner, nvtxRangePopPayload(data, &payload, 1));
    nvtxRangeEndPayload(data, nvtxRangeStartPayload(data, &payload, 1), &payload, 1);
    nvtxDomainMarkEx(data, &given);
}

static void many(int count) {
    std::vector<std::thread> threads;
    for (int at = 0; at < 4; at++)
        threads.emplace_back([=] {
            for (int number = 0; number < count; number++)
                nvtxRangePushA("outer"), nvtxRangePushA("inner"), nvtxRangePop(), nvtxRangePop();
        });
    for (auto &thread : threads) thread.join();
}

static void forked() {
    nvtxDomainHandle_t data = nvtxDomainCreateA("data");
    nvtxRangePushA("over the fork");
    pid_t child = fork();
    nvtxEventAttributes_t given = named(child ? "in the parent" : "in the child");
    nvtxDomainRangePushEx(data, &given);
    nvtxDomainRangePop(data);
    if (!child) _exit(0);
    waitpid(child, nullptr, 0);
    nvtxRangePop();
}

static void steps(int count) {
    nvtxRangeId_t all = nvtxRangeStartA("all");
    nvtxRangePushA("outer");
    for (int at = 0; at < count; at++) {
        nvtxRangePushA(("step " + std::to_string(at)).c_str());
        nvtxMarkA("in it"), nvtxRangePop(), nvtxMarkA("after it");
    }
    nvtxRangePop();
    nvtxRangeEnd(all);
}

static void for_ms(long ms) {
    unsigned long ranges = 0;
    auto until = std::chrono::steady_clock::now() + std::chrono::milliseconds(ms);
    for (; std::chrono::steady_clock::now() < until; ranges++) {
        nvtxRangePushA("step"), nvtxRangePop();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    printf("%lu\n", ranges);
}

static void slow_ms(long ms) {
    nvtxRangePushA("step 1"), nvtxRangePop();
    nvtxRangePushA("step 2");
    std::this_thread::sleep_for(std::chrono::milliseconds(ms));
    nvtxRangePop();
    while (getchar() != EOF);
}

static void cost(long count) {
    std::vector<double> took_ns;
    for (long done = 0; done < count; done += 1000) {
        auto from = std::chrono::steady_clock::now();
        for (int at = 0; at < 1000; at++) nvtxRangePushA("forward pass of layer 12"), nvtxRangePop();
        std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - from;
        took_ns.push_back(took.count() / 1000);
    }
    std::sort(took_ns.begin(), took_ns.end());
    printf("%.1f %.1f %.1f\n", took_ns[took_ns.size() / 2], took_ns[took_ns.size() / 10], took_ns[took_ns.size() * 9 / 10]);
}

// For a Python program that loads this as a library.
extern "C" __attribute__((visibility("default"))) void say(const char *what) { nvtxMarkA(what); }

int main(int count, char **given) {
    const char *what = count > 1 ? given[1] : "";
    long number = count > 2 ? atol(given[2]) : 0;
    if (!strcmp(what, "all")) all();
    if (!strcmp(what, "payloads")) payloads();
    if (!strcmp(what, "many")) many(int(number));
    if (!strcmp(what, "fork")) forked();
    if (!strcmp(what, "steps")) steps(int(number));
    if (!strcmp(what, "for_ms")) for_ms(number);
    if (!strcmp(what, "slow_ms")) slow_ms(number);
    if (!strcmp(what, "cost")) cost(number);
}
