// Kernels for benchmarks/findings_gpu.py: uniform ones, in which there is nothing to find, and ones with a cause planted.
//
//     findings_gpu uniform WORK     all shapes of a kind of work: fma, special, shared, global, tensor, lane0, tree, partial
//     findings_gpu planted          all planted causes, each at two sizes of its launch
//
// Built with -DHELD_OUT, it has other shapes, another amount of work, and other periods, lanes and shares: those that
// no figure of the findings was chosen with.
//
// Each kernel is launched LAUNCHES times. A line `NAME WORK CAUSE GRID_X GRID_Y GRID_Z WARPS` says what ran, where NAME
// is what is planted or the work, and both numbers are arguments of the template. No two kernels have all of these in
// common. Blocks per SM are held to as many as a shape says by the shared memory that they ask for.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mma.h>
#include <string>
#include <vector>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) {                                                                   \
            fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(check_status));                            \
            exit(1);                                                                                         \
        }                                                                                                    \
    } while (0)

constexpr int LAUNCHES = 4, SHARED_FLOATS = 1024, GLOBAL_FLOATS = 1 << 26;
// Of the last three: lane 0 of each warp stores the sum of its row, thread 0 that of its block, and each block has a
// part of a last warp.
enum Work { FMA, SPECIAL, SHARED, GLOBAL, TENSOR, LANE0, TREE, PARTIAL };
constexpr unsigned OF_LAST_WARP = 19;
enum Cause {
    NONE, PERIOD_X, PERIOD_Y, PERIOD_Z, HEAVY, LATE_LANES, EARLY_LANES, UPPER_LANES, LATE_WARPS, GROWING, BORDER, STRAGGLERS,
    ROWS, LAST,
};
const char *const WORKS[] = {"fma", "special", "shared", "global", "tensor", "lane0", "tree", "partial"};
// Of each kind of work, about 20 µs (held out: 30 µs) of a block that has its SM to itself; and what is planted.
#ifdef HELD_OUT
constexpr int ROUNDS[] = {750, 450, 600, 90, 450, 90, 750, 750};
constexpr unsigned X_EVERY = 5, Y_EVERY = 3, Z_EVERY = 2, HEAVY_EVERY = 24, LANES_EVERY = 8, UPPER_FROM = 16, WARPS_EVERY = 2;
constexpr float HEAVY_TIMES = 6, GROWS_BY = 1.5f, STRAGGLER_TIMES = 5, ROW_POWER = 0.5f, REST = 0.7f;
#else
constexpr int ROUNDS[] = {500, 300, 400, 60, 300, 60, 500, 500};
constexpr unsigned X_EVERY = 7, Y_EVERY = 4, Z_EVERY = 3, HEAVY_EVERY = 16, LANES_EVERY = 16, UPPER_FROM = 24, WARPS_EVERY = 4;
constexpr float HEAVY_TIMES = 8, GROWS_BY = 2, STRAGGLER_TIMES = 4, ROW_POWER = 0.625f, REST = 0.5f;
#endif

__device__ unsigned scrambled(unsigned x) {
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    x = (x ^ (x >> 16)) * 0x45d9f3bu;
    return x ^ (x >> 16);
}

