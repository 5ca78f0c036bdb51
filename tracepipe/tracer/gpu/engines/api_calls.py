"""Tells an injected library which arguments of CUDA's functions to record, and where they are.

A tool gets a function's parameters as a C struct. `native/api_parameters.txt` has the offset of each one, and
the shipped sets of hooks state which are recorded. Both become the table that the library reads, with a line
for each function with arguments:

    cuMemAlloc_v2 8+8 out0+8
    cuLaunchKernel 0+8 8+4,12+4 16+4,20+4 24+4,28+4 32+4 40+8
    cuLaunchKernelEx through0 8+8 @0+4,@4+4 @8+4,@12+4 @16+4,@20+4 @24+4 @32+8

    OFFSET+BYTES            a word of the record; two with a comma are the halves of one, as in slots.py
    @OFFSET+BYTES           in the struct that the pointer at `through` points to
    outOFFSET+BYTES         a pointer, and the bytes read from it when the call has succeeded
    textOFFSET              a pointer to a text
"""

from __future__ import annotations

import os
import re
import struct
import tempfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Final

from tracepipe.errors import CaptureUnavailable
from tracepipe.event.bounded import put_bounded
from tracepipe.hooks.hook import Argument, FilePlace, Hook, Probe, Signature
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import HookSet, load_set
from tracepipe.hooks.slots import MAX_SLOTS, slots
from tracepipe.tracer.gpu.engines.channel import GpuRecord, Malformed, MemoryLimit
from tracepipe.tracer.records.calls import Calls
from tracepipe.tracer.records.line import BEGAN_AT, LAUNCH, STACK, Lines, joined

ARGUMENTS_VARIABLE: Final = "TRACEPIPE_GPU_ARGUMENTS"
_PARAMETERS: Final = Path(__file__).parents[1] / "native/api_parameters.txt"
_WORD_BYTES: Final = 8
# Launches whose first parameter points to a struct with the sizes → the struct, and the arguments in it.
_GRID: Final = tuple(f"{what}.{axis}" for what in ("grid", "block") for axis in "xyz")
_CONFIGURED: Final = {
    "cuLaunchKernelEx": (
        "CUlaunchConfig",
        (*((name, "u32") for name in _GRID), ("shared_bytes", "u32"), ("stream", "ptr")),
    ),
    "cudaLaunchKernelExC": (
        "cudaLaunchConfig",
        (("grid", "dim3"), ("block", "dim3"), ("shared_bytes", "u64"), ("stream", "ptr")),
    ),
}
# Positions in such a struct begin here, beyond those of the call itself.
_POINTED_FROM: Final = 1000


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter in its function's struct. `pointed_bytes`: the size of what it points to, 0 if unknown."""

    offset: int
    size_bytes: int
    pointed_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ApiCall:
    """A function: its probe with the arguments that the library can read, and its line of the table."""

    probe: Probe
    line: str


