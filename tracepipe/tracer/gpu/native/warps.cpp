// SPDX-License-Identifier: MIT
// The injection library of the `warps` engine: the CUDA driver loads it into the traced process, by
// CUDA_INJECTION64_PATH, and calls InitializeInjection before any other CUDA code of the process.
//
// Compute Sanitizer's callbacks report what the process does. They run on its threads, some with the driver's
// locks held, so they only take notes. Modules are patched when they load; each launch of a patched kernel
// gets a region of device memory, which the library's own thread (drain.h) reads.
//
// Environment: TRACEPIPE_GPU_CHANNEL, TRACEPIPE_GPU_PATCHES (file of the device code), the variables of
// selection.h, TRACEPIPE_GPU_MEMORY (bytes on each GPU), TRACEPIPE_GPU_CALLS (call_choice.h),
// TRACEPIPE_GPU_ARGUMENTS (call_arguments.h), TRACEPIPE_GPU_STACKS (python_stacks.h).
//
// In a recording with windows (windows.h) modules are always patched; a launch outside of windows gets no
// region, so its patches return at once.
#include <fstream>
#include <iterator>
#include <thread>
#include <utility>

#include "call_arguments.h"
#include "call_choice.h"
#include "call_flags.h"
#include "captured_graphs.h"
#include "drain.h"
#include "functions.h"
#include "python_stacks.h"
#include "quiet.h"
#include "windows.h"

namespace tracepipe {
namespace {

constexpr unsigned MOST_CALLBACKS = 2048;  // ids of functions of one API
// A launch waits for room while launches are drained, and only for a short time while none is.
constexpr uint64_t WAIT_WHILE_DRAINING_NS = 500'000'000, WAIT_FOR_ROOM_NS = 50'000'000;
constexpr unsigned WAIT_AT_END_MS = Drain::WAIT_AT_END_MS;
constexpr auto LOOK_FOR_QUIET = std::chrono::milliseconds(5);
constexpr uint64_t WAIT_FOR_UNPATCHING_NS = 20'000'000;
constexpr uint64_t WAIT_UNTIL_READ_NS = 50'000'000, WAITS_AT_FIRST_NS = 5'000'000;
constexpr uint64_t REPORT_EVERY_NS = 1'000'000'000;
// The warps for which a shared region has room before the needed number is known.
constexpr uint64_t FIRST_GRAPH_WARPS = 1 << 17, WARPS_OF_CHILDREN = 1 << 15;

// What a thread of the process is doing.
struct Thread {
    unsigned depth = 0;           // of nested API calls
    bool is_in_window = false;    // the outermost call began in one: it and its launches are recorded completely
    uint64_t begun_sequence = 0;  // the number of launches when the outermost call began
    uint64_t launch = 0;          // the id of this call's next launch
    uint64_t stack = 0;           // of the outermost call, if it was read
    uint64_t call_ns = 0;
    std::vector<LaunchPointer> made;
    const char *symbol = nullptr;         // of the kernel that this call launches
    bool is_launched = false;             // this call's kernel runs, and is not only captured
    std::vector<size_t> graph_functions;  // of the kernels of the graph's launch, hashed
    LaunchPointer graph;              // the graph whose nodes are being reported
    std::shared_ptr<Context> graph_context;
    const void *graph_data = nullptr;
    bool has_graph_begun = false;  // a node of it is recorded
    bool is_unloading = false;  // during which no other thread begins the capture of a stream
    Gate::Place place;
};

class Injection {
  public:
    // Called once in a process; the object is never destroyed, as callbacks come until the process ends.
    static void begin() {
        if (only_) return;
        only_ = new Injection;
        only_->start();
    }

