// CUDA graphs in C, so that a Python program's lines can be those of each capture: graph_calls.py and
// benchmarks/gpu_graphs.py. Kernels have numbers below KERNELS, which are in their names.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <utility>

#define CHECK(call)                                                                                          \
    do {                                                                                                     \
        cudaError_t check_status = (call);                                                                   \
        if (check_status != cudaSuccess) fprintf(stderr, "%s: %s\n", #call, cudaGetErrorString(check_status)); \
    } while (0)

constexpr int KERNELS = 32;
template <int N> __global__ void numbered(int *count) { count[0] += N; }
// Begins a loop of the graph, or ends it after so many turns.
__global__ void turn(cudaGraphConditionalHandle loop, int *count, int turns) {
    count[1] = turns ? count[1] + 1 : 0;
    cudaGraphSetConditional(loop, !turns || count[1] < turns);
}

static int *count;
static cudaStream_t stream, second;
static cudaEvent_t forked, joined;
static cudaGraphConditionalHandle loop;

template <int... N> static void *pick(int number, std::integer_sequence<int, N...>) {
    void *all[] = {reinterpret_cast<void *>(numbered<N>)...};
    return all[number];
}
static void *function(int number) { return pick(number, std::make_integer_sequence<int, KERNELS>{}); }
static void launch_in(int number, cudaStream_t in) {
    void *arguments[] = {&count};
    CHECK(cudaLaunchKernel(function(number), dim3(1), dim3(1), arguments, 0, in));
}
static cudaKernelNodeParams params(void *function, void **arguments) {
    cudaKernelNodeParams made{};
    made.func = function, made.gridDim = made.blockDim = dim3(1), made.kernelParams = arguments;
    return made;
}
static double since_ns(std::chrono::steady_clock::time_point begun, long times) {
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - begun).count() / double(times);
}

extern "C" {
void setup() {
    CHECK(cudaMalloc(&count, 64));
    CHECK(cudaMemset(count, 0, 64));
    for (cudaStream_t *made : {&stream, &second}) CHECK(cudaStreamCreateWithFlags(made, cudaStreamNonBlocking));
    for (cudaEvent_t *made : {&forked, &joined}) CHECK(cudaEventCreateWithFlags(made, cudaEventDisableTiming));
}
void begin() { CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed)); }
void launch(int number) { launch_in(number, stream); }
void launch_second(int number) { launch_in(number, second); }
void fork_stream() {
    CHECK(cudaEventRecord(forked, stream));
    CHECK(cudaStreamWaitEvent(second, forked, 0));
}
void join_stream() {
    CHECK(cudaEventRecord(joined, second));
    CHECK(cudaStreamWaitEvent(stream, joined, 0));
}
cudaGraph_t end() {
    cudaGraph_t graph = nullptr;
    CHECK(cudaStreamEndCapture(stream, &graph));
    return graph;
}
cudaGraph_t make() {
    cudaGraph_t graph = nullptr;
    CHECK(cudaGraphCreate(&graph, 0));
    return graph;
}
cudaGraphNode_t add(cudaGraph_t graph, cudaGraphNode_t after, int number) {
    void *arguments[] = {&count};
    cudaKernelNodeParams kernel = params(function(number), arguments);
    cudaGraphNode_t node = nullptr;
    CHECK(cudaGraphAddKernelNode(&node, graph, after ? &after : nullptr, after != nullptr, &kernel));
    return node;
}
cudaGraphNode_t add_child(cudaGraph_t graph, cudaGraphNode_t after, cudaGraph_t child) {
    cudaGraphNode_t node = nullptr;
    CHECK(cudaGraphAddChildGraphNode(&node, graph, after ? &after : nullptr, after != nullptr, child));
    return node;
}
// A graph with a loop, whose body is captured until loop_end.
cudaGraph_t loop_begin() {
    cudaGraph_t graph = make();
    CHECK(cudaGraphConditionalHandleCreate(&loop, graph, 0, cudaGraphCondAssignDefault));
    int turns = 0;
    void *arguments[] = {&loop, &count, &turns};
    cudaKernelNodeParams kernel = params(reinterpret_cast<void *>(turn), arguments);
    cudaGraphNode_t first, node;
    CHECK(cudaGraphAddKernelNode(&first, graph, nullptr, 0, &kernel));
    cudaGraphNodeParams body{};
    body.type = cudaGraphNodeTypeConditional;
    body.conditional.handle = loop, body.conditional.type = cudaGraphCondTypeWhile, body.conditional.size = 1;
    CHECK(cudaGraphAddNode(&node, graph, &first, nullptr, 1, &body));
    CHECK(cudaStreamBeginCaptureToGraph(stream, body.conditional.phGraph_out[0], nullptr, nullptr, 0,
                                        cudaStreamCaptureModeRelaxed));
    return graph;
}
void loop_end(int turns) {
    turn<<<1, 1, 0, stream>>>(loop, count, turns);
    CHECK(cudaStreamEndCapture(stream, nullptr));
}
cudaGraph_t clone(cudaGraph_t graph) {
    cudaGraph_t made = nullptr;
    CHECK(cudaGraphClone(&made, graph));
    return made;
}
cudaGraphExec_t instantiate(cudaGraph_t graph) {
    cudaGraphExec_t made = nullptr;
    CHECK(cudaGraphInstantiate(&made, graph, 0));
    return made;
}
void destroy(cudaGraph_t graph) { CHECK(cudaGraphDestroy(graph)); }
void destroy_executable(cudaGraphExec_t graph) { CHECK(cudaGraphExecDestroy(graph)); }
void update(cudaGraphExec_t executable, cudaGraph_t graph) {
    cudaGraphExecUpdateResultInfo result{};
    CHECK(cudaGraphExecUpdate(executable, graph, &result));
}
void replay(cudaGraphExec_t graph) { CHECK(cudaGraphLaunch(graph, stream)); }
void wait() { CHECK(cudaDeviceSynchronize()); }
// Prints the least time that each takes on the calling thread.
void measure() {
    constexpr int NODES = 1000, LAUNCHES = 500;
    double launched = 1e18, captured = 1e18, instantiated = 1e18, replayed = 1e18;
    for (int at = 0; at < 4 * LAUNCHES; at++) launch(1);
    wait();
    for (int round = 0; round < 25; round++) {
        auto begun = std::chrono::steady_clock::now();
        for (int at = 0; at < LAUNCHES; at++) launch(1);
        launched = std::min(launched, since_ns(begun, LAUNCHES));
        wait();
        begin();
        begun = std::chrono::steady_clock::now();
        for (int at = 0; at < NODES; at++) launch(1);
        captured = std::min(captured, since_ns(begun, NODES));
        cudaGraph_t graph = end();
        begun = std::chrono::steady_clock::now();
        cudaGraphExec_t executable = instantiate(graph);
        instantiated = std::min(instantiated, since_ns(begun, NODES));
        for (int at = 0; at < 8; at++) {
            begun = std::chrono::steady_clock::now();
            replay(executable);
            if (at) replayed = std::min(replayed, since_ns(begun, 1));
            wait();
        }
        destroy_executable(executable), destroy(graph);
    }
    printf("%.0f %.0f %.0f %.0f\n", launched, captured, instantiated, replayed);
    fflush(stdout);
}
}
