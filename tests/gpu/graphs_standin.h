// CUDA graphs for cupti_standin.cpp, which includes it: one that a program captures, and the last executable one. They have
// the callbacks that CUPTI 13.0 has for them, in its order.
//
//     instantiate   the captured nodes are cloned for an executable graph
//     nest          the same if they are in a child graph: their clones move into the executable one, where they get
//                   other numbers, and the node that had the child graph is destroyed
//     clone         the graph is copied, and the copy is captured into from now on
//     update        the executable graph does from now on what the captured nodes say
//     forget        the graph is destroyed: another one begins
//     replay        all nodes of the executable graph run
//     profile       the program calls cuProfilerStart

class GraphsStandin {
  public:
    void capture() { make(captured_); }
    void apply(const std::string &what) {
        if (what == "forget") {
            for (Node *node : captured_) call(CUPTI_CBID_RESOURCE_GRAPHNODE_DESTROY_STARTING, node), node->is_destroyed = true;
            captured_.clear(), graph_++;
        }
        if (what == "clone") {
            std::vector<Node *> copies = clones_of(captured_);
            captured_ = copies;
            call(CUPTI_CBID_RESOURCE_GRAPH_CLONED);
        }
        if (what == "instantiate" || what == "nest") instantiate(what == "nest");
        if (what == "update")
            for (size_t at = 0; at < captured_.size(); at++)
                call(CUPTI_CBID_RESOURCE_GRAPH_NODE_UPDATED, captured_[at], executable_.at(at));
        if (what == "replay") replay();
        if (what == "profile") ::call(CUPTI_DRIVER_TRACE_CBID_cuProfilerStart);
    }
    uint64_t number_of(CUgraphNode node) {
        if (reinterpret_cast<Node *>(node)->is_destroyed) abort();
        return reinterpret_cast<Node *>(node)->number;
    }

  private:
    struct Node {
        uint64_t number;
        bool is_destroyed = false;
    };

    static CUgraphNode handle_of(Node *node) { return reinterpret_cast<CUgraphNode>(node); }
    void call(uint32_t id, Node *node = nullptr, Node *original = nullptr) {
        if (!is_called_for(CUPTI_CB_DOMAIN_RESOURCE, id)) return;
        CUpti_GraphData data{};
        data.node = handle_of(node), data.originalNode = handle_of(original);
        if (node) data.graph = reinterpret_cast<CUgraph>(node->number >> 32);
        if (id == CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED) data.graphExec = reinterpret_cast<CUgraphExec>(uint64_t(executable_graph_));
        CUpti_ResourceData resource{};
        resource.resourceDescriptor = &data;
        called_back(of_subscriber, CUPTI_CB_DOMAIN_RESOURCE, id, &resource);
    }
    Node *make(std::vector<Node *> &into) {
        into.push_back(new Node{uint64_t(graph_) << 32 | nodes_++});
        call(CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, into.back());
        return into.back();
    }
    std::vector<Node *> clones_of(const std::vector<Node *> &originals) {
        std::vector<Node *> clones;
        graph_++;
        for (Node *original : originals) call(CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED, make(clones), original);
        return clones;
    }
    void instantiate(bool is_nested) {
        std::vector<Node *> others;
        Node *original = nullptr, *parent = nullptr;
        if (is_nested) captured_ = clones_of(captured_), original = make(others);
        executable_graph_ = graph_ + 1;
        if (is_nested) {
            graph_++;
            executable_ = clones_of(captured_);
            uint32_t of_child = std::exchange(graph_, executable_graph_);
            parent = make(others), graph_ = of_child;
            call(CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED, parent, original);
            graph_++, make(others), make(others);
        } else {
            executable_ = clones_of(captured_);
        }
        call(CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING);
        if (is_nested) {
            call(CUPTI_CBID_RESOURCE_GRAPHNODE_DESTROY_STARTING, parent);
            parent->is_destroyed = true;
            for (Node *node : executable_) node->number = uint64_t(executable_graph_) << 32 | (node->number + 1000);
        }
        make(others), make(others);
        call(CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED);
    }
    void replay() {
        correlation = ++correlations;
        std::lock_guard lock(mutex);
        if (!kinds.count(CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL)) return;
        for (Node *node : executable_) {
            CUpti_ActivityKernel10 record{};
            record.kind = CUPTI_ACTIVITY_KIND_CONCURRENT_KERNEL, record.correlationId = correlation;
            record.name = "f", record.gridX = record.gridY = record.gridZ = 1;
            record.blockX = 256, record.blockY = record.blockZ = 1;
            record.graphId = 5, record.graphNodeId = node->number;
            run(record, 0);
            add(record);
        }
    }

    std::vector<Node *> captured_, executable_;
    uint32_t graph_ = 1, nodes_ = 0, executable_graph_ = 0;
};
GraphsStandin &graphs = *new GraphsStandin;
