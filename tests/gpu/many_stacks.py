"""More stacks than are kept of a process; prints how many different numbers they have.

python many_stacks.py LIBRARY STACKS
"""

import ctypes
import sys

library = ctypes.CDLL(sys.argv[1])
library.here.restype = ctypes.c_uint64


def from_lines(count, call):
    """The result of a function that is called from `count` lines, of functions of 1000 each."""
    found = []
    for part in range(0, count, 1000):
        lines = " found.append(call())\n" * min(1000, count - part)
        exec(compile(f"def lines():\n{lines}lines()", f"{part}.py", "exec"), {"found": found, "call": call})
    return found


assert library.begin()
print(len(set(from_lines(int(sys.argv[2]), library.here)) - {0}))
