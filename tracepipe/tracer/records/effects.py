"""The effects of calls on memory: `memory` and `transfer` events, made when a call has returned successfully.

    cudaMalloc ─────────────────────┐   one allocation: the innermost successful call reports it, and those
      cuMemAlloc_v2 ────────────┐   │   around it on the same thread with the same effect do not
                                ▼   ▼
                              alloc  (nothing)

    name                               phase                         args
    alloc, free, alloc_host, free_host I at the return               size, address, stream, call
    set                                I at the return               size, address, value, stream, call
    a direction (HtoD, …), else copy   X over the call; I at its     size, direction, from, to, stream, call
                                       return if it is …Async

A size is `size_bytes`, or a row of `width_bytes`, or elements (`count` or `width`) as wide as `value`; the
size of a row is multiplied by `height`. Where a copy's own direction is unknown, it has that of the copy
around it.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tracepipe.event.bounded import put_bounded
from tracepipe.event.vocabulary import direction_named
from tracepipe.hooks.hook import INTEGER_KINDS, Argument, Probe
from tracepipe.hooks.slots import ValueNames, argument_text, values
from tracepipe.tracer.records.line import Head, Lines, Where

OPEN_CALLS_MAX = 64
"""The most open calls of one thread; calls of these kinds nest two or three deep. Beyond that their returns
were lost, and the oldest are forgotten.
"""
THREADS_MAX = 16384
"""The most threads with open calls; the oldest are forgotten first."""

_TRANSFER, _SET, _FREEING = "transfer", "set", ("free", "free_host")
_UNDECIDED = "default"  # cudaMemcpyDefault: the driver derives the direction from the addresses
_SHOWN = {_TRANSFER: ("from", "to", "stream"), _SET: ("value", "stream")}
_SHOWN_OF_MEMORY = ("stream",)

Words = Sequence[int]


class Effects:
    """Follows calls with an effect, in all threads. The plan's `value_names` name directions."""

    def __init__(self, value_names: ValueNames | None = None) -> None:
        self._names: ValueNames = value_names or {}
        self._effects: dict[int, _Effect] = {}
        self._threads = OrderedDict[int, _Thread]()

    def forget(self) -> None:
        """Forget the open calls of all threads."""
        self._threads.clear()

    def enter(self, tid: int, probe: Probe, ts_ns: int, words: Words) -> None:
        """Called when a thread enters a call; `words` are the values of its slots."""
        thread = self._threads.get(tid)
        if thread is None:
            put_bounded(self._threads, tid, thread := _Thread(), THREADS_MAX)
        elif len(thread.open) >= OPEN_CALLS_MAX:
            del thread.open[0]
        # By identity, as hashing a probe would hash all of its hook. The effect keeps the probe alive.
        effect = self._effects.get(id(probe))
        if effect is None:
            effect = self._effects[id(probe)] = _Effect(probe, self._names)
        thread.open.append((effect, ts_ns, words))

    def leave(self, tid: int, probe: Probe, ts_ns: int, result: int, out: int) -> Done | None:
        """The effect of a call that returns; None if it had none, or a call inside it has reported it.

        `result` is the register, `out` the present value of the `out` argument's target. A call whose entry
        is unknown is ignored. Calls inside this one that are still open have lost their returns.
        """
        thread = self._threads.get(tid)
        if thread is None:
            return None
        place = len(thread.open) - 1
        while place >= 0 and thread.open[place][0].probe is not probe:
            place -= 1
        if place < 0:
            return None
        effect, entered_ns, words = thread.open[place]
        del thread.open[place:]
        # With a filter by duration, entries come with the returns: times show which call was inside.
        if result & effect.failure_mask or thread.reported_ns.get(effect.kind, -1) > entered_ns:
            return None
        thread.reported_ns[effect.kind] = ts_ns
        size_bytes = effect.size_bytes(words)
        if effect.kind == _TRANSFER:
            if not size_bytes or size_bytes < 0:
                return None
            direction = effect.direction(words)
            if not direction:  # that of the innermost open copy that has one
                copies = ((one, given) for one, _, given in reversed(thread.open) if one.kind == _TRANSFER)
                direction = next(filter(None, (one.direction(given) for one, given in copies)), "")
            return Done(effect, entered_ns, ts_ns, words, size_bytes, direction=direction)
        address = effect.address(words, out)
        is_nothing = not address if effect.kind in _FREEING else size_bytes is not None and size_bytes <= 0
        if is_nothing:  # to free 0, and to allocate 0 bytes, is allowed everywhere
            return None
        return Done(effect, entered_ns, ts_ns, words, size_bytes, address)


