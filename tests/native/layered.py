"""Lines of layered tracers: the core and Python alone read the same events and problems from them."""

from __future__ import annotations

import ctypes
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from tests.native import inputs
from tests.support.batches import read_all
from tracepipe import native
from tracepipe.readers import layered

_TYPES = (
    "userspace", "userspace", "userspace", "syscall", "kernel", "scheduler", "scheduler", "memory",
    "transfer", "hook", "ioctl", "gpu_mem", "gpu_thread", "gpu_thread_exit", "kernel_memory", "mine",
)  # fmt: skip
_NAMES = (
    "f", "g", "ioctl", "cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuLaunchKernel", "uprobe:/lib/a.so:f", "é",
    "n" * 300,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    0, 1, 7, -5, 1 << 40, (1 << 63) - 1, 1 << 63, 1 << 64, 1.5, 0.1 + 0.2, 1e-7, 1e22, True, None, "a",
    'q"\\', "\x01", "\x010", "\u2028", "0x123", "D2H", "alloc", "free", [1, 2, 3], [0, 0], [], [[1]], {},
    {"a": {"b": 1.5}}, {"dir": 3, "nr": [1]},
)  # fmt: skip
_KEYS = (
    "event_id", "size", "op", "direction", "kind", "layer", "cmd", "ioctl_cmd", "result", "retval",
    "kernel", "gpu", "device", "block", "thread", "start_ts", "of_event", "probe", "call", "duration_us",
    "duration_ms", "total", "gpu_id", "name", "type", "ts", "args", "pid", "comm", "é", "placed", "ts_ns",
)  # fmt: skip
_PAUSE_MS = 0.05
_OTHER_LINES = (
    b"", b"# Heartbeat: 3 events", b"=== SUMMARY ===", b"Lost 12 events", b"[1]", b"{", b"\xff", b"hello",
    b'{"type":"printf","data":"{\\"ts\\":1,"}', b'{"a":{}}', b'{"type":"lost_events","data":{"events":3}}',
    b'{"type":"printf","data":"\\"type\\":\\"kernel\\",\\"name\\":\\"f\\"}\\n"}',
    b'{"ts":1,"type":"kernel","name":"f","a":1,"a":2}', b'{"ts":01,"type":"kernel","name":"f"}',
    b'{"ts":1,"type":"kernel","name":"f","args":{"a":1,"a":2}}', b'{"ts":1,"type":"kernel","name":"f"}x',
    b'{"ts":1,"type":"kernel","type":"memory","name":"f"}',
)  # fmt: skip


def layered_read(core: ctypes.CDLL, rng: Random) -> None:
    """Reading a whole file, twice."""
    native.CORE = Path(core._name)
    expect_the_same(rng)


def expect_the_same(rng: Random) -> None:
    """What is read from a file is the same with and without the core, however much is read at once."""
    data = text(rng)
    layered.LayeredLines.chunk_bytes = rng.choice((300, 5000, 1 << 18))
    layered.KEYS_MAX = rng.choice((1, 3, 1 << 12))
    layered._STEMS_MAX = rng.choice((2, 1 << 12))
    read = {}
    for os.environ[native.PURE] in ("1", "0"):
        recording = layered.read(io.BytesIO(data))
        read[os.environ[native.PURE]] = recording.header, *read_all(recording)
    assert read["1"] == read["0"]


