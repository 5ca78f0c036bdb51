// Programs to be recorded: `cases NAME` runs one and prints what it computed, so that a run with a recorder
// can be held against one without. Each case says on standard error how many warps it launched.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
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
constexpr int TILE = 32;
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
__global__ void __cluster_dims__(2, 1, 1) clustered(unsigned *count) { atomicAdd(count, 1); }

static float *floats(int n, float first = 1) {
    float *memory;
    std::vector<float> values(n);
    for (int k = 0; k < n; k++) values[k] = first + k % 13;
    CHECK(cudaMalloc(&memory, n * sizeof(float)));
    CHECK(cudaMemcpy(memory, values.data(), n * sizeof(float), cudaMemcpyHostToDevice));
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
    return memory;
}

static void vector_add(int n, int block, int times) {
    float *a = floats(n), *b = floats(n, 2), *c = floats(n, 0);
    for (int k = 0; k < times; k++) vectorAdd<<<CONFIG(((n + block - 1) / block), (block))>>>(a, b, c, n);
    CHECK(cudaGetLastError());
    print_sum(c, n);
}
static void streams() {
    std::vector<std::thread> threads;
    std::vector<unsigned *> counts;
    for (int t = 0; t < 8; t++) counts.push_back(zeros(1));
    for (int t = 0; t < 8; t++)
        threads.emplace_back([&, t] {
            cudaStream_t stream;
            CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
            for (int k = 0; k < 200; k++) {
                spin<<<16, 96, 0, stream>>>(k % 50 == 0 ? 200000 : 500, counts[t]);
                if (k % 20 == 19) CHECK(cudaStreamSynchronize(stream));
            }
            CHECK(cudaStreamSynchronize(stream));
        });
    for (auto &thread : threads) thread.join();
    warps_launched = 8ull * 200 * 16 * 3;
    for (unsigned *count : counts) print_sum(count, 1);
}
static void graph() {
    const int n = 100000;
    float *c = floats(n);
    unsigned *count = zeros(1);
    cudaStream_t stream;
    cudaGraph_t captured;
    cudaGraphExec_t executable;
    CHECK(cudaStreamCreate(&stream));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int k = 0; k < 6; k++) {
        gridStride<<<40, 128, 0, stream>>>(c, n);
        tiny<<<3, 70, 0, stream>>>(count);
    }
    CHECK(cudaStreamEndCapture(stream, &captured));
    CHECK(cudaGraphInstantiate(&executable, captured, 0));
    for (int k = 0; k < 4; k++) CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaGraphUpload(executable, stream));
    CHECK(cudaGraphLaunch(executable, stream));
    CHECK(cudaStreamSynchronize(stream));
    warps_launched = 5ull * 6 * (40 * 4 + 3 * 3);
    print_sum(c, n);
    print_sum(count, 1);
}
template <typename Launch> static void measure(const char *name, int times, Launch launch) {
    cudaEvent_t begin, end;
    CHECK(cudaEventCreate(&begin));
    CHECK(cudaEventCreate(&end));
    launch();
    CHECK(cudaDeviceSynchronize());
    float best_ms = 1e9;
    for (int k = 0; k < times; k++) {
        CHECK(cudaEventRecord(begin));
        launch();
        CHECK(cudaEventRecord(end));
        CHECK(cudaEventSynchronize(end));
        float ms;
        CHECK(cudaEventElapsedTime(&ms, begin, end));
        if (ms < best_ms) best_ms = ms;
    }
    printf("%s_us %.2f\n", name, best_ms * 1000);
}
static double now_us() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e6 + now.tv_nsec / 1e3;
}
static void benchmark() {
    const int n = 1 << 20, side = 2048;
    float *a = floats(side * side), *b = floats(side * side, 2), *c = floats(side * side, 0);
    unsigned *count = zeros(1);
    measure("vector_add", 100, [=] { vectorAdd<<<(n + 255) / 256, 256>>>(a, b, c, n); });
    measure("three_returns", 50, [=] { threeReturns<<<(n + 255) / 256, 256>>>(c, n); });
    measure("matmul", 20, [=] { matmul<<<dim3(side / TILE, side / TILE), dim3(TILE, TILE)>>>(a, b, c, side); });
    CHECK(cudaDeviceSynchronize());
    for (int round = 0; round < 2; round++) {
        double before = now_us();
        for (int k = 0; k < 500; k++) tiny<<<1, 32>>>(count);
        double launched = now_us();
        CHECK(cudaDeviceSynchronize());
        if (round) printf("launch_us %.2f\ntiny_us %.2f\n", (launched - before) / 500, (now_us() - before) / 500);
    }
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
    if (is("benchmark")) benchmark();
    fprintf(stderr, "warps %llu\n", warps_launched);
    return 0;
}