@dataclass(frozen=True, slots=True)
class Done:
    """The effect of a call that has returned; `size_bytes` is None where the arguments do not show it."""

    effect: _Effect
    entered_ns: int
    ts_ns: int
    words: Words
    size_bytes: int | None
    address: int = 0
    direction: str = ""

    @property
    def name(self) -> str:
        """The name of its event."""
        return self.effect.kind if self.effect.kind != _TRANSFER else self.direction or "copy"

    @property
    def is_copy(self) -> bool:
        """Whether it is a copy."""
        return self.effect.kind == _TRANSFER

    def add_to(self, lines: Lines, where: Where) -> None:
        """Add the line of the effect."""
        effect, args = self.effect, "" if self.size_bytes is None else f',"size":{self.size_bytes}'
        if self.address:  # an allocation whose address could not be read has 0
            args += f',"address":{self.address}'
        if self.direction:
            args += f',"direction":{json.dumps(self.direction)}'
        shown = effect.shown(self.words)
        args = f"{args},{shown},{effect.call}" if shown else f"{args},{effect.call}"
        is_span = self.is_copy and not effect.is_async
        head = effect.heads.get(self.name)
        if head is None:
            layer = "transfer" if self.is_copy else "memory"
            head = effect.heads[self.name] = Head(layer, self.name, "X" if is_span else "I")
        if is_span:
            lines.span(self.entered_ns, self.ts_ns - self.entered_ns, head, where, args[1:])
        else:
            lines.event(self.ts_ns, head, *where, args[1:])


@dataclass(slots=True)
class _Thread:
    """The open calls of a thread, outermost first, and when it last reported each kind of effect."""

    open: list[tuple[_Effect, int, Words]] = field(default_factory=list)
    reported_ns: dict[str, int] = field(default_factory=dict)


class _Effect:
    """The effect of one probe's calls, and how it is read from their words."""

    def __init__(self, probe: Probe, value_names: ValueNames) -> None:
        hook = probe.hook
        self.probe = probe
        self.kind = hook.effect
        self._values = values(probe.signature)
        self.address = self._address_reader()
        self.shown = argument_text(probe.signature, {}, _SHOWN.get(self.kind, _SHOWN_OF_MEMORY))
        self.size_bytes = self._size_reader()
        self.call = f'"call":{json.dumps(probe.symbol)}'
        self.heads: dict[str, Head] = {}
        self.is_async = "Async" in probe.symbol
        self._fixed_direction = direction_named(hook.direction)
        chosen = self._values.get("direction")
        self._chosen_direction = chosen.reader() if chosen is not None else None
        self._directions = value_names.get(chosen.kind, {}) if chosen is not None else {}
        result = probe.signature.result
        bits = Argument("", 0, result).bits if result in INTEGER_KINDS else 32
        # A result of 0 is success in every API, and so is none.
        self.failure_mask = (1 << bits) - 1 if result else 0

    def direction(self, words: Words) -> str:
        """The direction of a copy; "" if the call does not show it."""
        if self._fixed_direction or self._chosen_direction is None:
            return self._fixed_direction
        name = direction_named(self._directions.get(self._chosen_direction(words), ""))
        return "" if name == _UNDECIDED else name

    def _address_reader(self) -> Callable[[Words, int], int]:
        """Make the reader of an address, from a call's words or its `out` argument; 0 if it is unknown."""
        passed = self._values.get("address")
        if passed is not None:
            read = passed.reader()
            return lambda words, out: read(words)
        for argument in self.probe.signature.arguments:
            if argument.out and argument.name == "address":
                mask = (1 << argument.bits) - 1
                return lambda words, out: out & mask
        return lambda words, out: 0

    def _size_reader(self) -> Callable[[Words], int | None]:
        """Make the reader of a call's size in bytes, None where the arguments do not show it."""
        found = self._values
        known = ("size_bytes", "width_bytes", "count", "width")
        base = next((found[name] for name in known if name in found), None)
        if base is None:
            return lambda words: None
        read = base.reader()
        if base.name == "size_bytes":
            return read
        element_bytes = 1
        if not base.name.endswith("_bytes") and "value" in found:
            element_bytes = found["value"].bits // 8
        height = found["height"].reader() if "height" in found else lambda words: 1
        return lambda words: read(words) * element_bytes * height(words)
