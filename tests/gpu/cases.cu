// Programs to be recorded: `cases NAME` runs one and prints what it computed, so that a run with a recorder
// can be held against one without. Each case says on standard error how many warps it launched.
#include <atomic>
#include <chrono>
#include <cooperative_groups.h>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iterator>
#include <thread>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) {                                                                   \
            printf("%s: %s\n", #call, cudaGetErrorString(check_status));                                     \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

static unsigned long long warps_launched;
static dim3 counted(dim3 grid, dim3 block) {
    warps_launched += 1ull * grid.x * grid.y * grid.z * ((1ull * block.x * block.y * block.z + 31) / 32);
    return grid;
}
// grid and block of a launch, counted
#define CONFIG(grid, block) counted(dim3 grid, dim3 block), dim3 block

__global__ void vectorAdd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
__global__ void threeReturns(float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    if (i >= n || lane < 8) return;
    float x = c[i];
    if (lane % 8 == 7) {
        for (int k = 0; k < 400; k++) x = sinf(x) + 1.0f;
        c[i] = x;
        return;
    }
    for (int k = 0; k < 50; k++) x = x * 0.5f + 1.0f;
    c[i] = x;
}
// Every lane of a warp leaves at a time of its own.
__global__ void eachAlone(float *c) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, lane = threadIdx.x & 31;
    float x = c[i];
    for (int k = 0; k < (lane + 1) * 40; k++) {
        x = x * 0.99f + 0.5f;
        if (k == lane * 40 + 20) {
            c[i] = x;
            if (lane & 1) return;
        }
    }
    c[i] = x;
}
__global__ void gridStride(float *c, int n) {
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) c[i] = c[i] * 2 + i % 7;
}
__global__ void threeDimensions(unsigned *seen) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    seen[block * threads + thread] = block * 31 + thread;
}
__global__ void traps(float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] += 1;
    if (i == n / 2) __trap();
}
__global__ void tiny(unsigned *count) {
    if (threadIdx.x == 0) atomicAdd(count, 1);
}
__global__ void empty() {}
__global__ void spin(uint64_t clocks, unsigned *count) {
    uint64_t begin = clock64();
    while (clock64() - begin < clocks) {
    }
    atomicAdd(count, 1);
}
__global__ void __cluster_dims__(2, 1, 1) clustered(unsigned *count) { atomicAdd(count, 1); }

// All blocks wait for each other before they read what the others have added.
__global__ void meets(unsigned *count, unsigned *seen) {
    if (threadIdx.x == 0) atomicAdd(count, 1 + blockIdx.x);
    cooperative_groups::this_grid().sync();
    if (threadIdx.x == 0) seen[blockIdx.x] += *count;
}

