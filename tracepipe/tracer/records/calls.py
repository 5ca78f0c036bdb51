"""Renders records of calls as text: names, arguments, results, and what a call did to memory.

The constant text of a probe is made once. Data of an entry that did not fit into its record (`more`, `texts`,
`served`) comes before it, and is kept here by thread until then.

A communicator (NCCL) has the same name on all ranks that it connects. A rank knows it by an address. All
ranks have the id in common with which it is made; the hook records its hash. A communicator that is split or
shrunk off another one is named after that one, with the number of those that were split off before, and the
color: all ranks of a communicator split it in the same order.

    ncclCommInitRank(id: 9f21c3a4d5e6f708)   9f21c3a4d5e6f708
    ncclCommSplit(that one, color: 0)        9f21c3a4d5e6f708/1.0
    ncclCommSplit(that one, color: 7)        9f21c3a4d5e6f708/2.7
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from tracepipe.hooks.hook import NAMING_EFFECTS, TEXT_BYTES, Argument, Probe
from tracepipe.hooks.slots import Texts, Value, ValueNames, argument_text, out_text, slots, values
from tracepipe.tracer.records.effects import Effects
from tracepipe.tracer.records.line import Head, Lines, Where, joined

_TEXT_CHUNK_BYTES = 31
_HANDLE, _SYMBOL, _FUNCTION, _COMM = "handle", "symbol", "function", "comm"

MADE = frozenset({0, 7})
"""Results of calls that have made a communicator: success, and that it is still being made."""

_DEEPEST = 64  # how many generations of forks are followed


class Calls:
    """Renders the records of all probes. It keeps the state of threads, so each recording has its own."""

    def __init__(self, probes: Sequence[Probe], values: ValueNames) -> None:
        self.more: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.texts: dict[int, list[bytes]] = {}
        self.served: dict[int, int] = {}
        self.effective: set[int] = set()
        self._values = values
        self._texts_of: list[_ProbeTexts] = []
        self.effects = Effects(values)
        self.kernels = KernelNames()
        self._naming: dict[tuple[int, int], tuple[str, int]] = {}
        self._communicators = Communicators()
        self._making: dict[tuple[int, int], Sequence[int]] = {}
        for probe in probes:
            self.add(probe)

    def __len__(self) -> int:
        """The number of probes."""
        return len(self._texts_of)

    def layer(self, number: int) -> str:
        """The layer of a probe's records."""
        return self._texts_of[number].probe.layer

    def add(self, probe: Probe) -> int:
        """Add a probe that was found later; returns its number."""
        number = len(self._texts_of)
        self._texts_of.append(_ProbeTexts(probe, self._values))
        if probe.hook.effect not in ("", *NAMING_EFFECTS):
            self.effective.add(number)
        return number

    def enter(
        self, ts_ns: int, tid: int, tgid: int, number: int, torn: int, *first: int, kernel: str = ""
    ) -> tuple[Head, str]:
        """The head and the members of `args` of an entry. `first` has its first four slots, and `kernel` the
        name of the launched kernel where the record itself has it.
        """
        probe = self._texts_of[number]
        words: Sequence[int] = first
        if torn:
            self.forget(tid)
        if probe.is_wide:
            last, rest = self.more.pop(tid, (-1, ()))
            words = first + (rest if last == number else (0, 0, 0, 0))
        if number in self.effective:
            self.effects.enter(tid, probe.probe, ts_ns, words)
        if probe.readers:
            self._making[tid, number] = words
        arguments = probe.arguments(words)
        if probe.is_plain and not torn and not self.served and not kernel:
            return probe.enter, arguments
        members = [arguments]
        # A text is empty if its page was not loaded, and could not be read.
        parts = self.texts.pop(tid, ()) if probe.text else ()
        chunks = (part[:_TEXT_CHUNK_BYTES].split(b"\0", 1)[0] for part in parts)
        if text := b"".join(chunks).decode(errors="replace"):
            members.append(f"{json.dumps(probe.text)}:{json.dumps(text)}")
            if probe.names:
                self._naming[tid, number] = text, probe.handle(words)
                if not probe.probe.hook.returns:
                    self.kernels.put(tgid, probe.handle(words), text)
        if not kernel and probe.function >= 0:
            kernel = self.kernels.get(tgid, words[probe.function])
        if kernel:
            members.append(f'"kernel":{json.dumps(kernel)}')
            if probe.names:  # of a handle that the call returns for another one
                self._naming[tid, number] = kernel, probe.handle(words)
        if probe.comm >= 0:
            members.append(self._communicators.members(tgid, words[probe.comm]))
        members += [self._for_whom(tid), '"args_lost":true' if torn else ""]
        return probe.enter, joined(*members)

    def leave(self, tid: int, tgid: int, number: int, torn: int, result: int, out: int) -> tuple[Head, str]:
        """The head and the members of `args` of a return."""
        probe = self._texts_of[number]
        if torn:
            self.forget(tid)
        text = probe.results[result]
        if probe.out is None and not self.served and not torn:
            return probe.leave, text
        named = self._naming.pop((tid, number), None)
        if named is not None and not result & 0xFFFFFFFF:
            self.kernels.put(tgid, named[1] or out, named[0])
        result &= 0xFFFFFFFF
        shown = probe.out_text(out) if not result else ""
        made = self._making.pop((tid, number), None)
        if made is not None and result in MADE:
            given = {name: read(made) for name, read in probe.readers.items()}
            shown = joined(shown, self._communicators.make(tgid, out, given))
        return probe.leave, joined(text, shown, self._for_whom(tid), '"args_lost":true' if torn else "")

    def hit(self, number: int, by: int, torn: int, *values: int) -> tuple[Head, str]:
        """The head and the members of `args` of a tracepoint's event; `by` is the key of `teller`."""
        probe = self._texts_of[number]
        members = probe.arguments(probe.packed(values))
        if not probe.texts:
            return probe.enter, members
        texts = [] if torn else _divided(self.texts.get(by, []))[-len(probe.texts) :]
        self.texts.pop(by, None)
        stated = []
        for argument, text in zip(probe.texts, texts, strict=False):
            shown = text[: argument.size_bytes or None].decode(errors="replace")
            stated.append(f"{json.dumps(argument.name)}:{json.dumps(shown)}")
        return probe.enter, joined(members, *stated, '"args_lost":true' if torn else "")

    def effect(
        self, lines: Lines, ts_ns: int, tid: int, where: Where, number: int, result: int, out: int
    ) -> None:
        """Add the line of a returned call's effect, unless it had none or another line reports it."""
        done = self.effects.leave(tid, self._texts_of[number].probe, ts_ns, result, out)
        if done is not None:
            done.add_to(lines, where)

    def _for_whom(self, tid: int) -> str:
        served = self.served.pop(tid, 0) if self.served else 0
        return f'"for_pid":{served >> 32},"for_tid":{served & 0xFFFFFFFF}' if served else ""

    def forget(self, tid: int) -> None:
        """Drop what is kept for a thread: it may belong to another call, or the thread has ended."""
        for kept in (self.more, self.texts, self.served):
            kept.pop(tid, None)


