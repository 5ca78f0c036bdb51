"""Runs in each version of Python: what the reader reads is what Python says of its frames itself.

python frames_of_python.py LIBRARY
"""

import asyncio
import ctypes
import gc
import sys
import threading

checked = 0
room = ctypes.create_string_buffer(1 << 16)
released, held = ctypes.CDLL(sys.argv[1]), ctypes.PyDLL(sys.argv[1])
released.stack.restype = ctypes.c_uint64


def expected(frame):
    lines = []
    while frame is not None and len(lines) < 127:  # and the one that asks
        code = frame.f_code
        lines.append(f"{code.co_filename}:{frame.f_lineno} {getattr(code, 'co_qualname', code.co_name)}")
        frame = frame.f_back
    return lines


def check(frame):
    """Compare the frames around this one, which is on another line in each."""
    global checked
    for library in (released, held):
        place = ctypes.create_string_buffer(1 << 16)
        count = library.frames(place, len(place))
        read = place.value.decode().splitlines()
        assert count == len(read), (count, read)
        assert read[1:] == expected(frame), f"\n{read[1:]}\n{expected(frame)}"
        checked += 1


def nested(depth):
    if depth:
        nested(depth - 1)
    else:
        check(sys._getframe())


def generator():
    for number in range(3):
        check(sys._getframe())
        yield number


class Model:
    def forward(self):
        (lambda: check(sys._getframe()))()
        return [check(sys._getframe()) for _ in range(2)]


async def waits():
    check(sys._getframe())
    await asyncio.sleep(0)
    check(sys._getframe())


def in_a_callback():
    sorted([2, 1], key=lambda item: check(sys._getframe()) or item)
    try:
        raise ValueError
    except ValueError:
        check(sys._getframe())
    finally:
        check(sys._getframe())


def größe():
    check(sys._getframe())


def code_that_goes():
    """Functions whose code is gone when the next one is made, perhaps in its place."""
    stacks = set()
    for number in range(200):
        room = {"check": check, "sys": sys, "stack": released.stack}
        source = (
            "\n" * (number % 7) + f"def made_{number}():\n    check(sys._getframe())\n    return stack()\n"
        )
        exec(compile(source, f"made_{number}.py", "exec"), room)
        stacks.add(room[f"made_{number}"]())
        del room
        gc.collect(0)
    assert len(stacks) == 200, len(stacks)


def main():
    nested(0)
    nested(10)
    nested(100)
    nested(300)
    list(generator())
    next(generator())
    Model().forward()
    asyncio.run(waits())
    in_a_callback()
    größe()
    code_that_goes()
    threads = [
        threading.Thread(target=work) for work in (nested_often, Model().forward, größe) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    here = {released.stack() for _ in range(3)}
    assert len(here) == 1 and here != {released.stack()}, here


def nested_often():
    for depth in range(30):
        nested(depth)


main()
print(checked)