def text(rng: Random) -> bytes:
    """The text of a file: usual lines as a rule, in the order of time as a rule."""
    ms, lines, forms = rng.randrange(1000), [], [_form(rng) for _ in range(rng.randrange(1, 8))]
    odd = rng.choice((0, 0, 0.02, 0.1))
    for _ in range(rng.randrange(rng.choice((60, 60, 400)))):
        ms += rng.choice((0, 0.01, 0.05, 0.000001, 3))
        if rng.random() < 0.03:
            ms = max(0, ms + rng.choice((-0.5, -1001, -5000, 1e10, 7e8)))
        if rng.random() < odd:
            lines.append(rng.choice(_OTHER_LINES))
            continue
        form = rng.choice(forms)
        if rng.random() < 0.3:
            lines.append(_line(rng, form, ms, odd))
            ms += _PAUSE_MS
            form = form | {"duration_us": 1000 * _PAUSE_MS, **({"phase": "E"} if rng.random() < 0.3 else {})}
        line = _line(rng, form, ms, odd)
        lines.append(inputs.mutated(rng, line) if rng.random() < odd / 3 else line)
    if rng.random() < 0.4:
        lines = [record for line in lines for record in _records(rng, line.decode("utf-8", "replace"), odd)]
    return rng.choice((b"\n", b"\n", b"\r\n")).join(lines) + rng.choice((b"", b"\n"))


def _records(rng: Random, line: str, odd: float) -> Iterator[bytes]:
    """A line in records of `bpftrace -f json`: as a rule in one."""
    ending = (
        rng.choice(("", "\n\n", "\\n", '\n{"ts":1,"type":"kernel","name":"f"}\n'))
        if rng.random() < odd
        else "\n"
    )
    cut = rng.randrange(len(line) + 1) if rng.random() < odd else 0
    for data in (line[:cut], line[cut:] + ending):
        record = json.dumps({"type": "printf", "data": data}, ensure_ascii=rng.random() < 0.5).encode()
        if data and rng.random() < odd / 2:
            record = rng.choice((inputs.mutated(rng, record), record.replace(b" ", b""), data.encode()))
        if data:
            yield record


def _form(rng: Random) -> dict[str, Any]:
    """The keys of some lines, with values."""
    form: dict[str, Any] = {"event_id": 1, "ts": 0, "type": rng.choice(_TYPES), "name": rng.choice(_NAMES)}
    for key, values in (
        ("phase", ("B", "E", "E", "I")),
        ("pid", (7,)),
        ("tid", (7, 8)),
        ("cpu", (0, 1)),
        ("comm", ("a",)),
        ("args", ({"a": 1}, {}, {"a": 1, "result": 0, "duration_us": 2})),
        ("duration_us", (10.0, 50)),
        ("op", ("alloc", "launch")),
        ("block", ([1, 2, 3],)),
        ("thread", ([1, 2, 3], 5)),
        ("direction", ("H2D",)),
        ("start_ts", (1.5,)),
    ):
        if rng.random() < 0.25:
            form[key] = rng.choice(values)
    items = list(form.items())
    if rng.random() < 0.3:
        rng.shuffle(items)
    return dict(items)


def _line(rng: Random, form: dict[str, Any], ms: float, odd: float) -> bytes:
    line = dict(form)
    line["ts"] = round(ms, rng.choice((6, 6, 6, 3, 9)))
    for key in ("duration_us", "duration_ms"):
        if key in line and rng.random() < 0.4:
            line[key] = rng.choice((10.0, 50, 0.0005, 12.3456, 1e-5, 9e9, 49.999, 1 << 62, 12345678.9012345))
    for key in ("event_id", "a"):
        if key in line:
            # As a rule all are different: the core looks less often for those that were there before.
            is_odd = rng.random() < (0.5 if odd else 0.05)
            line[key] = rng.choice(_VALUES) if is_odd else rng.randrange(1 << 50)
    while rng.random() < odd:
        line[rng.choice(_KEYS)] = rng.choice(_VALUES)
    while rng.random() < odd:
        line[rng.choice(("type", "name", "phase"))] = rng.choice((*_TYPES, *_NAMES, "B", "X", 5))
    while rng.random() < odd:
        line["args"] = {rng.choice(_KEYS): rng.choice(_VALUES) for _ in range(rng.randrange(3))}
    while rng.random() < odd and line:
        del line[rng.choice(list(line))]
    separators = rng.choice(((",", ":"), (",", ":"), (", ", ": ")))
    return json.dumps(line, separators=separators, ensure_ascii=rng.random() < 0.3).encode("utf-8", "replace")
