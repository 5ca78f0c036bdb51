"""More stacks than are kept: of a process, and of a thread until its calls come.

python many_stacks.py LIBRARY STACKS NOTES
"""

import ctypes
import json
import sys

library = ctypes.CDLL(sys.argv[1])
for function in (library.here, library.note, library.at):
    function.restype = ctypes.c_uint64
library.at.argtypes = (ctypes.c_uint64,)


def from_lines(count, call):
    """The result of a function that is called from `count` lines, of functions of 1000 each."""
    found = []
    for part in range(0, count, 1000):
        lines = " found.append(call())\n" * min(1000, count - part)
        exec(compile(f"def lines():\n{lines}lines()", f"{part}.py", "exec"), {"found": found, "call": call})
    return found


assert library.begin()
notes = from_lines(int(sys.argv[3]), library.note)
library.collect()
known = [library.at(time_ns) for time_ns in notes]
numbers = from_lines(int(sys.argv[2]), library.here)
print(
    json.dumps(
        {
            "known": [bool(stack) for stack in known],
            "differ": len(set(known)) - 1,
            "numbers": len(set(numbers) - {0}),
        }
    )
)