class _ProbeTexts:
    """Renders the records of one probe."""

    def __init__(self, probe: Probe, value_names: ValueNames) -> None:
        self.probe = probe
        arguments = probe.signature.arguments
        own = probe.hook.layer_name
        self.enter = Head(probe.layer, probe.name, "B" if probe.is_span else "I", own)
        self.leave = Head(probe.layer, probe.name, "E", own)
        self.arguments = argument_text(probe.signature, value_names)
        self._slots = slots(probe.signature)
        self.is_wide = len(self._slots) > 4
        self.texts = [argument for argument in arguments if argument.kind == "str"]
        self.text = self.texts[0].name if self.texts else ""
        self.out = next((argument for argument in arguments if argument.out), None)
        self.out_text = out_text(self.out, value_names) if self.out else lambda _: ""
        self.names = probe.hook.effect == "name"
        found, makes = values(probe.signature), probe.hook.effect == "communicator"
        slot_of = {name: value.slot for name, value in found.items() if not value.shift}
        self.function, self._handle, self.comm = (
            slot_of.get(name, -1) for name in (_FUNCTION, _HANDLE, _COMM)
        )
        self.readers = {name: value.reader() for name, value in found.items() if makes}
        """Of a function that makes a communicator: how its arguments are read."""
        self.is_plain = not self.text and self.function < 0 and self.comm < 0
        self.results = Texts(_result_text(probe.signature.result, value_names), limit=256)
        """The members of a return by its register."""

    def handle(self, words: Sequence[int]) -> int:
        """The handle that gets a name; 0 where it is known only at the return."""
        return words[self._handle] if self._handle >= 0 else 0

    def packed(self, values: Sequence[int]) -> list[int]:
        """A tracepoint's arguments, each in its own word, packed into the slots of its signature."""
        arguments = self.probe.signature.arguments
        at = {argument.position: value for argument, value in zip(arguments, values, strict=False)}
        return [
            at[slot.low] if slot.high is None else at[slot.low] & 0xFFFFFFFF | at[slot.high] << 32
            for slot in self._slots
        ]