// How many times as much a thread does.
template <int CAUSE> __device__ float share() {
    unsigned x = blockIdx.x, y = blockIdx.y, z = blockIdx.z, lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    unsigned block = (z * gridDim.y + y) * gridDim.x + x, blocks = gridDim.x * gridDim.y * gridDim.z;
    switch (CAUSE) {
    case PERIOD_X: return x % X_EVERY == X_EVERY / 2 ? 2 : 1;
    case PERIOD_Y: return y % Y_EVERY == 1 ? 2 : 1;
    case PERIOD_Z: return z % Z_EVERY == Z_EVERY - 1 ? 2 : 1;
    case HEAVY: return scrambled(block) % HEAVY_EVERY == 0 ? HEAVY_TIMES : 1;
    case LATE_LANES: return lane % LANES_EVERY == 5 ? 1.7f : 1;
    case EARLY_LANES: return lane % LANES_EVERY == 5 ? 0.6f : 1;
    case UPPER_LANES: return lane >= UPPER_FROM ? 4 : 1;
    case LATE_WARPS: return warp % WARPS_EVERY == WARPS_EVERY - 1 ? 1.5f : 1;
    case GROWING: return 1 + GROWS_BY * block / blocks;
    case BORDER: return x == 0 || y == 0 || x + 1 == gridDim.x || y + 1 == gridDim.y ? 1.5f : 1;
    case STRAGGLERS: return block == blocks / 3 || block == blocks / 2 || block + 7 == blocks ? STRAGGLER_TIMES : 1;
    case ROWS: {  // of each warp, with a heavy tail
        float chance = float(scrambled(block * 32 + warp) % 65536 + 1) / 65536;
        return fminf(__powf(chance, -ROW_POWER), 40);
    }
    default: return 1;
    }
}

template <int WORK> __device__ float run(int rounds, const float *in, float *floats) {
    float a = threadIdx.x * 1e-3f, b = 1.0001f;
    if constexpr (WORK == FMA || WORK == TREE || WORK == PARTIAL)
        for (int round = 0; round < rounds; round++)
#pragma unroll
            for (int step = 0; step < 16; step++) a = fmaf(a, b, 1e-4f);
    if constexpr (WORK == SPECIAL)
        for (int round = 0; round < rounds; round++)
#pragma unroll
            for (int step = 0; step < 8; step++) a = __sinf(a) + b;
    if constexpr (WORK == SHARED) {
        for (int i = threadIdx.x; i < SHARED_FLOATS; i += blockDim.x) floats[i] = float((i * 7 + 1) % SHARED_FLOATS);
        __syncthreads();
        int at = threadIdx.x % SHARED_FLOATS;
        for (int round = 0; round < rounds; round++)
#pragma unroll
            for (int step = 0; step < 4; step++) at = int(floats[at]);
        a = float(at);
    }
    if constexpr (WORK == GLOBAL || WORK == LANE0) {
        unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
        unsigned at = block * blockDim.x + threadIdx.x;
        for (int round = 0; round < rounds; round++) {
            a += in[at % GLOBAL_FLOATS];
            at += gridDim.x * gridDim.y * gridDim.z * blockDim.x;
        }
    }
    if constexpr (WORK == TENSOR) {
        using namespace nvcuda::wmma;
        fragment<matrix_a, 16, 16, 16, __half, row_major> left;
        fragment<matrix_b, 16, 16, 16, __half, col_major> right;
        fragment<accumulator, 16, 16, 16, float> sum;
        fill_fragment(left, __float2half(0.01f));
        fill_fragment(right, __float2half(0.02f));
        fill_fragment(sum, 0.0f);
        for (int round = 0; round < rounds; round++)
#pragma unroll
            for (int step = 0; step < 4; step++) mma_sync(sum, left, right, sum);
        a = sum.x[0];
    }
    return a;
}

// Never so, which the compiler does not know.
__device__ void keep(float value, float *out) {
    if (value == -12345.0f) out[threadIdx.x] = value;
}

__device__ unsigned blocks_done;

// Whether this block is the last to get here, in all its threads.
__device__ bool is_last_block(float *floats) {
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        unsigned last = gridDim.x * gridDim.y * gridDim.z - 1;
        floats[0] = atomicInc(&blocks_done, last) == last;
    }
    __syncthreads();
    return floats[0] != 0;
}

