// CUDA graphs for sanitizer_standin.cpp, which includes it: captures and launches of graphs as a program makes them that
// loads this as a library, with the callbacks that Compute Sanitizer 13.0 has for them. The warp of each kernel runs at
// once.
//
//     begin, end N         the capture of a stream, which makes graph N
//     capture:FUNCTION     a launch that is captured
//     launch:FUNCTION      another thread's launch meanwhile, which runs
//     instantiate N        executable graph N is made of graph N, which is destroyed
//     replay N:F,F,…       executable graph N is launched, whose kernels have these functions
//     exchange N:M         executable graph N is updated with graph M
#include <sstream>
#include <vector>

namespace {

struct NodeLaunches {
    void apply(const std::string &line) {
        size_t end = line.find_first_of(" :");
        std::string what = line.substr(0, end), rest = end == line.npos ? "" : line.substr(end + 1);
        uint64_t number = strtoull(rest.c_str(), nullptr, 10);
        if (what == "begin") api("cuStreamBeginCapture_v2", 539, &stream);
        if (what == "end") {
            CUgraph graph = handle<CUgraph>(number), *made = &graph;
            std::pair<CUstream, CUgraph *> params{stream, made};
            api("cuStreamEndCapture", 497, &params);
        }
        if (what == "capture") api("cuLaunchKernel", 307, nullptr, rest.c_str());
        if (what == "launch")
            std::thread([&] { api("cuLaunchKernel", 307, nullptr, rest.c_str(), [&] { launch(rest.c_str()); }); }).join();
        if (what == "instantiate") {
            Sanitizer_GraphExecData data{};
            data.graph = handle<CUgraph>(number), data.graphExec = handle<CUgraphExec>(number);
            call_back(SANITIZER_CB_DOMAIN_GRAPHS, SANITIZER_CBID_GRAPHS_GRAPHEXEC_CREATED, &data);
            api("cuGraphDestroy", 378, &data.graph);
        }
        if (what == "exchange") {
            uint64_t graph = strtoull(rest.c_str() + rest.find(':') + 1, nullptr, 10);
            std::pair<CUgraphExec, CUgraph> params{handle<CUgraphExec>(number), handle<CUgraph>(graph)};
            api("cuGraphExecUpdate_v2", 706, &params);
        }
        if (what == "replay") api("cuGraphLaunch", 514, nullptr, nullptr, [&] { replay(number, rest.substr(rest.find(':') + 1)); });
    }
    void begin() {
        make_context();
        while (!allocated) usleep(100);
    }

  private:
    template <typename Handle> static Handle handle(uint64_t number) { return reinterpret_cast<Handle>(number); }

    void api(const char *function, Sanitizer_CallbackId id, const void *params, const char *symbol = nullptr,
             const std::function<void()> &inside = [] {}) {
        static uint32_t result = 0;
        Sanitizer_CallbackData data{};
        data.functionName = function, data.context = CONTEXT, data.functionReturnValue = &result;
        data.functionParams = params, data.symbolName = symbol;
        data.callbackSite = SANITIZER_API_ENTER;
        call_back(SANITIZER_CB_DOMAIN_DRIVER_API, id, &data);
        inside();
        data.callbackSite = SANITIZER_API_EXIT;
        call_back(SANITIZER_CB_DOMAIN_DRIVER_API, id, &data);
    }
    void replay(uint64_t number, const std::string &functions) {
        using namespace tracepipe;
        std::istringstream words(functions);
        std::vector<uint64_t> grids;
        launch_data = nullptr, is_marking = true;  // the patches' part is done here
        for (std::string function; std::getline(words, function, ',');) {
            Sanitizer_GraphNodeLaunchData node{};
            node.graphExec = handle<CUgraphExec>(number), node.nodeType = CU_GRAPH_NODE_TYPE_KERNEL;
            auto &data = node.launchData;
            data.gridDim_x = data.gridDim_y = data.gridDim_z = data.blockDim_x = data.blockDim_y = data.blockDim_z = 1;
            data.functionName = function.c_str(), data.module = MODULE, data.context = CONTEXT;
            data.function = reinterpret_cast<CUfunction>(std::hash<std::string>{}(function));
            grids.push_back(data.gridId = ++grid);
            call_back(SANITIZER_CB_DOMAIN_GRAPHS, SANITIZER_CBID_GRAPHS_NODE_LAUNCH_BEGIN, &node);
        }
        is_marking = false;
        Sanitizer_GraphLaunchData graph{};
        graph.graphExec = handle<CUgraphExec>(number), graph.context = CONTEXT;
        call_back(SANITIZER_CB_DOMAIN_GRAPHS, SANITIZER_CBID_GRAPHS_LAUNCH_END, &graph);
        auto at = uint64_t(launch_data) << 16 >> 16 & ~(REGION_ALIGNMENT - 1);
        if (!at) return;
        auto *entries = reinterpret_cast<Entry *>(at + ENTRIES_OFFSET);
        for (size_t k = 0; k < grids.size(); k++) {
            Entry &entry = entries[k];
            entry.grid_id = grids[k], entry.warp.entry_mask = 1, entry.warp.exit_ns = 2000;
            for (int axis = 0; axis < 3; axis++) entry.grid[axis] = entry.block[axis] = 1;
            entry.warp.entry_ns = 1000 + k;  // last, as its reader looks for it
        }
        reinterpret_cast<Region *>(at)->entries = uint32_t(grids.size());
    }

    CUstream stream = reinterpret_cast<CUstream>(0x900);
    uint64_t grid = 0;
};
NodeLaunches &node_launches = *new NodeLaunches;

}  // namespace