  private:
    bool start() {
        if (!channel_.open() || !driver().open()) return false;
        windows_.open();
        channel_.begin_to_count();
        const char *patches = getenv("TRACEPIPE_GPU_PATCHES");
        std::ifstream file(patches ? patches : "", std::ios::binary);
        patches_.assign(std::istreambuf_iterator<char>(file), {});
        if (patches_.empty()) return refuse("the file of the patches cannot be read");
        selection_.read_environment();
        if (selection_.error()) channel_.note(selection_.error());
        choice_.read_settings();
        stacks_.open();
        if (!arguments_.read()) channel_.note("the table of arguments cannot be read: calls are recorded without");
        if (sanitizerSubscribe(&subscriber_, &Injection::called_back, this) != SANITIZER_SUCCESS)
            return refuse("Compute Sanitizer cannot be used: another NVIDIA tool is in the process");
        for (auto domain : DOMAINS)
            if (domain != SANITIZER_CB_DOMAIN_RUNTIME_API || !choice_.is_none())
                sanitizerEnableDomain(1, subscriber_, domain);
        const char *bytes = getenv("TRACEPIPE_GPU_MEMORY");
        if (!drain_.start(
                bytes ? strtoull(bytes, nullptr, 10) : 0, [this](bool is_end) { look_after(is_end); },
                [this] { stop(); }, [this] { let_go(); })) {
            sanitizerUnsubscribe(subscriber_);
            return refuse("no thread could be started in the traced process: its GPU events are not recorded");
        }
        be_first_at_exit();
        return true;
    }
    // Called when the process ends.
    void finish() {
        {
            std::lock_guard<std::mutex> lock(letting_go_);
            if (std::exchange(is_exiting_, true)) return;
        }
        drain_.finish(WAIT_AT_END_MS, true);
    }

    static constexpr Sanitizer_CallbackDomain DOMAINS[] = {
        SANITIZER_CB_DOMAIN_RUNTIME_API, SANITIZER_CB_DOMAIN_RESOURCE, SANITIZER_CB_DOMAIN_SYNCHRONIZE,
        SANITIZER_CB_DOMAIN_LAUNCH,      SANITIZER_CB_DOMAIN_GRAPHS,   SANITIZER_CB_DOMAIN_DRIVER_API,
    };

    Thread &thread() {
        thread_local Thread *state = nullptr;  // outlives the thread's destructors, which may call CUDA
        if (!state) quiet_.gate.add((state = new Thread)->place);
        return *state;
    }
    bool refuse(const char *why) {
        channel_.note(why);
        return false;
    }
    // From the drain's thread, when the recording is over: restores the code on the GPU, before the remaining
    // records are read there.
    void stop() {
        is_over_ = true;
        functions_.stop();
        be_first_at_exit();
        unpatch();
    }
    // From the drain's thread, after the last record: unpatches modules as soon as possible, and then
    // disables the callbacks. The memory on the GPU stays allocated. The subscription stays too: CUPTI would
    // not work in this process without it either (CUDA 13.0), and unsubscribing could fail.
    void let_go() {
        for (bool is_let_go = false; !is_let_go; std::this_thread::sleep_for(LOOK_FOR_QUIET)) {
            std::lock_guard<std::mutex> lock(letting_go_);
            if (is_exiting_) return;
            if (unpatch() || !Quiet::can_be_known())
                is_let_go = quiet_.hold([this](uint64_t) {
                    for (auto domain : DOMAINS) sanitizerEnableDomain(0, subscriber_, domain);
                    return true;
                });
        }
    }
    // From the drain's thread: tries to unpatch the modules; whether they are unpatched.
    bool unpatch() {
        return functions_.is_unpatched() || quiet_.take(drain_.contexts(), [this] {
            functions_.unpatch();
            for (auto &context : drain_.contexts()) context->synchronized(nullptr, sequence_);
            // No launch has to be noticed or counted any more.
            if (selection_.is_past())
                for (auto domain : {SANITIZER_CB_DOMAIN_LAUNCH, SANITIZER_CB_DOMAIN_GRAPHS, SANITIZER_CB_DOMAIN_SYNCHRONIZE})
                    sanitizerEnableDomain(0, subscriber_, domain);
        });
    }
    // Exit handlers run in reverse order of their registration. That of Compute Sanitizer, which registers it
    // some time after the subscription, must not run while the library's thread works.
    void be_first_at_exit() {
        static const pid_t process = getpid();
        auto finish = [] {
            if (getpid() == process) only_->finish();
        };
        atexit(finish);
        at_quick_exit(finish);
    }
    static void called_back(void *self, Sanitizer_CallbackDomain domain, Sanitizer_CallbackId id, const void *data) {
        if (is_own_thread()) return;
        auto &injection = *static_cast<Injection *>(self);
        switch (domain) {
            case SANITIZER_CB_DOMAIN_DRIVER_API:
            case SANITIZER_CB_DOMAIN_RUNTIME_API:
                return injection.call(domain, id, *static_cast<const Sanitizer_CallbackData *>(data));
            case SANITIZER_CB_DOMAIN_RESOURCE: return injection.resource(id, data);
            case SANITIZER_CB_DOMAIN_SYNCHRONIZE:
                return injection.synchronized(id, *static_cast<const Sanitizer_SynchronizeData *>(data));
            case SANITIZER_CB_DOMAIN_LAUNCH:
                if (id == SANITIZER_CBID_LAUNCH_BEGIN)
                    injection.launch(*static_cast<const Sanitizer_LaunchData *>(data));
                return;
            case SANITIZER_CB_DOMAIN_GRAPHS: return injection.graph(id, data);
            default: return;
        }
    }

