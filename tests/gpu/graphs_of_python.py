"""Captures kernels in CUDA graphs by a stand-in of NVIDIA's libraries, and replays them.

python graphs_of_python.py LIBRARY [late]

With `late`, the program calls cuProfilerStart before its last replay, and prints that replay alone.
Prints a list: for each kernel that was replayed, in order, the frames of its capture, innermost first, as
[file, line, function], or what stands for them.
"""

import ctypes
import json
import sys
import threading
import traceback

library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
captured, replayed = [], []


def capture():
    frames = [[f.filename, f.lineno, f.name] for f in reversed(traceback.extract_stack())]
    frames[0][1] += 2  # the next line
    captured.append(frames), library.standin_capture()


def graph(what):
    library.standin_graph(what.encode())


def replay(expected):
    graph("replay")
    replayed.extend(expected)


class Model:
    def forward(self):
        for _ in range(2):
            capture()
        capture()

    def backward(self):
        capture()


library.InitializeInjection()
model = Model()
model.forward()
first = [*captured]
graph("instantiate")
for _ in range(3):
    replay(first)
graph("instantiate")  # the same graph a second time
graph("forget")
replay(first)

captured.clear()
model.backward(), model.forward()
graph("nest")
graph("forget")
replay(captured)

captured.clear()
model.forward()
graph("clone")
graph("instantiate")
replay(captured)
graph("forget")
captured.clear()
model.backward(), model.backward(), model.backward()
graph("update")
replay(captured)
graph("forget")

# From several threads, into one graph, as a fork of streams.
captured.clear()
for _ in range(3):
    thread = threading.Thread(target=model.forward)
    thread.start(), thread.join()
graph("instantiate")
if sys.argv[2:] == ["late"]:
    replayed.clear()
    graph("profile")
replay(captured)
print(json.dumps(replayed))
