"""What a traced process may send: every record becomes lines that a reader takes, or a loss that says why.

The records are those that a library writes, with some of their bytes changed, cut and added by a generator
that has a seed. Nothing here knows which of them are good.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable

import pytest

from tests.support.gpu_records import annotation_renderer, kernel_renderer, pack_record, warp_renderer
from tracepipe.event.checks import first_fault
from tracepipe.event.model import COUNT_LIMIT
from tracepipe.tracer.gpu.engines import annotations, api_calls, kernels, stalls
from tracepipe.tracer.gpu.engines import warps as layout
from tracepipe.tracer.gpu.engines.channel import (
    CROWDED,
    GPU,
    MALFORMED,
    NAME,
    NAME_BYTES,
    Crowded,
    Kind,
    MemoryLimit,
)
from tracepipe.tracer.gpu.engines.streams import FRAME, STACK, GpuRenderer, Recording

Make = Callable[[], GpuRenderer]

API = 1 << 63 | 1 << 62 | 307
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 48, (1 << 62) - 1, 1 << 63, (1 << 64) - 1)


def _columns() -> bytes:
    """Three warps with four exits and three ranges, each column as wide as the library writes it."""
    columns = [
        (1, 8, [7, 8, 9]), (2, 2, [0, 1, 2]), (3, 2, [5, 6, 7]), (4, 4, [0, 32, 64]), (5, 8, [10, 20, 30]),
        (6, 4, [3, 3, 3]), (7, 4, [1, 2, 1]), (8, 4, [9] * 4), (9, 4, [8] * 4), (10, 4, [1, 1, 2, 3]),
        (12, 4, [2, 0, 1]), (13, 8, [1, 5, 1]), (14, 4, [0, 2, 1]), (15, 4, [8, 3, 7]), (16, 4, [0, 0, 1]),
    ]  # fmt: skip
    heads = b"".join(layout.COLUMN.pack(number, width, len(values)) for number, width, values in columns)
    body = b""
    for _, width, values in columns:
        column = struct.pack(f"<{len(values)}{ {2: 'H', 4: 'I', 8: 'Q'}[width] }", *values)
        body += column + bytes(-len(column) % 8)
    return layout.WARPS.pack(3, 1000, 3, 4, len(columns)) + heads + body


COMMON = [
    (Kind.NAME, NAME.pack(1) + b"void f<int>(int*)"),
    (Kind.NAME, NAME.pack(API) + b"cuLaunchKernel"),
    (Kind.GPU, GPU.pack(0, 132, 9, 0, 1980000, 64, 32, 65536, 233472, 0, bytes(range(16))) + b"NVIDIA H200"),
    (Kind.NOTE, b"a note"),
    (Kind.FRAME, FRAME.pack(7, 41, 4) + b"steptrain.py"),
    (Kind.STACK, STACK.pack(77, 1, 2) + NAME.pack(7) * 2),
]
OF_WARPS = [
    *COMMON,
    (Kind.CLOCK, layout.CLOCK.pack(0, 500, 10, 20)),
    (layout.WarpKind.KERNEL, layout.KERNEL.pack(
        3, 1, 5, 0, 4, 1, 1, 64, 1, 1, 0, 0, 0, 900, 43, 1, 1000, 2000, 8, 8, 8, 40, 512, 77)),
    (layout.WarpKind.WARPS, _columns()),
    (layout.WarpKind.CALL_ENTER, api_calls.CALL_ENTER.pack(API, 9, 1, 77, 5, 6, 0) + bytes(48)),
    (layout.WarpKind.CALL_EXIT, api_calls.CALL_EXIT.pack(API, 1, 6, 0)),
    (layout.WarpKind.LOST_WARPS, layout.LOST_WARPS.pack(3, 0, 1, 500)),
]  # fmt: skip
OF_KERNELS = [
    *COMMON,
    (kernels.KernelKind.HELLO, kernels.HELLO.pack(130001, 0, 1, 2, 3)),
    (kernels.KernelKind.CALL_NAME, struct.pack("<II", 2, 211) + b"cudaLaunchKernel_v7000"),
    (kernels.KernelKind.CALL, kernels.CALL.pack(10, 20, 77, 2, 211, 43, 7, 0, 1, 14, 5) * 2),
    (kernels.KernelKind.KERNEL, kernels.KERNEL.pack(
        30, 40, 1, 0, 0, 1, 7, 7, 64, 1, 1, 128, 1, 1, 0, 0, 0, 16, 32, 54, 0, 0, 0, 0) * 2),
    (kernels.KernelKind.NODE, kernels.NODE.pack(5, 0, 77)),
    (kernels.KernelKind.NODE, kernels.NODE.pack(6, 5, 1)),
    (kernels.KernelKind.COPY, kernels.COPY.pack(30, 40, 4096, 6, 0, 1, 7, 8, 3, 0, 1, 1, 3, 0)),
    (kernels.KernelKind.SET, kernels.SET.pack(30, 40, 4096, 0, 0, 1, 7, 9, 0, 1, 3)),
    (kernels.KernelKind.MEMORY, kernels.MEMORY.pack(30, 4096, 1 << 40, 0, 1, 7, 10, 1, 3)),
    (kernels.KernelKind.TAKEN, kernels.TAKEN.pack(50, 60)),
    (stalls.StallKind.STALL_REASON, stalls.REASON.pack(3) + b"barrier"),
    (stalls.StallKind.STALLS, stalls.HEAD.pack(5, 9, 0, 18) + stalls.STALL.pack(1, 3, 9) * 2),
    (stalls.StallKind.STALL_PCS, stalls.HEAD.pack(5, 9, 0, 18)
     + stalls.STALL_PC.pack(1, 7, 16, 1, 3, 9) * 2),
    (stalls.StallKind.STALL_LOSS, stalls.LOSS.pack(5, 9, 30) + b"the buffer was full"),
]  # fmt: skip
OF_ANNOTATIONS = [
    (annotations.AnnotationKind.LABEL, annotations.LABEL.pack(1, 0, 0, 4096) + b"data"),
    (annotations.AnnotationKind.LABEL, annotations.LABEL.pack(2, 0, 4096, 8192) + b"registered"),
    (annotations.AnnotationKind.LABEL, annotations.LABEL.pack(3, 0, 4096, 3) + b"weights"),
    (annotations.AnnotationKind.LABEL, annotations.LABEL.pack(4, 0, 0, 43) + b"trainer"),
    (
        annotations.AnnotationKind.MARK,
        annotations.BEGUN.pack(0, 0, 0, bytes(8), 3, 1, 0xFF76B900, 0, 0) + b"x",
    ),
    (annotations.AnnotationKind.PUSH, annotations.BEGUN.pack(4096, 8192, 0, bytes(8), 0, 0, 0, 3, 0)),
    (annotations.AnnotationKind.POP, annotations.ENDED.pack(4096, 0)),
    (annotations.AnnotationKind.START, annotations.BEGUN.pack(0, 0, 1, bytes(8), 1, 0, 0, 0, 0) + b"y"),
    (annotations.AnnotationKind.END, annotations.ENDED.pack(0, 1)),
]
ENGINES = [
    pytest.param(warp_renderer, OF_WARPS, id="warps"),
    pytest.param(kernel_renderer, OF_KERNELS, id="kernels"),
    pytest.param(annotation_renderer, OF_ANNOTATIONS, id="annotations"),
]


def _forged(chance: random.Random, payload: bytes) -> bytes:
    """A payload with some of its words changed, and perhaps another length."""
    changed = bytearray(payload)
    for _ in range(chance.choice((0, 1, 1, 2, 5))):
        width = chance.choice((1, 2, 4, 8))
        if len(changed) >= width:
            at = chance.randrange(0, len(changed) - width + 1) // width * width
            value = chance.choice((*EXTREMES, chance.getrandbits(64))) & (1 << 8 * width) - 1
            changed[at : at + width] = value.to_bytes(width, "little")
    cut = chance.random()
    if cut < 0.15:
        del changed[chance.randrange(0, len(changed) + 1) :]
    elif cut < 0.3:
        changed += chance.randbytes(chance.randrange(1, 200))
    return bytes(changed)


def _lines(renderer: GpuRenderer, chunk: bytes) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in renderer.render(chunk).texts]
    assert [fault for fault in map(first_fault, lines) if fault] == []
    return lines


def _lost(lines: list[dict[str, object]], reason: str) -> int:
    return sum(int(str(line["count"])) for line in lines if line.get("reason") == reason)


@pytest.mark.parametrize(("make", "good"), ENGINES)
def test_the_records_that_are_changed_below_are_good(make: Make, good: list[tuple[int, bytes]]) -> None:
    lines = _lines(make(), b"".join(pack_record(kind, 42, 43, 1000, payload) for kind, payload in good))
    assert _lost(lines, MALFORMED) == 0
    assert len(lines) >= 6


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(("make", "good"), ENGINES)
def test_whatever_comes_the_file_is_one_that_can_be_read(
    make: Make, good: list[tuple[int, bytes]], seed: int
) -> None:
    chance = random.Random(seed)
    renderer, refused = make(), 0
    for _ in range(40):
        chunk = b""
        for _ in range(20):
            kind, payload = chance.choice(good)
            if chance.random() < 0.05:
                kind = chance.getrandbits(16)
            pid, tid = (chance.choice((42, 43, chance.getrandbits(32))) for _ in range(2))
            time_ns = chance.choice((1000, chance.getrandbits(64)))
            chunk += pack_record(kind, pid, tid, time_ns, _forged(chance, payload))
        assert sum(renderer.counts(chunk).values()) <= len(chunk)
        lines = _lines(renderer, chunk)
        refused += _lost(lines, MALFORMED) + _lost(lines, CROWDED)
    assert refused > 50
    assert renderer.losses["unknown"] == refused
    assert all(line.isprintable() for line in renderer.notes)


@pytest.mark.parametrize(("make", "good"), ENGINES)
def test_a_payload_that_is_cut_anywhere_is_a_record_or_a_loss(
    make: Make, good: list[tuple[int, bytes]]
) -> None:
    for kind, payload in good:
        for size_bytes in range(len(payload)):
            _lines(make(), pack_record(kind, 42, 43, 1000, payload[:size_bytes]))


def test_a_batch_that_claims_more_warps_than_it_has_is_refused() -> None:
    first = layout.COLUMN.pack(11, 8, 1) + layout.COLUMN.pack(4, 4, 1) + layout.COLUMN.pack(8, 4, 1)
    payload = layout.WARPS.pack(3, 0, 0xFFFFFFFF, 0xFFFFFFFF, 3) + first + bytes(24)
    lines = _lines(warp_renderer(), pack_record(layout.WarpKind.WARPS, 42, 43, 1, payload))
    assert _lost(lines, MALFORMED) == len(lines) == 1


@pytest.mark.parametrize("make", [warp_renderer, kernel_renderer])
def test_no_more_is_kept_than_there_is_room_for(make: Make) -> None:
    renderer = make()
    renderer.recording.memory.left_bytes = 100_000
    many = [pack_record(Kind.NAME, 42, 43, 1, NAME.pack(at) + b"name") for at in range(1000)]
    lines = _lines(renderer, b"".join(many))
    assert 0 < _lost(lines, CROWDED) < 1000
    processes = [pack_record(Kind.NOTE, pid, pid, 1, b"x") for pid in range(1000)]
    assert _lost(_lines(renderer, b"".join(processes)), CROWDED) == 1000


def test_functions_and_threads_take_room_too() -> None:
    renderer = warp_renderer()
    renderer.recording.memory.left_bytes = 40_000
    functions = b"".join(
        pack_record(Kind.NAME, 42, 43, 1, NAME.pack(1 << 63 | at) + b"cuF%d" % at)
        + pack_record(layout.WarpKind.CALL_EXIT, 42, at, 2, api_calls.CALL_EXIT.pack(1 << 63 | at, 0, 0, 0))
        for at in range(100)
    )
    assert _lost(_lines(renderer, functions), CROWDED) > 90


def test_gpus_are_as_many_as_a_machine_has() -> None:
    renderer = kernel_renderer()
    gpus = [
        pack_record(Kind.GPU, 42, 43, 1, GPU.pack(at, 1, 9, 0, 1, 0, 0, 0, 0, 0, at.to_bytes(16, "big")))
        for at in range(400)
    ]
    assert _lost(_lines(renderer, b"".join(gpus)), CROWDED) == 400 - 256
    assert len({gpu["index"] for gpu in renderer.gpus}) == 256


def test_a_name_without_an_end_is_cut() -> None:
    name = pack_record(Kind.NAME, 42, 43, 1, NAME.pack(1) + b"x" * (1 << 20))
    kernel = pack_record(*OF_KERNELS[9][:1], 42, 43, 1, OF_KERNELS[9][1])
    assert {len(str(line["name"])) for line in _lines(kernel_renderer(), name + kernel)} == {NAME_BYTES}


def test_a_loss_is_at_most_what_a_file_can_state() -> None:
    recording = Recording({})
    recording.losses["gpu_warp"] = COUNT_LIMIT - 1
    recording.count_lost("gpu_warp", COUNT_LIMIT)
    assert recording.losses == {"gpu_warp": COUNT_LIMIT}


def test_room_that_is_not_there_is_not_taken() -> None:
    memory = MemoryLimit(10)
    memory.use(10)
    with pytest.raises(Crowded):
        memory.use(1)