// The usual ends of reductions.
template <int WORK> __device__ void store(float value, float *out, float *floats) {
    unsigned block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    if constexpr (WORK == LANE0) {
        for (int step = 16; step; step /= 2) value += __shfl_down_sync(~0u, value, step);
        if (threadIdx.x % 32 == 0) out[(block * (blockDim.x / 32) + threadIdx.x / 32) % 1024] = value;
    } else if constexpr (WORK == TREE) {
        floats[threadIdx.x] = value;
        for (unsigned left = blockDim.x; left > 1;) {
            unsigned half = (left + 1) / 2;
            __syncthreads();
            if (threadIdx.x < left - half) floats[threadIdx.x] += floats[threadIdx.x + half];
            left = half;
        }
        if (threadIdx.x == 0) out[block % 1024] = floats[0];
    } else {
        keep(value, out);
    }
}

// Lanes with less to do leave by an exit of their own: lanes that only wait for the others leave with them.
template <int WORK, int CAUSE> __global__ void kernel(float *out, const float *in, int rounds) {
    extern __shared__ float floats[];
    constexpr float LEAST = CAUSE == EARLY_LANES ? 0.6f : 1;
    float mine = share<CAUSE>();
    if constexpr (CAUSE == LATE_LANES || CAUSE == EARLY_LANES || CAUSE == UPPER_LANES) {
        float value = run<WORK>(int(rounds * LEAST), in, floats);
        if (mine <= LEAST) {
            keep(value, out);
            asm volatile("exit;");
        }
        keep(value + run<WORK>(int(rounds * (mine - LEAST)), in, floats), out);
    } else {
        store<WORK>(run<WORK>(int(rounds * mine), in, floats), out, floats);
        if constexpr (CAUSE == LAST)
            if (is_last_block(floats)) keep(run<WORK>(int(rounds * REST), in, floats), out);
    }
}

struct Shape {
    dim3 grid;
    int warps, cluster = 1;
};

float *out, *in;
cudaDeviceProp device;
int sms;

template <int WORK, int CAUSE> void launch(const char *name, int held, const Shape &shape) {
    auto *launched = kernel<WORK, CAUSE>;
    int rounds = ROUNDS[WORK];
    int bytes = int(device.sharedMemPerMultiprocessor / held - device.reservedSharedMemPerBlock) / 256 * 256, fit;
    bytes = std::min(bytes, int(device.sharedMemPerBlockOptin));
    CHECK(cudaFuncSetAttribute(launched, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    CHECK(cudaFuncSetAttribute(launched, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared));
    CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, launched, 32 * shape.warps, bytes));
    if (fit != held) fprintf(stderr, "%s: %d blocks of %d warps fit on an SM, %d wanted\n", name, fit, shape.warps, held);
    cudaLaunchConfig_t config = {};
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim = {unsigned(shape.cluster), 1, 1};
    config.gridDim = shape.grid;
    config.blockDim = dim3(32 * (shape.warps - (WORK == PARTIAL)) + (WORK == PARTIAL ? OF_LAST_WARP : 0));
    config.dynamicSmemBytes = bytes;
    config.attrs = &cluster;
    config.numAttrs = shape.cluster > 1;
    for (int turn = 0; turn < LAUNCHES; turn++) {
        CHECK(cudaLaunchKernelEx(&config, launched, out, (const float *)in, rounds));
        CHECK(cudaDeviceSynchronize());
    }
    printf("%s %d %d %u %u %u %d\n", name, WORK, CAUSE, shape.grid.x, shape.grid.y, shape.grid.z, shape.warps);
}

