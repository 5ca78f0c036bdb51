// SPDX-License-Identifier: MIT
// Which line of Python made each node of a CUDA graph, from CUPTI's callbacks about nodes.
//
//     capture, or cuGraphAdd…Node ──▶ node 7, stack        a record of a kernel has the number of the
//     instantiation, clone, child ──▶ node 9, clone of 7   node that ran: of an executable graph's clone
//     cuGraphExecUpdate           ──▶ node 9, clone of 8
//
// A replay has no callbacks, and a launch outside of a capture neither. The callbacks stay between windows, as a graph
// is mostly captured once, and replayed later.
//
// Observed with CUPTI 13.0: nodeType is that of kernels for all nodes. A clone is created first, and cloned next. The
// upper half of a node's number is that of its graph, and later graphs have greater ones. An instantiation clones the
// nodes of the graph and of its child graphs, each of these into a graph of its own. At its end, the nodes of child
// graphs and of conditional nodes move into the executable graph, under new numbers, of which no callback tells.
#pragma once
#include <cupti.h>
#include <unordered_map>

#include "kernel_records.h"
#include "own_thread.h"
#include "python_stacks.h"
#include "subscription.h"
#include "transport.h"

namespace tracepipe {

class GraphNodes {
  public:
    GraphNodes(Channel &channel, Subscription &subscription, PythonStacks &stacks)
        : channel_(channel), subscription_(subscription), stacks_(stacks) {}

    void open() {
        for (uint32_t id : {CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED, CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED,
                            CUPTI_CBID_RESOURCE_GRAPHNODE_DESTROY_STARTING, CUPTI_CBID_RESOURCE_GRAPH_CLONED,
                            CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED, CUPTI_CBID_RESOURCE_GRAPH_NODE_UPDATED})
            subscription_.set(Subscription::NODES, CUPTI_CB_DOMAIN_RESOURCE, id, true);
    }
    void take(uint32_t id, const CUpti_ResourceData &given) {
        if (is_own_thread()) return;
        auto &data = *static_cast<const CUpti_GraphData *>(given.resourceDescriptor);
        thread_local Clones *of_thread = nullptr;  // outlives the thread's destructors, which may destroy graphs
        if (!of_thread) of_thread = new Clones;
        auto &[nodes, graphs] = *of_thread;
        switch (id) {
        case CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED:
            return put(number_of(data.node), 0, stacks_.here(channel_, monotonic_ns()));
        case CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED: {
            if (nodes.size() >= CLONES_MAX) nodes.clear(), graphs.clear();
            uint64_t number = number_of(data.node);
            nodes[data.node] = number, graphs[data.graph] = graph_of(number);
            return put(number, number_of(data.originalNode));
        }
        case CUPTI_CBID_RESOURCE_GRAPHNODE_DESTROY_STARTING:
            return void(nodes.erase(data.node));
        case CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED: {
            auto own = graphs.find(reinterpret_cast<CUgraph>(data.graphExec));
            if (own != graphs.end())
                for (auto [node, before] : nodes)
                    if (graph_of(before) >= own->second) renumber(node, before);
            [[fallthrough]];
        }
        case CUPTI_CBID_RESOURCE_GRAPH_CLONED:
            return nodes.clear(), graphs.clear();
        case CUPTI_CBID_RESOURCE_GRAPH_NODE_UPDATED:  // originalNode is the executable graph's
            return put(number_of(data.originalNode), number_of(data.node), NODE_UPDATED);
        }
    }

  private:
    // Of a thread: the clones since its last instantiation, which may be of the next one, and their graphs, with the
    // numbers of both. An executable graph has one handle as such and as a graph.
    struct Clones {
        std::unordered_map<CUgraphNode, uint64_t> nodes;
        std::unordered_map<CUgraph, uint64_t> graphs;
    };
    static constexpr size_t CLONES_MAX = 1 << 20;

    static uint64_t graph_of(uint64_t node) { return node >> 32; }
    static uint64_t number_of(CUgraphNode node) {
        uint64_t number = 0;
        return cuptiGetGraphNodeId(node, &number) == CUPTI_SUCCESS ? number : 0;
    }
    void renumber(CUgraphNode node, uint64_t before) {
        if (uint64_t number = number_of(node); number != before) put(number, before);
    }
    void put(uint64_t number, uint64_t original, uint64_t stack = 0) {
        Node node{number, original, stack};
        if (number) channel_.put(KIND_NODE, &node, sizeof node);
    }

    Channel &channel_;
    Subscription &subscription_;
    PythonStacks &stacks_;
};

}  // namespace tracepipe
