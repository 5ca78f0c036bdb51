// The programs that benchmarks/gpu.py measures: each prints lines `what value` of what it took.
//
//     gpu vector_add LAUNCHES     2^20 threads, 256 a block; times by CUDA events around each launch
//     gpu matmul LAUNCHES         2048 × 2048, tiles of 32 × 32 in shared memory
//     gpu launch LAUNCHES         the host's time of a launch of an empty kernel, in rounds of 1000
//     gpu clock SECONDS           an empty kernel every 5 ms
//     gpu serve                   says `ready`, and does what the lines of its input say
//
// Such a line is `WORK ROUNDS`. Each round is answered by `at MONOTONIC_US US`, when it began and what it took, and the
// line by `done`. A round of `launch` is 200 empty kernels, and US the host's time of a launch; of `small`, 20 kernels
// of 4096 threads, and US a kernel's share of the time until all have ended; of `vector_add`, one of 2^20 threads.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <sched.h>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(check_status));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

constexpr int THREADS = 1 << 20, SIDE = 2048, TILE = 32, LAUNCHES_A_ROUND = 1000;

__global__ void vectorAdd(const float *a, const float *b, float *c, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) c[i] = a[i] + b[i];
}
__global__ void matmul(const float *a, const float *b, float *c, int n) {
    __shared__ float left[TILE][TILE], right[TILE][TILE];
    int row = blockIdx.y * TILE + threadIdx.y, column = blockIdx.x * TILE + threadIdx.x;
    float sum = 0;
    for (int tile = 0; tile < n / TILE; tile++) {
        left[threadIdx.y][threadIdx.x] = a[row * n + tile * TILE + threadIdx.x];
        right[threadIdx.y][threadIdx.x] = b[(tile * TILE + threadIdx.y) * n + column];
        __syncthreads();
        for (int k = 0; k < TILE; k++) sum += left[threadIdx.y][k] * right[k][threadIdx.x];
        __syncthreads();
    }
    c[row * n + column] = sum;
}
__global__ void empty() {}

static float *floats(int n, float first) {
    float *memory;
    std::vector<float> values(n);
    for (int k = 0; k < n; k++) values[k] = first + k % 13;
    CHECK(cudaMalloc(&memory, n * sizeof(float)));
    CHECK(cudaMemcpy(memory, values.data(), n * sizeof(float), cudaMemcpyHostToDevice));
    return memory;
}
static void print_result(const float *memory, int n) {
    std::vector<float> values(n);
    CHECK(cudaMemcpy(values.data(), memory, n * sizeof(float), cudaMemcpyDeviceToHost));
    uint64_t hash = 1469598103934665603u;
    for (float value : values) {
        uint32_t bits;
        memcpy(&bits, &value, sizeof bits);
        hash = (hash ^ bits) * 1099511628211u;
    }
    printf("result %016lx\n", hash);
}
static void print_median(const char *what, std::vector<double> values) {
    std::sort(values.begin(), values.end());
    printf("%s %.4f\n", what, values[values.size() / 2]);
}
static double now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}

