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
// Observed with CUPTI 13.0: nodeType is that of kernels for all nodes. A clone is created first, and cloned next. At the
// end of an instantiation, the nodes of child graphs and of conditional nodes move into the executable graph, under
// new numbers, of which no callback tells.
#pragma once
#include <algorithm>
#include <cupti.h>
#include <utility>
#include <vector>

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
                            CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING, CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED,
                            CUPTI_CBID_RESOURCE_GRAPH_NODE_UPDATED})
            subscription_.set(Subscription::NODES, CUPTI_CB_DOMAIN_RESOURCE, id, true);
    }
    void take(uint32_t id, const CUpti_ResourceData &given) {
        if (is_own_thread()) return;
        auto &data = *static_cast<const CUpti_GraphData *>(given.resourceDescriptor);
        thread_local Cloning *state = nullptr;  // outlives the thread's destructors, which may destroy graphs
        if (!state) state = new Cloning;
        Cloning &cloning = *state;
        switch (id) {
        case CUPTI_CBID_RESOURCE_GRAPHNODE_CREATED:
            // If the node before this one is no clone, the clones before that are not of an instantiation.
            if (cloning.created && !cloning.is_ending) cloning.clones.clear();
            cloning.created = data.node;
            return put(number_of(data.node), 0, stacks_.here(channel_, monotonic_ns()));
        case CUPTI_CBID_RESOURCE_GRAPHNODE_CLONED:
            cloning.created = nullptr;
            cloning.clones.emplace_back(data.node, number_of(data.node));
            return put(cloning.clones.back().second, number_of(data.originalNode));
        case CUPTI_CBID_RESOURCE_GRAPHNODE_DESTROY_STARTING: {
            auto &clones = cloning.clones;
            auto is_it = [&](auto &clone) { return clone.first == data.node; };
            return void(clones.erase(std::remove_if(clones.begin(), clones.end(), is_it), clones.end()));
        }
        case CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATE_STARTING:
            return void(cloning.is_ending = true);
        case CUPTI_CBID_RESOURCE_GRAPHEXEC_CREATED:
            for (auto [node, before] : cloning.clones)
                if (uint64_t number = number_of(node); number != before) put(number, before);
            [[fallthrough]];
        case CUPTI_CBID_RESOURCE_GRAPH_CLONED:
            cloning.clones.clear(), cloning.created = nullptr, cloning.is_ending = false;
            return;
        case CUPTI_CBID_RESOURCE_GRAPH_NODE_UPDATED:  // originalNode is the executable graph's
            return put(number_of(data.originalNode), number_of(data.node), NODE_UPDATED);
        }
    }

  private:
    // Of a thread: the clones of the instantiation that may be in progress, with their numbers so far; the node that
    // was created last, unless it is a clone; whether all clones are made.
    struct Cloning {
        std::vector<std::pair<CUgraphNode, uint64_t>> clones;
        CUgraphNode created = nullptr;
        bool is_ending = false;
    };

    static uint64_t number_of(CUgraphNode node) {
        uint64_t number = 0;
        return cuptiGetGraphNodeId(node, &number) == CUPTI_SUCCESS ? number : 0;
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