def _result_text(kind: str, values: ValueNames) -> Callable[[int], str]:
    if not kind:
        return lambda _: ""
    read = Value("result", kind, 0, 0, Argument("result", 0, kind).bits).reader()
    names = values.get(kind, {})

    def text(register: int) -> str:
        number = read((register,))
        name = names.get(number)
        return f'"result":{number}' + (f',"result_name":{json.dumps(name)}' if name else "")

    return text


def teller(tid: int, cpu: int) -> int:
    """The key of records that belong together: the thread, or the processor where there is no thread."""
    return tid or ~cpu


def _divided(chunks: Sequence[bytes]) -> list[bytes]:
    """The texts of TEXT records: a text ends with a record that is not full, or at its greatest length."""
    texts, parts = [], list[bytes]()
    for chunk in chunks:
        part = chunk[:_TEXT_CHUNK_BYTES].split(b"\0", 1)[0]
        parts.append(part)
        if len(part) < _TEXT_CHUNK_BYTES or len(parts) * _TEXT_CHUNK_BYTES >= TEXT_BYTES:
            texts.append(b"".join(parts))
            parts = []
    return texts


@dataclass(frozen=True, slots=True)
class Group:
    """The ranks that a communicator connects: how many, and which of them this is; None where not known."""

    name: str
    ranks: int | None = None
    rank: int | None = None

    @property
    def members(self) -> str:
        """The members of `args` that say it."""
        known = f'"group":"{self.name}"'
        if self.ranks is not None:
            known += f',"group_ranks":{self.ranks}'
        return known if self.rank is None else f'{known},"group_rank":{self.rank}'


class Communicators:
    """The communicators of a recording, by process and address."""

    def __init__(self) -> None:
        self._groups: dict[tuple[int, int], Group] = {}
        self._made_of: Counter[tuple[int, int, str]] = Counter()

    def members(self, tgid: int, comm: int) -> str:
        """The members of `args` that describe a communicator; "" if it is not known."""
        group = self._groups.get((tgid, comm))
        return "" if group is None else group.members

    def make(self, tgid: int, comm: int, given: Mapping[str, int]) -> str:
        """Note the communicator that a call made of `given` (0: none for this rank); returns its members."""
        group = self._new_group(tgid, given)
        if not comm:
            return ""
        # The address may be that of a communicator that was destroyed.
        self._groups.pop((tgid, comm), None)
        for kind in ("split", "shrink"):
            self._made_of.pop((tgid, comm, kind), None)
        if group is None:
            return ""
        self._groups[tgid, comm] = group
        return group.members

    def _new_group(self, tgid: int, given: Mapping[str, int]) -> Group | None:
        if "id" in given:
            return (
                Group(f"{given['id']:016x}", given.get("ranks"), given.get("rank")) if given["id"] else None
            )
        parent, color, excluded = (given.get(name) for name in ("parent", "color", "excluded"))
        if parent is None or (color is None and excluded is None):
            return None
        kind = "shrink" if color is None else "split"
        self._made_of[tgid, parent, kind] += 1
        of = self._groups.get((tgid, parent))
        if of is None:
            return None
        count = self._made_of[tgid, parent, kind]
        if excluded is not None:
            return Group(f"{of.name}/shrink {count}", None if of.ranks is None else of.ranks - excluded)
        return Group(f"{of.name}/{count}.{color}")


class KernelNames:
    """The names of the handles of a recording."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, int], str] = {}
        self._named: set[int] = set()
        self._parents: dict[int, int] = {}
        self._process_of: dict[int, int] = {}

    def put(self, tgid: int, handle: int, name: str) -> None:
        """Set the name of a handle in a process."""
        self._names[tgid, handle] = name
        self._named.add(tgid)

    def get(self, tgid: int, handle: int) -> str:
        """The name of a handle; "" if it has none."""
        for _ in range(_DEEPEST):
            if (tgid, handle) in self._names:
                return self._names[tgid, handle]
            if tgid not in self._parents:
                return ""
            tgid = self._parents[tgid]
        return ""

    def add_thread(self, tid: int, tgid: int, creator_tid: int = 0) -> None:
        """Note a thread of a process, and the thread that created it if it is known."""
        self._process_of[tid] = tgid
        parent = self._process_of.get(creator_tid, creator_tid)
        if creator_tid and parent != tgid and (parent in self._named or parent in self._parents):
            self._parents[tgid] = parent

    def forget(self, tid: int) -> None:
        """Forget a thread that has ended."""
        self._process_of.pop(tid, None)