static float *floats(int n, float first = 1) {
    float *memory;
    std::vector<float> values(n);
    for (int k = 0; k < n; k++) values[k] = first + k % 13;
    CHECK(cudaMalloc(&memory, n * sizeof(float)));
    CHECK(cudaMemcpy(memory, values.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    CHECK(cudaDeviceSynchronize());  // other streams do not wait for it
    return memory;
}
template <typename Value> static void print_sum(const Value *memory, int n) {
    std::vector<Value> values(n);
    CHECK(cudaMemcpy(values.data(), memory, n * sizeof(Value), cudaMemcpyDeviceToHost));
    uint64_t hash = 1469598103934665603u;
    for (Value value : values) {
        uint32_t bits;
        memcpy(&bits, &value, 4);
        hash = (hash ^ bits) * 1099511628211u;
    }
    printf("%016lx\n", hash);
}
static unsigned *zeros(int n) {
    unsigned *memory;
    CHECK(cudaMalloc(&memory, n * sizeof(unsigned)));
    CHECK(cudaMemset(memory, 0, n * sizeof(unsigned)));
    CHECK(cudaDeviceSynchronize());
    return memory;
}

static void vector_add(int n, int block, int times) {
    float *a = floats(n), *b = floats(n, 2), *c = floats(n, 0);
    for (int k = 0; k < times; k++) vectorAdd<<<CONFIG(((n + block - 1) / block), (block))>>>(a, b, c, n);
    CHECK(cudaGetLastError());
    print_sum(c, n);
}
static cudaStream_t stream() {
    cudaStream_t made;
    CHECK(cudaStreamCreateWithFlags(&made, cudaStreamNonBlocking));
    return made;
}
static void streams() {
    std::vector<std::thread> threads;
    std::vector<unsigned *> counts;
    for (int t = 0; t < 8; t++) counts.push_back(zeros(1));
    for (int t = 0; t < 8; t++)
        threads.emplace_back([&, t] {
            cudaStream_t on = stream();
            for (int k = 0; k < 200; k++) {
                spin<<<16, 96, 0, on>>>(k % 50 == 0 ? 200000 : 500, counts[t]);
                if (k % 20 == 19) CHECK(cudaStreamSynchronize(on));
            }
            CHECK(cudaStreamSynchronize(on));
        });
    for (auto &thread : threads) thread.join();
    warps_launched = 8ull * 200 * 16 * 3;
    for (unsigned *count : counts) print_sum(count, 1);
}
// What `body` launches on the stream, as a graph.
template <typename Body> static cudaGraph_t captured(cudaStream_t stream, Body body) {
    cudaGraph_t graph;
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    body(stream);
    CHECK(cudaStreamEndCapture(stream, &graph));
    return graph;
}
template <typename Body> static cudaGraphExec_t executable(cudaStream_t stream, Body body) {
    cudaGraphExec_t ready;
    CHECK(cudaGraphInstantiate(&ready, captured(stream, body), 0));
    return ready;
}
constexpr int STRIDE_WARPS = 40 * 4, TINY_WARPS = 3 * 3;  // of the two launches that graphs are made of
static void stride_and_tiny(cudaStream_t on, float *c, int n, unsigned *count, int times) {
    for (int k = 0; k < times; k++) {
        gridStride<<<40, 128, 0, on>>>(c, n);
        tiny<<<3, 70, 0, on>>>(count);
    }
}
static void graph() {
    const int n = 100000;
    float *c = floats(n);
    unsigned *count = zeros(1);
    cudaStream_t on = stream();
    cudaGraphExec_t ready = executable(on, [=](cudaStream_t s) { stride_and_tiny(s, c, n, count, 6); });
    for (int k = 0; k < 4; k++) CHECK(cudaGraphLaunch(ready, on));
    CHECK(cudaGraphUpload(ready, on));
    CHECK(cudaGraphLaunch(ready, on));
    CHECK(cudaStreamSynchronize(on));
    warps_launched = 5ull * 6 * (STRIDE_WARPS + TINY_WARPS);
    print_sum(c, n);
    print_sum(count, 1);
}
// `launches` of a graph of six nodes, with a wait after each or only at the end.
static void six_nodes(int launches, bool waits) {
    const int n = 100000;
    float *c = floats(n);
    unsigned *count = zeros(1);
    cudaStream_t on = stream();
    cudaGraphExec_t ready = executable(on, [=](cudaStream_t s) { stride_and_tiny(s, c, n, count, 3); });
    for (int k = 0; k < launches; k++) {
        CHECK(cudaGraphLaunch(ready, on));
        if (waits) CHECK(cudaStreamSynchronize(on));
    }
    CHECK(cudaStreamSynchronize(on));
    warps_launched = 3ull * launches * (STRIDE_WARPS + TINY_WARPS);
    print_sum(c, n);
    print_sum(count, 1);
}
// Two graphs, launched in turn on a stream each, so that their kernels run at once.
static void two_graphs() {
    const int n = 100000;
    float *c = floats(n);
    unsigned *counts[] = {zeros(1), zeros(1)};
    cudaStream_t on[] = {stream(), stream()};
    cudaGraphExec_t ready[] = {
        executable(on[0], [=](cudaStream_t s) { stride_and_tiny(s, c, n, counts[0], 2); }),
        executable(on[1], [=](cudaStream_t s) {
            for (int k = 0; k < 3; k++) spin<<<16, 96, 0, s>>>(20000, counts[1]);
        })};
    for (int k = 0; k < 20; k++)
        for (int which = 0; which < 2; which++) CHECK(cudaGraphLaunch(ready[which], on[which]));
    CHECK(cudaDeviceSynchronize());
    warps_launched = 20ull * (2 * (STRIDE_WARPS + TINY_WARPS) + 3 * 16 * 3);
    print_sum(c, n);
    for (unsigned *count : counts) print_sum(count, 1);
}
// An executable graph that gets other arguments and a larger grid between launches, twice.
static void graph_update() {
    unsigned *counts[] = {zeros(1), zeros(1), zeros(1)};
    cudaStream_t on = stream();
    auto body = [=](int at) {
        return [=](cudaStream_t s) {
            tiny<<<2 + 5 * at, 64, 0, s>>>(counts[at]);
            tiny<<<1, 32, 0, s>>>(counts[at]);
        };
    };
    cudaGraphExec_t ready = executable(on, body(0));
    for (int at = 0; at < 3; at++) {
        if (at) {
            cudaGraphExecUpdateResultInfo updated;
            CHECK(cudaGraphExecUpdate(ready, captured(on, body(at)), &updated));
        }
        for (int k = 0; k < 2; k++) CHECK(cudaGraphLaunch(ready, on));
        warps_launched += 2ull * ((2 + 5 * at) * 2 + 1);
    }
    CHECK(cudaStreamSynchronize(on));
    for (unsigned *count : counts) print_sum(count, 1);
}
static void cooperative() {
    unsigned *count = zeros(1), *seen = zeros(16);
    void *arguments[] = {&count, &seen};
    for (int k = 0; k < 3; k++)
        CHECK(cudaLaunchCooperativeKernel(meets, counted(dim3(16), dim3(96)), dim3(96), arguments));
    print_sum(count, 1);
    print_sum(seen, 16);
}
// Some launches on each GPU, first one after the other and then without a wait between.
static void devices() {
    int count = 0;
    CHECK(cudaGetDeviceCount(&count));
    std::vector<unsigned *> sums;
    for (int device = 0; device < count; device++) {
        CHECK(cudaSetDevice(device));
        vector_add(1 << 16, 128, 2);
        sums.push_back(zeros(1));
    }
    for (int k = 0; k < 50; k++)
        for (int device = 0; device < count; device++) {
            CHECK(cudaSetDevice(device));
            tiny<<<CONFIG((10), (64))>>>(sums[device]);
        }
    for (int device = 0; device < count; device++) {
        CHECK(cudaSetDevice(device));
        print_sum(sums[device], 1);
    }
}
// Says when it has begun, after 500 launches and ten times the 25 ms that a killed process may lose; goes on for
// some seconds, with as many launches as others leave it the GPU for.
static void for_a_while() {
    const int n = 1 << 8;
    float *a = floats(n), *b = floats(n, 2), *c = floats(n, 0);
    auto now = std::chrono::steady_clock::now;
    auto begun = now() + std::chrono::milliseconds(250);
    auto ends = now() + std::chrono::seconds(8);  // to write all that is recorded in a second takes more than one
    bool is_said = false;
    for (int k = 0; !is_said || now() < ends; k++) {
        vectorAdd<<<CONFIG((n / 256), (256))>>>(a, b, c, n);
        CHECK(cudaDeviceSynchronize());
        if (is_said || k < 500 || now() < begun) continue;
        printf("begun\n"), fflush(stdout);
        is_said = true;
    }
    print_sum(c, n);
}
// Kernels of about 0.1 ms, of which up to 1,000 wait on the GPU, for 2 s: the last ones when it returns.
static void queue() {
    unsigned *count = zeros(1);
    time_t ends = time(nullptr) + 2;
    for (int k = 0; k < 100 || time(nullptr) < ends; k++) spin<<<CONFIG((1), (32))>>>(200000, count);
    printf("0\n");
}
// Launches, and a graph; then waits for a line of its input, and does the same again.
static void two_halves() {
    const int n = 100000;
    unsigned *count = zeros(1);
    float *c = floats(n);
    cudaStream_t on = stream();
    cudaGraphExec_t ready = executable(on, [=](cudaStream_t s) { stride_and_tiny(s, c, n, count, 1); });
    for (int half = 0; half < 2; half++) {
        for (int k = 0; k < 100; k++) tiny<<<CONFIG((2), (64))>>>(count);
        CHECK(cudaGraphLaunch(ready, on));
        CHECK(cudaStreamSynchronize(on));
        CHECK(cudaDeviceSynchronize());
        printf("half\n"), fflush(stdout);
        if (!half) getchar();
    }
    print_sum(count, 1);
    print_sum(c, n);
}
// A thread's stream, and how many kernels it has launched there of those that ran.
struct Busy {
    unsigned *ran = zeros(1), launched = 0;
    cudaStream_t on = nullptr;

    void launch(unsigned count) {
        for (unsigned k = 0; k < count; k++) tiny<<<1, 1, 0, on>>>(ran);
        launched += count;
    }
    void wait() { CHECK(cudaStreamSynchronize(on)); }
    bool is_right() {
        unsigned got = 0;
        CHECK(cudaMemcpy(&got, ran, sizeof got, cudaMemcpyDeviceToHost));
        return got == launched;
    }
};
__global__ void waitsFor(volatile int *flag) {
    while (!*flag) __nanosleep(1000);
}
static void launches(Busy &busy) {
    busy.launch(100);
    busy.wait();
}
static void allocates(Busy &busy) {
    void *memory;
    CHECK(cudaMallocAsync(&memory, 1 << 16, busy.on));
    CHECK(cudaMemsetAsync(memory, 1, 4096, busy.on));
    busy.launch(3);
    CHECK(cudaFreeAsync(memory, busy.on));
    busy.wait();
}
static void captures(Busy &busy) {
    cudaGraph_t graph;
    cudaGraphExec_t ready;
    CHECK(cudaStreamBeginCapture(busy.on, cudaStreamCaptureModeThreadLocal));
    busy.launch(4);
    CHECK(cudaStreamEndCapture(busy.on, &graph));
    CHECK(cudaGraphInstantiate(&ready, graph, 0));
    busy.launched += 4 * 5 - 4;
    for (int k = 0; k < 5; k++) CHECK(cudaGraphLaunch(ready, busy.on));
    busy.wait();
    CHECK(cudaGraphExecDestroy(ready));
    CHECK(cudaGraphDestroy(graph));
}
// The kernel ends when its thread has made some more calls.
static void is_waited_for(Busy &busy) {
    static volatile int *flag = [] {
        void *memory;
        CHECK(cudaHostAlloc(&memory, sizeof(int), 0));
        return static_cast<volatile int *>(memory);
    }();
    *flag = 0;
    waitsFor<<<1, 1, 0, busy.on>>>(flag);
    busy.launch(10);
    *flag = 1;
    busy.wait();
}
// Threads that use CUDA in these ways; says when they do, and ends two seconds after a line of its input.
static void busy(bool has_graphs) {
    void (*const ways[])(Busy &) = {launches, launches, allocates, has_graphs ? captures : launches, is_waited_for};
    std::vector<Busy> all(std::size(ways));
    std::vector<std::thread> threads;
    std::atomic<bool> is_over{false};
    for (size_t at = 0; at < all.size(); at++) {
        CHECK(cudaStreamCreateWithFlags(&all[at].on, cudaStreamNonBlocking));
        ways[at](all[at]);
    }
    for (size_t at = 0; at < all.size(); at++)
        threads.emplace_back([&, at] {
            while (!is_over) ways[at](all[at]);
        });
    printf("begun\n"), fflush(stdout);
    getchar();
    std::this_thread::sleep_for(std::chrono::seconds(2));
    is_over = true;
    for (auto &thread : threads) thread.join();
    for (Busy &thread : all) printf("%s\n", thread.is_right() ? "all ran" : "some did not run");
}

// A kernel for four seconds; then another one of the same module, and a graph that was made before, for as long.
static void phases() {
    const int n = 1 << 12;
    float *a = floats(n), *b = floats(n, 2), *c = floats(n, 0), *strided = floats(n);
    unsigned *count = zeros(1), graphs = 0;
    Busy busy;
    CHECK(cudaStreamCreateWithFlags(&busy.on, cudaStreamNonBlocking));
    cudaGraphExec_t ready = executable(busy.on, [=](cudaStream_t s) { stride_and_tiny(s, strided, n, count, 2); });
    auto for_long = [](auto work) {
        auto end = std::chrono::steady_clock::now() + std::chrono::seconds(4);
        while (std::chrono::steady_clock::now() < end) work();
    };
    for_long([&] { launches(busy); });
    for_long([&] {
        for (int k = 0; k < 20; k++) vectorAdd<<<n / 256, 256, 0, busy.on>>>(a, b, c, n);
        CHECK(cudaGraphLaunch(ready, busy.on));
        graphs++;
        busy.wait();
    });
    unsigned tinies = 0;
    CHECK(cudaMemcpy(&tinies, count, sizeof tinies, cudaMemcpyDeviceToHost));
    printf("%s\n", busy.is_right() && tinies == 2 * 3 * graphs ? "all ran" : "some did not run");
    print_sum(c, n);
}

int main(int, char **arguments) {
    const char *name = arguments[1];
    auto is = [&](const char *other) { return strcmp(name, other) == 0; };
    if (is("vector_add")) vector_add(1 << 20, 256, 10);
    if (is("odd_block")) vector_add(100001, 77, 5);
    if (is("three_returns")) {
        const int n = 1 << 18;
        float *c = floats(n);
        for (int k = 0; k < 3; k++) threeReturns<<<CONFIG((n / 256), (256))>>>(c, n);
        print_sum(c, n);
    }
    if (is("each_alone")) {
        float *c = floats(64 * 128);
        eachAlone<<<CONFIG((64), (128))>>>(c);
        print_sum(c, 64 * 128);
    }
    if (is("grid_stride")) {
        float *c = floats(1 << 22);
        for (int k = 0; k < 4; k++) gridStride<<<CONFIG((264), (512))>>>(c, 1 << 22);
        print_sum(c, 1 << 22);
    }
    if (is("three_dimensions")) {
        const int n = 7 * 5 * 3 * 9 * 4 * 3;
        unsigned *seen = zeros(n);
        threeDimensions<<<CONFIG((7, 5, 3), (9, 4, 3))>>>(seen);
        print_sum(seen, n);
    }
    if (is("empty_grid")) {
        empty<<<0, 32>>>();
        printf("%s\n", cudaGetErrorString(cudaGetLastError()));
        empty<<<CONFIG((2), (32))>>>();
        empty<<<1, 2048>>>();
        printf("%s\n", cudaGetErrorString(cudaGetLastError()));
        CHECK(cudaDeviceSynchronize());
    }
    if (is("trap")) {
        float *c = floats(1 << 16);
        gridStride<<<CONFIG((32), (128))>>>(c, 1 << 16);
        print_sum(c, 1 << 16);
        traps<<<256, 256>>>(c, 1 << 16);
        printf("%s\n", cudaGetErrorString(cudaDeviceSynchronize()));
    }
    if (is("tiny")) {
        unsigned *count = zeros(1);
        for (int k = 0; k < 10000; k++) tiny<<<CONFIG((2), (64))>>>(count);
        print_sum(count, 1);
    }
    if (is("large")) {  // more than the device buffer has room for
        unsigned *count = zeros(1);
        tiny<<<CONFIG((200000), (256))>>>(count);
        print_sum(count, 1);
    }
    if (is("long")) {
        unsigned *count = zeros(1);
        spin<<<CONFIG((4), (32))>>>(4000000000ull, count);
        for (int k = 0; k < 3; k++) tiny<<<CONFIG((1), (32))>>>(count);
        print_sum(count, 1);
    }
    if (is("cluster")) {
        unsigned *count = zeros(1);
        clustered<<<CONFIG((8), (64))>>>(count);
        print_sum(count, 1);
    }
    if (is("no_sync")) {  // ends without waiting
        unsigned *count = zeros(1);
        tiny<<<CONFIG((50), (64))>>>(count);
    }
    if (is("reset")) {
        vector_add(1 << 16, 128, 2);
        CHECK(cudaDeviceReset());
        vector_add(1 << 16, 128, 2);
    }
    if (is("streams")) streams();
    if (is("graph")) graph();
    if (is("graph_four_times")) six_nodes(4, true);
    if (is("graph_twice_at_once")) six_nodes(2, false);
    if (is("two_graphs")) two_graphs();
    if (is("graph_update")) graph_update();
    if (is("cooperative")) cooperative();
    if (is("devices")) devices();
    if (is("for_a_while")) for_a_while();
    if (is("queue")) queue();
    if (is("two_halves")) two_halves();
    if (is("busy")) busy(true);
    if (is("busy_without_graphs")) busy(false);
    if (is("phases")) phases();
    fprintf(stderr, "warps %llu\n", warps_launched);
    return 0;
}
