"""The facts about each probe that the BPF programs need: struct spec of probes.bpf.c.

    0       8        16      17      18    19          20     21      22          23
    ┌───────┬────────┬───────┬───────┬─────┬───────────┬──────┬───────┬───────────┬──────────────┐
    │low[8] │high[8] │ slots │ layer │ out │ out bytes │ text │ flags │ condition │ condition at │
    └───────┴────────┴───────┴───────┴─────┴───────────┴──────┴───────┴───────────┴──────────────┘
    24               25                 26       27          28        32
    ┌────────────────┬──────────────────┬────────┬───────────┬─────────┬─────────────────┐
    │ condition bits │ condition signed │ hashed │ hashed at │ zero[4] │ condition value │
    └────────────────┴──────────────────┴────────┴───────────┴─────────┴─────────────────┘

Positions are stored plus one; 0 means none.
"""

from __future__ import annotations

import struct

from tracepipe.hooks.hook import (
    INTEGER_KINDS,
    NAMING_EFFECTS,
    OPERATORS,
    TEXT_FORMS,
    Argument,
    KernelPlace,
    Probe,
    TracepointPlace,
)
from tracepipe.hooks.slots import slots, values
from tracepipe.tracer.records.record import DROP_LAYERS
from tracepipe.tracer.request import Filters

_SPEC = struct.Struct("<8s8sBBBBBBBBBBBB4xQ")
SPEC_BYTES = _SPEC.size
_PAIRED, _INSTANT, _QUEUES, _IN_KERNEL, _EVERYWHERE, _UNFILTERED, _NAMES = 1, 2, 4, 8, 16, 32, 64
WHOLE_EFFECTS = frozenset({*NAMING_EFFECTS, "alloc", "free"})
"""The effects that no filter may drop: what handles are, and allocations, whose sum must be right."""
QUEUES_ITEMS = "nv_kthread_q_schedule_q_item"
"""The driver's function that queues work for its own threads."""
# enum condition of probes.bpf.c
_CONDITIONS = {"==": 1, "!=": 2, "<": 3, "<=": 4, ">": 5, ">=": 6, "&": 7}
assert set(_CONDITIONS) == set(OPERATORS)


def is_paired(probe: Probe, filters: Filters) -> bool:
    """Whether the return of a call needs data of its entry."""
    needs = filters.min_duration_ns > 0 or filters.sample > 1 or probe.hook.condition is not None
    return probe.is_span and (needs or any(argument.out for argument in probe.signature.arguments))


def text_field(argument: Argument) -> int:
    """The place of a text in a tracepoint's record, as TEXT_0 and the like of probes.bpf.c have it."""
    return (1 + TEXT_FORMS.index(argument.text_form)) << 16 | argument.position


def spec_of(probe: Probe, filters: Filters) -> bytes:
    """The struct spec of one probe."""
    low, high = bytearray(8), bytearray(8)
    arguments = probe.signature.arguments
    is_tracepoint = isinstance(probe.place, TracepointPlace)
    count = 0
    if not is_tracepoint:
        for count, slot in enumerate(slots(probe.signature), 1):
            low[count - 1] = slot.low + 1
            high[count - 1] = 0 if slot.high is None else slot.high + 1
    out = next((argument for argument in arguments if argument.out), None)
    text = next((argument for argument in arguments if argument.kind == "str"), None)
    condition = probe.hook.condition
    at = bits = value = operator = signed = 0
    if condition is not None:
        # A tracepoint's program reads fields in the order of the arguments.
        index = arguments.index(condition.argument) if is_tracepoint else condition.argument.position
        at = index + 1
        bits, signed = INTEGER_KINDS.get(condition.argument.kind, (32, True))
        value = condition.value & (1 << bits) - 1
        operator = _CONDITIONS[condition.operator]
    hook, in_kernel = probe.hook, isinstance(probe.place, KernelPlace)
    flags = (
        _PAIRED * is_paired(probe, filters)
        | _IN_KERNEL * in_kernel
        | _QUEUES * (in_kernel and probe.symbol == QUEUES_ITEMS)
        | _INSTANT * (not hook.returns)
        | _EVERYWHERE * hook.everywhere
        | _UNFILTERED * (hook.effect in WHOLE_EFFECTS)
        | _NAMES * (hook.effect in NAMING_EFFECTS)
    )
    return _SPEC.pack(
        bytes(low),
        bytes(high),
        count,
        DROP_LAYERS.index(probe.layer),
        out.position + 1 if out else 0,
        out.bits // 8 if out else 0,
        text.position + 1 if text and not is_tracepoint else 0,
        flags,
        operator,
        at,
        bits,
        int(signed),
        *hashed_slot(probe),
        value,
    )


def hashed_slot(probe: Probe) -> tuple[int, int]:
    """The slot, plus one, of the argument whose structure is hashed, and its position, plus one, where the
    structure itself lies on the stack.
    """
    hashed = next((argument for argument in probe.signature.arguments if argument.is_hashed), None)
    if hashed is None:
        return 0, 0
    on_stack = hashed.position + 1 if hashed.kind == "hash128" else 0
    return values(probe.signature)[hashed.name].slot + 1, on_stack