class ApiCalls:
    """The functions of the driver API and the runtime. `values` names results and directions."""

    def __init__(self) -> None:
        self._sets = _indexed_sets()
        self.values: Mapping[str, Mapping[int, str]] = {
            kind: names for hooks, _ in self._sets for kind, names in hooks.values.items()
        }
        self.find = cache(self._call)
        """The function with a name; an unknown one has no arguments."""

    def without_arguments(self, name: str) -> Probe:
        """The function's probe for records without arguments."""
        hook = self._hook(name)
        return _probe(name, replace(hook, effect="", signature=Signature((), hook.signature.result)))

    def table(self) -> str:
        """The table that the library reads."""
        lines = (self.find(name).line for name in parameters())
        return "".join(f"{line}\n" for line in lines if line)

    def _hook(self, name: str) -> Hook:
        hooks, index = self._sets[name.startswith(("cuda", "__cuda"))]
        hook = index.find(name)
        if hook is None:
            return Hook("uprobe", hooks.hooks[0].library, name, "userspace")
        return replace(hook, returns=True, condition=None)  # the library records returns, and all calls

    def _call(self, name: str) -> ApiCall:
        hook, found = self._hook(name), parameters().get(name, [])
        parts, words = {at: ("", part) for at, part in enumerate(_parts(found))}, [name]
        arguments = hook.signature.arguments
        config = _CONFIGURED.get(name.removesuffix("_ptsz"))
        if config is not None and found:
            struct_name, named = config
            size_bytes = found[0].pointed_bytes
            known = [p for p in parameters()[struct_name] if p.offset + p.size_bytes <= size_bytes]
            parts |= {at: ("@", part) for at, part in enumerate(_parts(known), _POINTED_FROM)}
            position = _POINTED_FROM
            for in_struct, kind in named:
                arguments += (Argument(in_struct, position, kind),) if position in parts else ()
                position += 2 if kind == "dim3" else 1
            words.append(f"through{found[0].offset}")
        readable = tuple(argument for argument in arguments if _is_readable(argument, parts))
        if not readable:
            return ApiCall(self.without_arguments(name), "")
        signature = Signature(readable, hook.signature.result)
        for slot in slots(signature):
            halves = [slot.low] if slot.high is None else [slot.low, slot.high]
            loads = (parts[position] for position in halves)
            words.append(",".join(f"{prefix}{part.offset}+{part.size_bytes}" for prefix, part in loads))
        for argument in readable:
            offset = parts[argument.position][1].offset
            if argument.out:
                words.append(f"out{offset}+{argument.bits // 8}")
            elif argument.kind == "str":
                words.append(f"text{offset}")
        effect = hook.effect if readable == arguments else ""
        return ApiCall(_probe(name, replace(hook, signature=signature, effect=effect)), " ".join(words))


def _parts(found: list[Parameter]) -> Iterator[Parameter]:
    """Parameters word by word, as `Argument.position` counts them: a dim3 takes two."""
    for whole in found:
        yield replace(whole, size_bytes=min(whole.size_bytes, _WORD_BYTES))
        if _WORD_BYTES < whole.size_bytes <= 2 * _WORD_BYTES:
            offset, size_bytes = whole.offset + _WORD_BYTES, whole.size_bytes - _WORD_BYTES
            yield replace(whole, offset=offset, size_bytes=size_bytes)


def _is_readable(argument: Argument, parts: Mapping[int, tuple[str, Parameter]]) -> bool:
    """Whether the whole argument can be read."""
    if argument.position not in parts:
        return False
    _, part = parts[argument.position]
    if argument.out:
        return part.pointed_bytes * 8 >= argument.bits
    if argument.kind == "str":
        return part.pointed_bytes == 1
    if argument.kind == "dim3":
        return argument.position + 1 in parts
    return part.size_bytes * 8 >= argument.bits


def write_table(table: str, folder: Path | None = None) -> Path:
    """Write the table to a new file that every user may read. Raises CaptureUnavailable."""
    try:
        descriptor, name = tempfile.mkstemp(prefix="tracepipe-gpu-arguments-", dir=folder)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            os.fchmod(descriptor, 0o644)
            file.write(table)
    except OSError as error:
        raise CaptureUnavailable(
            f"The table of CUDA functions cannot be written: {error}.",
            f"Check that {folder or tempfile.gettempdir()} has free space.",
        ) from None
    return Path(name)


@cache
def _indexed_sets() -> tuple[tuple[HookSet, HookIndex], ...]:
    """The sets of the driver API and of the runtime."""
    sets = [load_set(name) for name in ("cuda-driver", "cuda-runtime")]
    return tuple((hooks, HookIndex(hooks.hooks, hooks.variants)) for hooks in sets)


@cache
def parameters() -> dict[str, list[Parameter]]:
    """Function → its parameters, as far as all examined versions of CUDA agree."""
    found = {}
    for line in _PARAMETERS.read_text(encoding="ascii").splitlines():
        if not line.startswith("#"):
            name, *words = line.split(" ")
            numbers = (re.fullmatch(r"(\d+)\+(\d+)(?:>(\d+))?", word) for word in words)
            found[name] = [Parameter(*(int(n or 0) for n in match.groups())) for match in numbers if match]
    return found


