"""Launches kernels by a stand-in of NVIDIA's libraries, and prints where each launch is, as Python says.

python stacks_of_python.py LIBRARY

Each line is a list of frames, innermost first, as [file, line, function].
"""

import asyncio
import ctypes
import json
import sys
import threading
import traceback

library = ctypes.CDLL(sys.argv[1], mode=ctypes.RTLD_GLOBAL)
lock = threading.Lock()
printed = []


def frames():
    """Where the caller is called, in whose line the launch is too."""
    return [[frame.filename, frame.lineno, frame.name] for frame in reversed(traceback.extract_stack()[:-1])]


def launch():
    """A launch, which a lock keeps in the order of the list."""
    with lock:
        printed.append(frames()), library.standin_launch()  # on one line


def nested(depth):
    if depth:
        nested(depth - 1)
    else:
        launch()


def generator():
    for _ in range(2):
        launch()
        yield


class Model:
    def forward(self):
        (lambda: launch())()
        return [launch() for _ in range(2)]


async def waits():
    launch()
    await asyncio.sleep(0)
    launch()


def often():
    for _ in range(3):
        launch()
    launch(), launch()


library.InitializeInjection()
nested(0)
nested(50)
nested(200)
list(generator())
Model().forward()
asyncio.run(waits())
often()
threads = [threading.Thread(target=work) for work in (often, Model().forward, often) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(json.dumps(printed))
