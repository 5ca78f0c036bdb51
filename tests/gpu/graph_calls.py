"""Captures numbered kernels in CUDA graphs of each kind, and replays them.

python graph_calls.py LIBRARY [measure]

LIBRARY is made of graph_calls.cu. Prints the line of each kernel's capture by its number, as JSON. With
`measure`, prints the costs of a launch, a captured node, an instantiated node and a replay, in ns.
"""

import ctypes
import json
import sys
import threading

library = ctypes.CDLL(sys.argv[1])
for name in ("end", "make", "add", "add_child", "loop_begin", "clone", "instantiate"):
    getattr(library, name).restype = ctypes.c_void_p
lines = {}


def at(number):
    """A kernel's number; its line is the caller's."""
    lines[number] = sys._getframe(1).f_lineno
    return number


def call(name, *given):
    """Call a function with handles, or 0 for none, and a number at the end."""
    handles = [ctypes.c_void_p(one) if one is None or one >= 1 << 16 else one for one in given]
    return getattr(library, name)(*handles)


library.setup()
if sys.argv[2:] == ["measure"]:
    library.measure()
    sys.exit()

# One graph, made executable twice, and destroyed before it runs.
library.begin()
library.launch(at(1))
library.launch(at(2))
graph = library.end()
first, again = call("instantiate", graph), call("instantiate", graph)
call("destroy", graph)
call("replay", first), call("replay", again), library.wait()

# A graph with two child graphs: `middle`, which contains `inner`, and `inner` itself.
library.begin()
library.launch(at(3))
library.launch(at(4))
inner, middle, outer = library.end(), library.make(), library.make()
node = call("add", middle, None, at(5))
call("add_child", middle, node, inner)
node = call("add", outer, None, at(6))
node = call("add_child", outer, node, middle)
node = call("add_child", outer, node, inner)
node = call("add", outer, node, at(7))
executable = call("instantiate", outer)
call("destroy", outer), call("destroy", middle)
for _ in range(3):
    call("replay", executable)
library.wait()

# A clone; then its executable graph is updated with another one.
copy = call("clone", inner)
executable = call("instantiate", copy)
call("destroy", inner), call("destroy", copy)
call("replay", executable), library.wait()
library.begin()
library.launch(at(8))
library.launch(at(9))
graph = library.end()
call("update", executable, graph), call("destroy", graph)
call("replay", executable), library.wait()

# The body of a loop, which runs four times.
graph = library.loop_begin()
library.launch(at(10))
library.launch(at(11))
library.loop_end(4)
executable = call("instantiate", graph)
call("destroy", graph), call("replay", executable), library.wait()


def capture_on_second_stream():
    library.launch_second(at(12))
    library.launch_second(at(13))


# Two streams, captured by two threads.
library.begin(), library.fork_stream()
library.launch(at(14))
thread = threading.Thread(target=capture_on_second_stream)
thread.start(), thread.join()
library.launch(at(15))
library.join_stream()
graph = library.end()
executable = call("instantiate", graph)
call("destroy", graph), call("replay", executable), library.wait()

# Graphs that come and go, whose nodes are where earlier ones were.
for _ in range(200):
    library.begin()
    library.launch(at(16)), library.launch(at(17))
    graph = library.end()
    library.begin()
    library.launch(at(18)), library.launch(at(19))
    other = library.end()
    executable = call("instantiate", graph)
    call("destroy", graph), call("destroy", other)
    call("replay", executable), library.wait(), call("destroy_executable", executable)
print(json.dumps(lines))