def _probe(name: str, hook: Hook) -> Probe:
    return Probe(name, hook.name or name, FilePlace(hook.library, 0), hook)


HAS_ARGUMENTS: Final = 1 << 62
"""A flag in the number of a function's name: its records have its arguments."""
# native/call_arguments.h describes these two.
CALL_ENTER: Final = struct.Struct("<QQQQIHH")  # name, launch, kernel's name, stack, cpu, words, bytes of text
CALL_EXIT: Final = struct.Struct("<QIIQ")  # name, result, cpu, what the out argument points to
_FIRST_WORDS: Final = 4  # the words in a probe's record of an entry
_CHUNK_BYTES: Final = 31  # the bytes of a text in a probe's record
_FUNCTION_BYTES: Final = 16384  # roughly, for each function, as the code that writes its lines is compiled
_THREAD_BYTES: Final = 2048
_SHARED_BYTES: Final = re.compile(r'"shared_bytes":(\d{1,18})\b')
# A kernel's record comes within some thousand launches of its call.
_LAUNCHES_MAX: Final = 1 << 14


class CallLines:
    """Makes lines of the API calls that a library reports, with the decoder of the calls of probes, and keeps
    the open calls of threads. Raises REFUSALS.

    CALL_ENTER  ──▶  userspace B   args by the function's signature, launch, kernel, stack
    CALL_EXIT   ──▶  userspace E   result by name, what came out; then what the call did:
                     memory I      alloc, free, alloc_host, free_host, set
                     transfer X    HtoD, …; I if it is asynchronous
    """

    def __init__(self, api: ApiCalls | None = None, memory: MemoryLimit | None = None) -> None:
        self._api = api or ApiCalls()
        self._calls = Calls([], self._api.values)
        self._memory = memory or MemoryLimit()
        self._numbers: dict[tuple[str, bool], int] = {}
        self._words: list[int] = []  # of each probe's entries
        self._threads: set[int] = set()
        self.shared_bytes = OrderedDict[int, int]()
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
        _, pid, tid, began_ns, payload, _ = record
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
        words = struct.unpack_from(f"<{count}Q", payload, CALL_ENTER.size) + (0,) * (MAX_SLOTS - count)
        if count > _FIRST_WORDS:
            self._calls.more[tid] = probe, words[_FIRST_WORDS:]
        if text:
            self._calls.texts[tid] = [
                text[at : at + _CHUNK_BYTES] for at in range(0, len(text), _CHUNK_BYTES)
            ]
        head, args = self._calls.enter(time_ns, tid, pid, probe, 0, *words[:_FIRST_WORDS], kernel=kernel)
        if launch and (asked := _SHARED_BYTES.search(args)):
            put_bounded(self.shared_bytes, launch, int(asked[1]), _LAUNCHES_MAX)
        if start_ns is not None:
            args = joined(args, BEGAN_AT % began_ns)
        more = (LAUNCH % launch if launch else "") + ("" if stack is None else STACK % stack)
        lines.event(time_ns, head, pid, tid, cpu, args, more)

    def leave(self, lines: Lines, record: GpuRecord, name: str) -> None:
        """Add the line of a return, and the line of the call's effect on memory."""
        _, pid, tid, time_ns, payload, _ = record
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
            self._memory.use(_FUNCTION_BYTES)
            made = self._api.find(name).probe if key[1] else self._api.without_arguments(name)
            probe = self._numbers[key] = self._calls.add(made)
            self._words.append(len(slots(made.signature)) if key[1] else 0)
        return probe

    def _keep_thread(self, tid: int, text_bytes: int = 0) -> None:
        """Use room for a thread, and for a text, which may become a name."""
        is_new = tid not in self._threads
        self._memory.use((_THREAD_BYTES if is_new else 0) + text_bytes)
        self._threads.add(tid)