// Blocks in quarters of a wave, by warps of a block: long launches have few warps a block, so that a file stays small.
template <int WORK> void uniform(bool has_clusters) {
    struct Row {
        int warps, held;
        std::vector<int> quarters;
    };
#ifdef HELD_OUT
    const Row rows[] = {{1, 8, {4, 20}}, {2, 12, {8}}, {3, 5, {4, 16}}, {5, 3, {8}}, {6, 4, {4, 24}}, {10, 2, {8}}, {12, 5, {4}},
                        {24, 1, {8}}};
#else
    const Row rows[] = {
        {1, 4, {4, 8, 12, 32, 120}}, {1, 16, {4, 12, 32}}, {2, 4, {4, 16, 40}}, {4, 2, {4, 12, 32}}, {4, 4, {4, 12, 40}},
        {4, 8, {4, 16}},             {8, 1, {4, 12}},     {8, 4, {4, 12}},     {8, 8, {4}},        {16, 2, {4, 12}},
        {32, 1, {4, 12}},            {32, 2, {4}},
    };
#endif
    for (const Row &row : rows)
        for (int quarters : row.quarters) {
            unsigned blocks = sms * row.held * quarters / 4;
            launch<WORK, NONE>(WORKS[WORK], row.held, {dim3(blocks), row.warps});
        }
    // A grid of two and of three sides, and clusters of two and four blocks.
    unsigned wave = sms * 4;
    launch<WORK, NONE>(WORKS[WORK], 4, {dim3(32, wave / 16), 4});
    launch<WORK, NONE>(WORKS[WORK], 4, {dim3(12, 12, wave / 48), 4});
    for (unsigned waves : {1, 3})
        for (int cluster : {2, 4})
            if (has_clusters)
                launch<WORK, NONE>(WORKS[WORK], 2, {dim3(sms * 2 * waves / cluster * cluster), 3 * cluster / 2, cluster});
}

template <int CAUSE, int WORK = FMA> void planted(const char *name, std::vector<dim3> grids, int warps = 4) {
    for (dim3 grid : grids) launch<WORK, CAUSE>(name, 4, {grid, warps});
}

int main(int count, char **arguments) {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    CHECK(cudaGetDeviceProperties(&device, 0));
    sms = device.multiProcessorCount;
    CHECK(cudaMalloc(&out, 1024 * sizeof(float)));
    CHECK(cudaMalloc(&in, size_t(GLOBAL_FLOATS) * sizeof(float)));
    CHECK(cudaMemset(in, 0, size_t(GLOBAL_FLOATS) * sizeof(float)));
    bool has_clusters = device.major >= 9;
    std::string part = count > 1 ? arguments[1] : "", work = count > 2 ? arguments[2] : "";
    if (part == "uniform") {
        if (work == "fma") uniform<FMA>(has_clusters);
        if (work == "special") uniform<SPECIAL>(has_clusters);
        if (work == "shared") uniform<SHARED>(has_clusters);
        if (work == "global") uniform<GLOBAL>(has_clusters);
        if (work == "tensor") uniform<TENSOR>(has_clusters);
        if (work == "lane0") uniform<LANE0>(has_clusters);
        if (work == "tree") uniform<TREE>(has_clusters);
        if (work == "partial") uniform<PARTIAL>(has_clusters);
        return 0;
    }
    if (part != "planted") {
        fprintf(stderr, "findings_gpu uniform WORK | findings_gpu planted\n");
        return 2;
    }
    // A wave and three.
    unsigned wave = sms * 4;
    std::vector<dim3> lines = {dim3(wave), dim3(3 * wave)}, planes = {dim3(16, wave / 16), dim3(32, wave / 8)};
    planted<PERIOD_X>("period_x", lines);
    planted<PERIOD_Y>("period_y", planes);
    planted<PERIOD_Z>("period_z", {dim3(4, 4, wave / 16), dim3(4, 8, wave / 8)});
    planted<HEAVY>("heavy", lines);
    planted<LATE_LANES>("late_lanes", lines);
    planted<EARLY_LANES>("early_lanes", lines);
    planted<UPPER_LANES>("upper_lanes", lines);
    planted<LATE_WARPS>("late_warps", lines, 8);
    planted<GROWING>("growing", lines);
    planted<BORDER>("border", planes);
    planted<STRAGGLERS>("stragglers", lines);
    planted<ROWS, LANE0>("rows", lines);
    planted<LAST>("last", lines);
    planted<NONE>("part_of_a_wave", {dim3(wave + wave / 4), dim3(wave + wave / 3)});
}
