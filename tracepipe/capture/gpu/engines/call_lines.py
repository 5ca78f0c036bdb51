"""Lines of the API calls that an injected library tells, by the decoder of the calls that probes tell.

CALL_ENTER  ──▶  userspace B   args by the function's signature, launch, kernel
CALL_EXIT   ──▶  userspace E   result by name, what came out; then what the call did:
                 memory I      alloc, free, alloc_host, free_host, set
                 transfer X    HtoD, …; I if it is asynchronous
"""

from __future__ import annotations

from typing import Final

from tracepipe.capture.gpu.engines.api_calls import ApiCalls
from tracepipe.capture.gpu.engines.transport import GpuRecord
from tracepipe.capture.gpu.engines.warp_records import CALL_ENTER, CALL_EXIT, HAS_ARGUMENTS, read_words
from tracepipe.capture.records.calls import Calls
from tracepipe.hooks.slots import MAX_SLOTS

_FIRST_WORDS: Final = 4  # as many as a probe's record of an entry has
_CHUNK_BYTES: Final = 31  # of a text, in a probe's records


class CallLines:
    """Lines of the calls of a recording; it keeps what threads are in."""

    def __init__(self, counts: dict[str, int], api: ApiCalls | None = None) -> None:
        """`counts`: layer → lines, to which those that are made here are added."""
        self._counts = counts
        self._api = api or ApiCalls()
        self._calls = Calls([], self._api.values)
        self._numbers: dict[tuple[str, bool], int] = {}

    def enter(self, record: GpuRecord, name: str, kernel: str) -> str:
        """The line of an entry; `name` is the function's, `kernel` that of the kernel which it launches."""
        _, pid, tid, time_ns, payload = record
        number, launch, _, cpu, count, text_bytes = CALL_ENTER.unpack_from(payload)
        probe = self._number(name, number)
        words = read_words(payload, count) + (0,) * (MAX_SLOTS - count)
        if count > _FIRST_WORDS:
            self._calls.more[tid] = probe, words[_FIRST_WORDS:]
        if text_bytes:
            text = bytes(payload[CALL_ENTER.size + 8 * count :])
            self._calls.texts[tid] = [
                text[at : at + _CHUNK_BYTES] for at in range(0, len(text), _CHUNK_BYTES)
            ]
        head, args = self._calls.enter(time_ns, tid, pid, probe, 0, *words[:_FIRST_WORDS], kernel=kernel)
        self._count("userspace")
        launched = f',"launch":{launch}' if launch else ""
        return f'{{"ts_ns":{time_ns},{head},"pid":{pid},"tid":{tid},"cpu":{cpu}{launched}{args}}}\n'

    def leave(self, record: GpuRecord, name: str) -> str:
        """The line of a return, and that of what the call did to memory."""
        _, pid, tid, time_ns, payload = record
        number, result, cpu, out = CALL_EXIT.unpack_from(payload)
        probe = self._number(name, number)
        head, args = self._calls.leave(tid, pid, probe, 0, result, out)
        self._count("userspace")
        line = f'{{"ts_ns":{time_ns},{head},"pid":{pid},"tid":{tid},"cpu":{cpu}{args}}}\n'
        if probe in self._calls.effective:
            effect = self._calls.effect(time_ns, tid, pid, tid, cpu, probe, result, out)
            if effect:
                self._count("memory" if '"type":"memory"' in effect else "transfer")
                line += effect
        return line

    def _number(self, name: str, number: int) -> int:
        """The probe of a function, with its arguments if its records have them."""
        key = name, bool(number & HAS_ARGUMENTS)
        probe = self._numbers.get(key)
        if probe is None:
            made = self._api.find(name).probe if key[1] else self._api.without_arguments(name)
            probe = self._numbers[key] = self._calls.add(made)
        return probe

    def _count(self, layer: str) -> None:
        self._counts[layer] = self._counts.get(layer, 0) + 1