    // --- API calls

    void call(Sanitizer_CallbackDomain domain, Sanitizer_CallbackId id, const Sanitizer_CallbackData &data) {
        bool is_runtime = domain == SANITIZER_CB_DOMAIN_RUNTIME_API;
        uint16_t flags = flags_of(is_runtime, id, data.functionName);
        if (is_runtime && flags == (CALL_KNOWN | CALL_LEFT_OUT)) return void(is_needless_[id] = true);
        bool is_entry = data.callbackSite == SANITIZER_API_ENTER, is_in_driver = !is_runtime && !(flags & CALL_WAITS);
        if (is_in_driver && !is_entry) leave_driver(flags, data);
        if (!is_over_.load(std::memory_order_relaxed))
            record_call(is_runtime, id, flags, data);
        else if (is_entry && flags & CALL_ENDS_CONTEXT)
            drain_.finish(WAIT_AT_END_MS, false);
        if (is_in_driver && is_entry) enter_driver(flags, data);
        if (!is_entry && flags & CALL_WAITS && !is_over_) wait_until_read(data.context);
    }
    // After the program has waited for its launches: they are in the file even if it ends now. All such waits take at
    // most a fiftieth of the program's time, beyond the first ones.
    void wait_until_read(CUcontext handle) {
        auto context = drain_.find(handle);
        uint64_t begun_ns = monotonic_ns(), now_ns = begun_ns;
        if (!context || (waited_ns_ > WAITS_AT_FIRST_NS && waited_ns_ > (now_ns - started_ns_) / 50)) return;
        for (; now_ns - begun_ns < WAIT_UNTIL_READ_NS && context->is_behind(); now_ns = monotonic_ns()) {
            drain_.wake();
            timespec pause{0, 20'000};
            nanosleep(&pause, nullptr);
        }
        waited_ns_ += now_ns - begun_ns;
    }
    void enter_driver(uint16_t flags, const Sanitizer_CallbackData &data) {
        if (flags & CALL_BEGINS_CAPTURE) quiet_.captures.begin(stream_of(data));
        if (flags & CALL_UNLOADS && functions_.is_any_patched() && !thread().is_unloading)
            thread().is_unloading = quiet_.captures.wait_to_change();
        if (flags & CALL_ENDS_GRAPH && data.functionParams) graphs_.destroy(*static_cast<const CUgraph *>(data.functionParams));
        quiet_.gate.enter(thread().place);
    }
    void leave_driver(uint16_t flags, const Sanitizer_CallbackData &data) {
        uint32_t result = result_of(data);
        if (flags & CALL_BEGINS_CAPTURE && result) quiet_.captures.end(stream_of(data));
        if (flags & CALL_BEGINS_CAPTURE && !result) graphs_.begin();
        if (flags & CALL_ENDS_CAPTURE && (!result || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED)) {
            quiet_.captures.end(stream_of(data));
            graphs_.end(result ? nullptr : captured_by(data));
        }
        if (flags & CALL_UPDATES_GRAPH && !result && data.functionParams) {
            auto &updated = *static_cast<const std::pair<CUgraphExec, CUgraph> *>(data.functionParams);
            graphs_.instantiate(updated.second, updated.first);
        }
        if (flags & CALL_ENDS_STREAM) quiet_.captures.end(stream_of(data));
        if (flags & CALL_UNLOADS && std::exchange(thread().is_unloading, false)) quiet_.captures.changed();
        quiet_.gate.leave(thread().place);
    }
    // The stream is the first parameter of all functions that these flags mark.
    static CUstream stream_of(const Sanitizer_CallbackData &data) {
        return data.functionParams ? *static_cast<const CUstream *>(data.functionParams) : nullptr;
    }
    // The graph of a call that ends a capture, whose second parameter points to it.
    static CUgraph captured_by(const Sanitizer_CallbackData &data) {
        if (!data.functionParams) return nullptr;
        CUgraph *graph = static_cast<const std::pair<CUstream, CUgraph *> *>(data.functionParams)->second;
        return graph ? *graph : nullptr;
    }
    static uint32_t result_of(const Sanitizer_CallbackData &data) {
        return data.functionReturnValue ? *static_cast<const uint32_t *>(data.functionReturnValue) : 0;
    }
    void record_call(bool is_runtime, Sanitizer_CallbackId id, uint16_t flags, const Sanitizer_CallbackData &data) {
        const CallLayout *layout = flags ? layouts_[is_runtime][id].load(std::memory_order_relaxed) : nullptr;
        uint64_t name = function_name(is_runtime, id, layout);
        bool is_recorded = !(flags & CALL_LEFT_OUT);
        if (data.callbackSite == SANITIZER_API_ENTER)
            enter(flags, name, data, is_recorded, layout);
        else
            leave(flags, name, data, is_recorded, layout);
    }
    void enter(uint16_t flags, uint64_t name, const Sanitizer_CallbackData &data, bool is_recorded,
               const CallLayout *layout) {
        Thread &current = thread();
        if (current.depth++ == 0) {
            current.is_in_window = windows_.is_open();
            current.begun_sequence = sequence_.load(std::memory_order_acquire);
            current.stack = 0;
        }
        if (flags & CALL_ENDS_CONTEXT) drain_.finish(WAIT_AT_END_MS, false);
        uint64_t launch = 0, kernel = 0;
        if (flags & CALL_LAUNCHES) {
            if (selection_.is_past() || selection_.is_spent()) wait_for_unpatching();
            wait_for_room(data.context);
            launch = current.launch = channel_.next_launch();
            current.call_ns = monotonic_ns();
            current.made.clear();
            current.symbol = data.symbolName, current.is_launched = false;
            if (quiet_.captures.is_any() && !current.stack) current.stack = stacks_.here(channel_, current.call_ns);
        }
        if (!is_recorded || !current.is_in_window) return;
        if (flags & CALL_NAMES_KERNEL && data.symbolName) kernel = functions_.name_of(data.symbolName);
        if (flags & CALL_HAS_STACK && !current.stack) current.stack = stacks_.here(channel_, monotonic_ns());
        uint64_t stack = flags & CALL_HAS_STACK ? current.stack : 0;
        put_call_enter(channel_, name, launch, kernel, stack, layout, data.functionParams);
    }
    void leave(uint16_t flags, uint64_t name, const Sanitizer_CallbackData &data, bool is_recorded,
               const CallLayout *layout) {
        Thread &current = thread();
        if (current.depth)
            current.depth--;
        else  // the call was in progress when this library was loaded
            current.is_in_window = windows_.is_open();
        uint32_t result = result_of(data);
        if (is_recorded && current.is_in_window) put_call_exit(channel_, name, result, layout, data.functionParams);
        if (!(flags & CALL_LAUNCHES)) return;
        if (result)
            for (LaunchPointer &launch : current.made) launch->is_cancelled = true;
        else if (!current.is_launched && quiet_.captures.is_any())
            graphs_.add(current.symbol, current.stack);
        current.made.clear();
        current.launch = 0;
    }
    uint16_t flags_of(bool is_runtime, unsigned id, const char *function) {
        if (id >= MOST_CALLBACKS) return 0;
        uint16_t flags = flags_[is_runtime][id].load(std::memory_order_acquire);
        if (flags) return flags;
        flags = call_flags(is_runtime, function);
        if (!choice_.takes(function)) flags = (flags & ~CALL_HAS_STACK) | CALL_LEFT_OUT;
        const CallLayout *layout = arguments_.find(function);
        layouts_[is_runtime][id].store(layout, std::memory_order_relaxed);
        uint64_t name = function_name(is_runtime, id, layout);
        // If there was no room for the name, it is sent at the function's next call.
        if (channel_.put(KIND_NAME, &name, sizeof name, function, 0))
            flags_[is_runtime][id].store(flags, std::memory_order_release);
        return flags;
    }
    // Before a launch: the first one after the last recorded launch gives the drain's thread time to unpatch.
    void wait_for_unpatching() {
        if (functions_.is_stopped()) return;
        functions_.stop();
        drain_.wake();
        for (uint64_t by_ns = monotonic_ns() + WAIT_FOR_UNPATCHING_NS; !quiet_.is_tried && monotonic_ns() < by_ns;)
            Gate::pause();
    }
    // Before a launch, while the driver holds no locks: gives the drain time if the buffer gets full.
    void wait_for_room(CUcontext handle) {
        auto context = drain_.find(handle);
        if (!context) return;
        if (!context->is_open) drain_.wait_open(*context);
        if (!context->is_filling()) return;
        if (is_hopeless_.load(std::memory_order_relaxed) && monotonic_ns() < hopeless_until_ns_) return;
        drain_.wake();
        timespec pause{0, 100'000};
        uint64_t begun_ns = monotonic_ns(), moved_ns = begun_ns, now_ns = begun_ns, drained = context->drained;
        while (now_ns - begun_ns < WAIT_WHILE_DRAINING_NS && now_ns - moved_ns < WAIT_FOR_ROOM_NS) {
            nanosleep(&pause, nullptr);
            if (!context->is_filling()) return void(is_hopeless_ = false);
            now_ns = monotonic_ns();
            if (context->drained != drained) moved_ns = now_ns, drained = context->drained;
        }
        // Long kernels keep the buffer full: launches are not held up again for a while.
        hopeless_until_ns_ = monotonic_ns() + 1'000'000'000;
        is_hopeless_ = true;
    }

    // --- contexts and modules

    void resource(Sanitizer_CallbackId id, const void *data) {
        if (id == SANITIZER_CBID_RESOURCE_CONTEXT_CREATION_FINISHED) {
            const auto &created = *static_cast<const Sanitizer_ResourceContextData *>(data);
            add_context(created.context, created.device);
        } else if (id == SANITIZER_CBID_RESOURCE_CONTEXT_DESTROY_STARTING) {
            auto context = drain_.find(static_cast<const Sanitizer_ResourceContextData *>(data)->context);
            if (!context) return;
            // Waits for a while until the drain does not use it; a dead context is not touched again.
            bool is_free = context->in_use.try_lock_for(std::chrono::milliseconds(500));
            context->is_dead = true;
            if (is_free) context->in_use.unlock();
            functions_.forget(context->handle);
        } else if (id == SANITIZER_CBID_RESOURCE_MODULE_LOADED) {
            const auto &module = *static_cast<const Sanitizer_ResourceModuleData *>(data);
            if (drain_.find(module.context)) load(module);
        } else if (id == SANITIZER_CBID_RESOURCE_MODULE_UNLOAD_STARTING) {
            const auto &module = *static_cast<const Sanitizer_ResourceModuleData *>(data);
            functions_.forget(module.module);
            if (auto context = drain_.find(module.context))
                context->marks.forget(module.module), context->called.forget(module.module);
        }
    }
    void load(const Sanitizer_ResourceModuleData &module) {
        bool may_be_patched = quiet_.captures.may_change();
        functions_.patch(module, may_be_patched);
        if (may_be_patched) quiet_.captures.changed();
    }
    std::shared_ptr<Context> add_context(CUcontext handle, CUdevice device) {
        std::lock_guard<std::mutex> lock(contexts_);
        if (auto known = drain_.find(handle)) return known;
        auto context = std::make_shared<Context>(handle, device);
        if (sanitizerAddPatches(patches_.data(), handle) != SANITIZER_SUCCESS) {
            channel_.note("the patches do not fit this GPU: no warps are recorded");
            return context;
        }
        drain_.add(context);
        drain_.wake();
        be_first_at_exit();
        return context;
    }
    // --- launches

    void launch(const Sanitizer_LaunchData &data) {
        thread().is_launched = true;
        if (is_over_ && functions_.is_unpatched()) return;
        auto function = functions_.of(data);
        if (!function) return;  // not patched
        bool is_wanted = !is_over_ && is_in_window() && is_next(*function, data);
        auto context = is_wanted ? drain_.find(data.context) : nullptr;
        if (!context) return set(data, nullptr);
        auto launch = std::make_shared<Launch>();
        launch->record = describe(data, *function);
        launch->kernel = &function->kernel;
        launch->first_warp = selection_.first_warp(warps_a_block(data));
        if (!launch->record.warps || !selection_.takes(function->kernel, launch->record.warps))
            return set(data, nullptr);
        begin(launch, data.hStream);
        launch->begin(channel_, launch->record.warps);
        const void *region;
        if (function->module->launches_kernels) {
            Node node{launch->record, data.gridId, true, true};
            launch->nodes.push_back(node);
            launch->expected = launch->record.warps;
            launch->launches_kernels = true;
            launch->is_closed = true;
            region = context->take_shared(launch, launch->record.warps + WARPS_OF_CHILDREN);
        } else {
            region = context->take(launch);
        }
        set(data, region);
        if (!region) return lost(launch->record, LOST_NO_MEMORY), launch->sent(channel_);
        prepare(*context, *function->module, data.hStream);
        thread().made.push_back(launch);
        drain_.wake_if_idle();
    }
    // Prepares the recording of marks and calls in a module at its first launch.
    void prepare(Context &context, Module &module, Sanitizer_StreamHandle stream) {
        if (module.is_prepared.load(std::memory_order_relaxed) || !quiet_.captures.may_change()) return;
        bool is_prepared = module.is_prepared.exchange(true);
        if (!is_prepared) set_up(context, module, stream);
        quiet_.captures.changed();
    }
    void set_up(Context &context, Module &module, Sanitizer_StreamHandle stream) {
        bool is_done = context.marks.give(module.handle, module.marks, stream);
        if (!module.called.empty()) {
            context.calls.use();
            is_done &= context.called.add(module.handle, module.called, stream);
        }
        if (!is_done) channel_.note("there is no room for the marks of a module; raise --gpu-memory");
    }
    // Whether a call's launches are recorded: all or none, as the nodes of a graph share a region.
    bool is_in_window() {
        Thread &current = thread();
        return current.depth ? current.is_in_window : windows_.is_open();
    }
    // Counts a launch; whether it is to be recorded, if the budget allows.
    bool is_next(const Function &function, const Sanitizer_LaunchData &data) {
        if (!selection_.is_next_selected(function.kernel) || !selection_.is_early(function.kernel)) return false;
        if (function.module->is_missed) missed_ += warps(data);
        return !function.module->is_missed;
    }
    // All nodes of a graph get the user data of the last one (driver 580), so each node's data is set to that
    // of the graph's region.
    void graph(Sanitizer_CallbackId id, const void *data) {
        if (id == SANITIZER_CBID_GRAPHS_NODE_LAUNCH_BEGIN) {
            const auto &node = *static_cast<const Sanitizer_GraphNodeLaunchData *>(data);
            if (node.nodeType != CU_GRAPH_NODE_TYPE_KERNEL) return;
            if (!node.isGraphUpload) thread().graph_functions.push_back(CapturedGraphs::hash(node.launchData.functionName));
            this->node(node);
        } else if (id == SANITIZER_CBID_GRAPHS_LAUNCH_END) {
            graph_launched(*static_cast<const Sanitizer_GraphLaunchData *>(data));
        } else if (id == SANITIZER_CBID_GRAPHS_GRAPHEXEC_CREATED) {
            const auto &created = *static_cast<const Sanitizer_GraphExecData *>(data);
            graphs_.instantiate(created.graph, created.graphExec);
            bool is_of_device = created.isDeviceLaunch || created.containsDeviceGraphLaunches;
            if (is_of_device && !is_device_graph_reported_.exchange(true))
                channel_.note("a CUDA graph is launched by a kernel: its nodes are not recorded then");
        } else if (id == SANITIZER_CBID_GRAPHS_GRAPHEXEC_DESTROYING) {
            CUgraphExec graph = static_cast<const Sanitizer_GraphExecData *>(data)->graphExec;
            graphs_.destroy(graph);
            std::lock_guard<std::mutex> lock(graphs_mutex_);
            warps_of_graph_.erase(graph);
        }
    }
    void node(const Sanitizer_GraphNodeLaunchData &data) {
        if (is_over_ && functions_.is_unpatched()) return;
        auto function = functions_.of(data.launchData);
        if (!function) return;
        Thread &current = thread();
        auto context = drain_.find(data.launchData.context);
        if (data.isGraphUpload || !context || is_over_ || !is_in_window()) return set(data.launchData, nullptr);
        if (!current.graph) {
            current.graph = std::make_shared<Launch>();
            current.graph->record = describe(data.launchData, *function);
            current.graph_context = context;
            current.graph_data = nullptr;
            current.has_graph_begun = false;
        }
        Launch &launch = *current.graph;
        if (context != current.graph_context) {  // another GPU, which has not this one's memory
            set(data.launchData, nullptr);
            return lost(describe(data.launchData, *function), LOST_OTHER_GPU);
        }
        Node node{launch.record, data.launchData.gridId, false, function->module->launches_kernels};
        if (!launch.nodes.empty()) node.record = describe(data.launchData, *function);
        node.record.stream = uint64_t(data.launchData.apiStream);
        node.record.launched_by = BY_GRAPH;
        node.place = current.graph_functions.size() - 1;
        node.is_selected = is_next(*function, data.launchData) && selection_.takes(function->kernel, node.record.warps);
        if (node.is_selected) launch.begin(channel_, node.record.warps);
        // A graph without recorded nodes needs no memory.
        if (node.is_selected && !std::exchange(current.has_graph_begun, true)) {
            begin(current.graph, data.launchData.hApiStream);
            current.graph_data = context->take_shared(current.graph, warps_of(data.graphExec));
            if (current.graph_data) current.made.push_back(current.graph);
        }
        if (current.graph_data) prepare(*context, *function->module, data.launchData.hApiStream);
        set(data.launchData, current.graph_data);
        launch.expected += node.record.warps;
        launch.launches_kernels |= node.launches_kernels;
        launch.nodes.push_back(node);
    }
    void graph_launched(const Sanitizer_GraphLaunchData &data) {
        LaunchPointer launch = std::move(thread().graph);
        thread().graph = nullptr;
        std::vector<size_t> functions = std::exchange(thread().graph_functions, {});
        if (!launch || !thread().has_graph_begun) return;
        {
            std::lock_guard<std::mutex> lock(graphs_mutex_);
            warps_of_graph_[data.graphExec] = launch->expected;
        }
        std::vector<uint64_t> stacks = graphs_.stacks(data.graphExec, functions);
        for (Node &node : launch->nodes)
            if (node.place < stacks.size()) node.record.stack = stacks[node.place];
        launch->record.warps = 0;
        for (const Node &node : launch->nodes) launch->record.warps += node.is_selected ? node.record.warps : 0;
        if (!thread().graph_data) return lost(launch->record, LOST_NO_MEMORY), launch->sent(channel_);
        launch->is_closed.store(true, std::memory_order_release);
        drain_.wake_if_idle();
    }
    uint64_t warps_of(CUgraphExec graph) {
        std::lock_guard<std::mutex> lock(graphs_mutex_);
        auto known = warps_of_graph_.find(graph);
        return known == warps_of_graph_.end() ? FIRST_GRAPH_WARPS : known->second;
    }
    void begin(const LaunchPointer &launch, const void *stream) {
        launch->stream = stream;
        launch->sequence = sequence_.fetch_add(1, std::memory_order_acq_rel) + 1;
    }
    static uint64_t warps_a_block(const Sanitizer_LaunchData &data) {
        return (uint64_t(data.blockDim_x) * data.blockDim_y * data.blockDim_z + 31) / 32;
    }
    uint64_t warps(const Sanitizer_LaunchData &data) const {
        return selection_.warps(uint64_t(data.gridDim_x) * data.gridDim_y * data.gridDim_z, warps_a_block(data));
    }
    LaunchRecord describe(const Sanitizer_LaunchData &data, const Function &function) {
        Thread &current = thread();
        LaunchRecord record{};
        record.launch = current.launch ? current.launch : channel_.next_launch();
        current.launch = 0;
        record.name = function.kernel.name;
        record.stream = uint64_t(data.stream);
        record.gpu = uint32_t(data.device);
        const uint32_t grid[] = {data.gridDim_x, data.gridDim_y, data.gridDim_z};
        const uint32_t block[] = {data.blockDim_x, data.blockDim_y, data.blockDim_z};
        const uint32_t cluster[] = {data.clusterDim_x, data.clusterDim_y, data.clusterDim_z};
        memcpy(record.grid, grid, sizeof grid);
        memcpy(record.block, block, sizeof block);
        memcpy(record.cluster, cluster, sizeof cluster);
        record.call_ns = current.call_ns ? current.call_ns : monotonic_ns();
        record.call_tid = thread_id();
        record.warps = warps(data);
        record.registers = function.needs.registers;
        record.static_shared_bytes = function.needs.static_shared_bytes;
        return record;
    }
    void lost(const LaunchRecord &record, Lost why) {
        LostRecord lost{record.launch, record.gpu, why, record.warps};
        channel_.put(KIND_KERNEL, &record, sizeof record);
        channel_.put(KIND_LOST_WARPS, &lost, sizeof lost);
    }
    // From the drain's thread, from time to time.
    void look_after(bool is_end) {
        report_beyond(is_end);
        if (!is_end && functions_.is_stopped()) unpatch();
    }
    // Disables callbacks of needless functions: PyTorch asks for the device ten times a kernel.
    void leave_out_needless() {
        for (unsigned id = 0; id < MOST_CALLBACKS; id++)
            if (is_needless_[id].exchange(false, std::memory_order_relaxed))
                sanitizerEnableCallback(0, subscriber_, SANITIZER_CB_DOMAIN_RUNTIME_API, id);
    }
    void report_beyond(bool is_end) {
        uint64_t now_ns = monotonic_ns();
        if (!is_end && now_ns - reported_ns_ < REPORT_EVERY_NS) return;
        reported_ns_ = now_ns;
        if (!is_end) leave_out_needless();
        for (LostRecord lost : {LostRecord{0, 0, LOST_BUDGET, selection_.take_beyond()},
                                LostRecord{0, 0, LOST_CAPTURE, missed_.exchange(0)}})
            if (lost.warps) channel_.put(KIND_LOST_WARPS, &lost, sizeof lost);
    }
    static void set(const Sanitizer_LaunchData &data, const void *region) {
        sanitizerSetLaunchCallbackData(data.hLaunch, data.function, data.hStream, region);
    }
    void synchronized(Sanitizer_CallbackId id, const Sanitizer_SynchronizeData &data) {
        auto context = drain_.find(data.context);
        if (!context) return;
        // Launches by other threads since the call began may not have ended.
        Thread &current = thread();
        uint64_t sequence = current.depth ? current.begun_sequence : 0;
        bool is_stream = id == SANITIZER_CBID_SYNCHRONIZE_STREAM_SYNCHRONIZED;
        if (!sequence || (is_stream && !data.hStream)) return;
        context->synchronized(is_stream ? data.hStream : nullptr, sequence);
        if (!context->is_empty()) drain_.wake();
    }

    static inline Injection *only_;
    Channel channel_;
    Windows windows_{channel_};
    Selection selection_;
    Functions functions_{channel_, selection_};
    Drain drain_{channel_, functions_};
    std::vector<char> patches_;
    CallChoice choice_;
    Sanitizer_SubscriberHandle subscriber_ = nullptr;
    Quiet quiet_;
    std::atomic<bool> is_over_{false};
    std::mutex letting_go_;
    bool is_exiting_ = false;
    std::atomic<uint64_t> sequence_{0};
    CallTable arguments_;
    PythonStacks stacks_;
    CapturedGraphs graphs_;
    std::atomic<uint16_t> flags_[2][MOST_CALLBACKS] = {};
    std::atomic<const CallLayout *> layouts_[2][MOST_CALLBACKS] = {};
    std::atomic<bool> is_needless_[MOST_CALLBACKS] = {};  // runtime functions that have no use here
    std::mutex contexts_, graphs_mutex_;
    std::unordered_map<CUgraphExec, uint64_t> warps_of_graph_;  // of its last launch
    std::atomic<uint64_t> missed_{0};  // warps of modules that were loaded while another thread captured a stream
    std::atomic<bool> is_device_graph_reported_{false};
    uint64_t reported_ns_ = 0;
    const uint64_t started_ns_ = monotonic_ns();
    std::atomic<uint64_t> waited_ns_{0};  // until launches were read
    std::atomic<bool> is_hopeless_{false};
    std::atomic<uint64_t> hopeless_until_ns_{0};
};

}  // namespace
}  // namespace tracepipe

extern "C" __attribute__((visibility("default"))) int InitializeInjection() {
    tracepipe::Injection::begin();
    return 1;
}
