"""Captures kernels in CUDA graphs by a stand-in of Compute Sanitizer, and launches the graphs.

python node_launches_of_python.py LIBRARY

Prints a list: for each kernel that a graph's launch ran, in order, its function and the line of its capture,
null where that cannot be known.
"""

import ctypes
import json
import sys

library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
printed = []


def apply(line):
    library.standin_apply(line.encode())


def capture(function):
    apply(f"capture:{function}")
    return sys._getframe(1).f_lineno


def replay(number, kernels):
    apply(f"replay {number}:{','.join(function for function, _ in kernels)}")
    printed.extend(kernels)


library.InitializeInjection()
library.standin_begin()

apply("begin")
first = [("one", capture("one"))]
apply("launch:other")  # meanwhile, and not into the graph
first += [("two", capture("two"))]
first += [("one", capture("one"))]
apply("end 1")
apply("instantiate 1")
replay(1, first)
replay(1, first)
unknown = [(function, None) for function, _ in first]
replay(1, unknown[:2])  # a node was disabled, or the order is another
replay(1, unknown[::-1][1:] + unknown[:1])

apply("begin")
apply("begin")  # two at a time
capture("one")
apply("end 2")
apply("end 3")
apply("instantiate 2")
replay(2, [("one", None)])

apply("begin")
second = [("three", capture("three"))]
apply("end 4")
apply("exchange 1:4")
replay(1, second)
print(json.dumps(printed))
