/* Classic BPF's instruction classes: included by the bpf(2) definitions, used by no program here. */
