"""Makes lines of the API calls that an injected library reports, with the decoder of the calls of probes.

CALL_ENTER  ──▶  userspace B   args by the function's signature, launch, kernel, stack
CALL_EXIT   ──▶  userspace E   result by name, what came out; then what the call did:
                 memory I      alloc, free, alloc_host, free_host, set
                 transfer X    HtoD, …; I if it is asynchronous
"""

from __future__ import annotations

import re
from typing import Final

from tracepipe.hooks.slots import MAX_SLOTS, slots
from tracepipe.tracer.gpu.engines.api_calls import ApiCalls
from tracepipe.tracer.gpu.engines.transport import GpuRecord
from tracepipe.tracer.gpu.engines.untrusted import Kept, Malformed
from tracepipe.tracer.gpu.engines.warp_records import CALL_ENTER, CALL_EXIT, HAS_ARGUMENTS, read_words
from tracepipe.tracer.records.calls import Calls
from tracepipe.tracer.records.line import BEGAN_AT, LAUNCH, STACK, Lines, joined

_FIRST_WORDS: Final = 4  # the words in a probe's record of an entry
_CHUNK_BYTES: Final = 31  # the bytes of a text in a probe's record
_FUNCTION_BYTES: Final = 16384  # roughly, for each function, as the code that writes its lines is compiled
_THREAD_BYTES: Final = 2048
_SHARED_BYTES: Final = re.compile(r'"shared_bytes":(\d{1,18})\b')
# A kernel's record comes within some thousand launches of its call.
_LAUNCHES_MAX: Final = 1 << 14


class CallLines:
    """Makes the lines of a recording's calls, and keeps the open calls of threads. Raises REFUSALS."""

    def __init__(self, api: ApiCalls | None = None, kept: Kept | None = None) -> None:
        self._api = api or ApiCalls()
        self._calls = Calls([], self._api.values)
        self._kept = kept or Kept()
        self._numbers: dict[tuple[str, bool], int] = {}
        self._words: list[int] = []  # of each probe's entries
        self._threads: set[int] = set()
        self.shared_bytes: dict[int, int] = {}
        """The last launches → the dynamic shared memory of a block, as their calls ask for it."""

    def enter(
        self,
        lines: Lines,
        record: GpuRecord,
        name: str,
        kernel: str = "",
        stack: int | None = None,
        start_ns: int | None = None,
    ) -> None:
        """Add the line of an entry. `name` is the function's, `kernel` that of a kernel which it launches,
        `stack` the id of the call's Python stack.

        A call that began before `start_ns` begins at `start_ns`, and its line states the real begin.
        """
        _, pid, tid, began_ns, payload = record
        time_ns = began_ns if start_ns is None else start_ns
        number, launch, _, _, cpu, count, text_bytes = CALL_ENTER.unpack_from(payload)
        probe = self._number(name, number)
        text = bytes(payload[CALL_ENTER.size + 8 * count :])
        wanted = self._words[probe]
        if count > MAX_SLOTS or text_bytes != len(text) or (count and wanted and count != wanted):
            raise Malformed
        if not wanted:  # its name was lost, and with it what the words are
            count, text = 0, b""
        self._keep_thread(tid, len(text))
        words = read_words(payload, count) + (0,) * (MAX_SLOTS - count)
        if count > _FIRST_WORDS:
            self._calls.more[tid] = probe, words[_FIRST_WORDS:]
        if text:
            self._calls.texts[tid] = [
                text[at : at + _CHUNK_BYTES] for at in range(0, len(text), _CHUNK_BYTES)
            ]
        head, args = self._calls.enter(time_ns, tid, pid, probe, 0, *words[:_FIRST_WORDS], kernel=kernel)
        if launch and (asked := _SHARED_BYTES.search(args)):
            self._keep_shared(launch, int(asked[1]))
        if start_ns is not None:
            args = joined(args, BEGAN_AT % began_ns)
        more = (LAUNCH % launch if launch else "") + ("" if stack is None else STACK % stack)
        lines.event(time_ns, head, pid, tid, cpu, args, more)

    def leave(self, lines: Lines, record: GpuRecord, name: str) -> None:
        """Add the line of a return, and the line of the call's effect on memory."""
        _, pid, tid, time_ns, payload = record
        number, result, cpu, out = CALL_EXIT.unpack_from(payload)
        probe = self._number(name, number)
        self._keep_thread(tid)
        head, args = self._calls.leave(tid, pid, probe, 0, result, out)
        lines.event(time_ns, head, pid, tid, cpu, args)
        if probe in self._calls.effective:
            self._calls.effect(lines, time_ns, tid, (pid, tid, cpu), probe, result, out)

    def _number(self, name: str, number: int) -> int:
        """The number of a function's probe, with arguments if its records have them."""
        key = name, bool(number & HAS_ARGUMENTS)
        probe = self._numbers.get(key)
        if probe is None:
            self._kept.take(_FUNCTION_BYTES)
            made = self._api.find(name).probe if key[1] else self._api.without_arguments(name)
            probe = self._numbers[key] = self._calls.add(made)
            self._words.append(len(slots(made.signature)) if key[1] else 0)
        return probe

    def _keep_shared(self, launch: int, size_bytes: int) -> None:
        if len(self.shared_bytes) >= _LAUNCHES_MAX:
            del self.shared_bytes[next(iter(self.shared_bytes))]
        self.shared_bytes[launch] = size_bytes

    def _keep_thread(self, tid: int, text_bytes: int = 0) -> None:
        """Use room for a thread, and for a text, which may become a name."""
        is_new = tid not in self._threads
        self._kept.take((_THREAD_BYTES if is_new else 0) + text_bytes)
        self._threads.add(tid)