// One launch to warm up, then `launches` with an event between each two, and no wait before the last.
template <typename Launch> static void time_kernel(int launches, Launch launch) {
    std::vector<cudaEvent_t> events(launches + 1);
    for (auto &event : events) CHECK(cudaEventCreate(&event));
    launch();
    CHECK(cudaDeviceSynchronize());
    CHECK(cudaEventRecord(events[0]));
    for (int k = 0; k < launches; k++) {
        launch();
        CHECK(cudaEventRecord(events[k + 1]));
    }
    CHECK(cudaDeviceSynchronize());
    std::vector<double> times_us;
    for (int k = 0; k < launches; k++) {
        float ms;
        CHECK(cudaEventElapsedTime(&ms, events[k], events[k + 1]));
        times_us.push_back(ms * 1e3);
    }
    print_median("us", times_us);
    printf("launches %d\n", launches + 1);
}
static void vector_add(int launches) {
    float *a = floats(THREADS, 1), *b = floats(THREADS, 2), *c = floats(THREADS, 0);
    time_kernel(launches, [=] { vectorAdd<<<THREADS / 256, 256>>>(a, b, c, THREADS); });
    printf("warps %lld\n", (launches + 1ll) * (THREADS / 32));
    print_result(c, THREADS);
}
static void matrix_product(int launches) {
    float *a = floats(SIDE * SIDE, 1), *b = floats(SIDE * SIDE, 2), *c = floats(SIDE * SIDE, 0);
    dim3 grid(SIDE / TILE, SIDE / TILE), block(TILE, TILE);
    time_kernel(launches, [=] { matmul<<<grid, block>>>(a, b, c, SIDE); });
    printf("warps %lld\n", (launches + 1ll) * (SIDE / TILE) * (SIDE / TILE) * (TILE * TILE / 32));
    print_result(c, SIDE * SIDE);
}
static void launch(int launches) {
    std::vector<double> issued_us, ended_us;
    empty<<<1, 32>>>();
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round * LAUNCHES_A_ROUND < launches; round++) {
        double begin_us = now_us();
        for (int k = 0; k < LAUNCHES_A_ROUND; k++) empty<<<1, 32>>>();
        issued_us.push_back((now_us() - begin_us) / LAUNCHES_A_ROUND);
        CHECK(cudaDeviceSynchronize());
        ended_us.push_back((now_us() - begin_us) / LAUNCHES_A_ROUND);
    }
    print_median("us", issued_us);
    print_median("ended_us", ended_us);
    printf("launches %zu\nwarps %zu\n", issued_us.size() * LAUNCHES_A_ROUND + 1, issued_us.size() * LAUNCHES_A_ROUND + 1);
}
static void now_and_then(double seconds) {
    long long launches = 0;
    timespec pause{0, 5000000};
    for (double end_us = now_us() + seconds * 1e6; now_us() < end_us; launches++) {
        empty<<<1, 32>>>();
        CHECK(cudaDeviceSynchronize());
        nanosleep(&pause, nullptr);
    }
    printf("launches %lld\nwarps %lld\n", launches, launches);
}

// The main thread stays on the first of its processors, so that others of the process do not move it about.
static void stay() {
    cpu_set_t allowed, first;
    CPU_ZERO(&first);
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0) return;
    for (int cpu = 0; cpu < CPU_SETSIZE && !CPU_COUNT(&first); cpu++)
        if (CPU_ISSET(cpu, &allowed)) CPU_SET(cpu, &first);
    sched_setaffinity(0, sizeof first, &first);
}
static void serve() {
    constexpr int EMPTY = 200, SMALL = 20, SMALL_THREADS = 1 << 12;
    float *a = floats(THREADS, 1), *b = floats(THREADS, 2), *c = floats(THREADS, 0);
    stay();
    auto round = [=](const char *work) {
        double begin_us = now_us(), issued_us;
        int launches = strcmp(work, "launch") == 0 ? EMPTY : strcmp(work, "small") == 0 ? SMALL : 1;
        int threads = launches == SMALL ? SMALL_THREADS : THREADS;
        for (int k = 0; k < launches; k++) {
            if (launches == EMPTY)
                empty<<<1, 32>>>();
            else
                vectorAdd<<<threads / 256, 256>>>(a, b, c, threads);
        }
        issued_us = now_us() - begin_us;
        CHECK(cudaDeviceSynchronize());
        return (launches == EMPTY ? issued_us : now_us() - begin_us) / launches;
    };
    for (const char *work : {"launch", "small", "vector_add"}) round(work);
    printf("ready\n"), fflush(stdout);
    char work[16];
    int rounds;
    while (scanf("%15s %d", work, &rounds) == 2) {
        std::vector<double> begins_us, each_us;
        for (int k = 0; k < rounds; k++) {
            begins_us.push_back(now_us());
            each_us.push_back(round(work));
        }
        for (int k = 0; k < rounds; k++) printf("at %.0f %.4f\n", begins_us[k], each_us[k]);
        printf("done\n"), fflush(stdout);
    }
}

int main(int count, char **arguments) {
    if (count == 2 && strcmp(arguments[1], "serve") == 0) return serve(), 0;
    if (count != 3) return 2;
    const char *name = arguments[1];
    int number = atoi(arguments[2]);
    if (strcmp(name, "vector_add") == 0)
        vector_add(number);
    else if (strcmp(name, "matmul") == 0)
        matrix_product(number);
    else if (strcmp(name, "launch") == 0)
        launch(number);
    else if (strcmp(name, "clock") == 0)
        now_and_then(number);
    else
        return 2;
}
