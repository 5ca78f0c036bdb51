"""Finds the lines of a model behind the code that `torch.compile` generates, in PyTorch's own log.

A program with `TORCH_TRACE=FOLDER` in its environment logs each compilation: the graph of the function, with
the line that each node comes from, and the generated code, where a comment names the nodes of each kernel:

    dynamo_output_graph     # File: /home/ann/net.py:17 in forward, code: return gelu(h)
                            gelu: "f32[32]" = torch._C._nn.gelu(h)
    aot_backward_graph      the same of the backward pass, whose nodes have names of their own
    inductor_output_code    # Topologically Sorted Source Nodes: [gelu], Original …
                            triton_poi_fused_gelu_0.run(…)

A record of the log is a line of JSON, and lines of content that begin with a tab. It is written before the
code runs, also if the code is from a cache. The graph of the backward pass is then as old as the cache: its
lines count only if the function's graph has them too.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import tempfile
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tracepipe.event.model import INDEX_LIMIT
from tracepipe.tracer.gpu.engines.channel import GpuRecord
from tracepipe.tracer.gpu.engines.streams import Decoder, Frame, MakeDecoder, Recording, RecordStream
from tracepipe.tracer.records.line import Lines

VARIABLE: Final = "TORCH_TRACE"
_GENERATED: Final = re.compile(r"/c[a-z2-7]{51}\.py$")
"""The name of a file of generated code: a digest of it."""
_LOG: Final = re.compile(r"dedicated_log_torch_trace_\w+\.log")
_GRAPH, _CODE = "dynamo_output_graph", "inductor_output_code"
_RECORD: Final = re.compile(rf'V\d{{4}} [^]]*\] (\{{"({_GRAPH}|aot_backward_graph|{_CODE})".*\}})\s*')
_PLACE: Final = re.compile(r"\s*# (?:File: (.{1,4096}?):(\d{1,10}) in (.{1,256}?), code: (.*)|No stacktrace)")
_NODE: Final = re.compile(r"\s*([A-Za-z_]\w{0,255})(?:: \"[^\"]*\")? = ")
_SOURCES: Final = re.compile(r"\s*# (?:Topologically Sorted|Unsorted) Source Nodes: \[([^]]*)\]")
_FUNCTION: Final = re.compile(r"\s*(?:def|class) ")
_PREPARES: Final = re.compile(r"\s*(?:#|$|del |assert_|\w+ = (?:empty_strided|get_raw_stream))|.*# reuse$")
"""Lines that come before a kernel, or after it, but not between a comment's kernels."""
_OF_LIBRARY: Final = re.compile(r"\s*(?:\w+ = )?extern_kernels\.")
_BACKWARD: Final = ", backward"  # as `lines` marks work of autograd
# What is read of all logs, and how many nodes and comments are kept of them.
_BYTES_MAX: Final = 1 << 30
_LINE_BYTES_MAX: Final = 1 << 20
_LOGS_MAX: Final = 1 << 10
_KEPT_MAX: Final = 1 << 18
_FRAMES_MAX: Final = 32
"""The lines of one kernel."""


@dataclass(slots=True)
class _Compilation:
    """The nodes of a function's graph, and of that of its backward pass → their lines, None for a name with
    several; the comments that state the lines of the first.
    """

    nodes: dict[str, Frame | None] = field(default_factory=dict)
    backward: dict[str, Frame | None] = field(default_factory=dict)
    places: set[tuple[str, ...]] = field(default_factory=set)


@dataclass(slots=True)
class _Code:
    """Generated code: which nodes are computed from a line on, where that changes."""

    of: _Compilation
    is_backward: bool = False
    lines: list[int] = field(default_factory=lambda: [0])
    nodes: list[list[str]] = field(default_factory=lambda: [[]])
    of_libraries: set[int] = field(default_factory=set)
    """Lines that call a kernel of a library. It computes the last node alone that a graph has, and those
    before are its input.
    """
    is_begun: bool = False
    """Whether a kernel of the last nodes has come."""

    def add(self, line: int, text: str) -> int:
        """Take a line; return how many things are kept of it."""
        if line == 1:
            self.is_backward = "_backward'" in text
        if sources := _SOURCES.match(text):
            found: list[str] | None = sources[1].split(", ")
        elif _PREPARES.match(text):
            found = [] if self.is_begun else None
        else:
            self.is_begun, found = True, [] if _FUNCTION.match(text) else None
            if _OF_LIBRARY.match(text):
                self.of_libraries.add(line)
                return 1
        if found is None or found == self.nodes[-1]:
            return 0
        self.is_begun = False
        self.lines.append(line)
        self.nodes.append(found)
        return 1 + len(found)

    def behind(self, line: int) -> list[Frame]:
        """The model's lines behind one of the code, the last node's first. Code of the backward pass names
        nodes of both graphs.
        """
        graphs = [self.of.nodes, self.of.backward] if self.is_backward else [self.of.nodes]
        found: dict[Frame, None] = {}
        nodes = self.nodes[bisect_right(self.lines, line) - 1]
        if line in self.of_libraries:
            nodes = [node for node in nodes if any(node in graph for graph in graphs)][-1:]
        for node in reversed(nodes):
            frames = {graph[node] for graph in graphs if node in graph}
            if len(frames) == 1 and (frame := frames.pop()):
                function, file, number = frame
                found[function + _BACKWARD * self.is_backward, file, number] = None
        return list(found)[:_FRAMES_MAX]


class _Log:
    """A process's log, as far as it is read."""

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._compilations: dict[tuple[int, ...], _Compilation] = {}
        self._kind, self._of, self._line = "", _Compilation(), 0
        self._code: _Code | None = None
        self._frame: Frame | None = None

    def read(self, most: int, codes: dict[str, list[_Code]]) -> tuple[int, int]:
        """Read up to `most` bytes more, and add the code in them by its file; how many bytes were read, and
        things kept. Raises OSError.
        """
        began, kept = self._at, 0
        file = os.open(self._path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as log:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return 0, 0
            log.seek(began)
            while self._at - began < most:
                line = log.readline(_LINE_BYTES_MAX)
                if not line.endswith(b"\n") and len(line) < _LINE_BYTES_MAX:
                    break  # it is being written
                self._at += len(line)
                kept += self.take(line.decode(errors="replace"), codes)
        return self._at - began, kept

    def take(self, text: str, codes: dict[str, list[_Code]]) -> int:
        """Take the next line, and add the code that begins with it; return how many things are kept of it."""
        if text.startswith("\t"):
            self._line += 1
            return self._add(text[1:].rstrip("\r\n")) if self._kind else 0
        self._kind = ""
        with suppress(ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
            self._begin(text, codes)
        return 0

    def _begin(self, text: str, codes: dict[str, list[_Code]]) -> None:
        if (found := _RECORD.fullmatch(text)) is None:
            return
        about, kind = json.loads(found[1]), found[2]
        key = int(about.get("frame_id", -1)), int(about.get("frame_compile_id", -1))
        if kind == _GRAPH or key not in self._compilations:
            self._compilations[key] = _Compilation()
        self._of, self._line, self._frame = self._compilations[key], 0, None
        if kind == _CODE:
            self._code = _Code(self._of)
            codes.setdefault(str(about[kind]["filename"]), []).append(self._code)
        self._kind = kind

    def _add(self, text: str) -> int:
        """Take a line of the content; return how many things are kept of it."""
        if self._kind == _CODE:
            return self._code.add(self._line, text) if self._code else 0
        if place := _PLACE.match(text):
            file, line, function, _ = place.groups()
            if self._kind == _GRAPH:
                self._of.places.add(place.groups())
            is_known = file and place.groups() in self._of.places and int(line) <= INDEX_LIMIT
            self._frame = (function, file, int(line)) if is_known else None
        elif node := _NODE.match(text):
            nodes = self._of.nodes if self._kind == _GRAPH else self._of.backward
            if nodes.setdefault(node[1], self._frame) != self._frame:
                nodes[node[1]] = None
            return 1
        return 0


class CompiledCode:
    """The lines behind generated code, from the logs in a folder, which are read when they are needed."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logs: dict[str, _Log] = {}
        self._codes: dict[str, list[_Code]] = {}
        self._bytes_left, self._left = _BYTES_MAX, _KEPT_MAX

    def behind(self, frames: Sequence[Frame]) -> list[Frame]:
        """The lines of the model behind the innermost frame in generated code, innermost first; none if they
        are not known, or if the same code was compiled of others too.
        """
        for _, file, line in frames:
            if file not in self._codes and _GENERATED.search(file):
                self._read()
            if file in self._codes:
                first, *others = (code.behind(line) for code in self._codes[file])
                return first if all(other == first for other in others) else []
        return []

    def _read(self) -> None:
        with suppress(OSError):
            names = sorted(path.name for path in self._folder.iterdir() if _LOG.fullmatch(path.name))
            for name in names[:_LOGS_MAX]:
                log = self._logs.setdefault(name, _Log(self._folder / name))
                if self._bytes_left > 0 and self._left > 0:
                    read, kept = log.read(self._bytes_left, self._codes)
                    self._bytes_left, self._left = self._bytes_left - read, self._left - kept


class _CompiledDecoder(Decoder):
    """Gives stacks the lines behind generated code. It takes no records."""

    kinds = frozenset()

    def __init__(self, recording: Recording, code: CompiledCode) -> None:
        super().__init__(recording)
        recording.stacks.compiled = code

    def add(self, lines: Lines, record: GpuRecord) -> None:
        """Never called."""


class CompiledStream(RecordStream):
    """No records, but PyTorch's log of what it compiles in the command's processes. `owner` (user, group) is
    whom these run as. If the environment names a folder for logs, that is read, and stays.
    """

    name = "torch.compile"
    layers: frozenset[str] = frozenset()

    def __init__(self, owner: tuple[int, int]) -> None:
        self._made: Path | None = None
        folder = Path(os.environ.get(VARIABLE) or os.devnull)
        if not os.environ.get(VARIABLE):
            with suppress(OSError):
                self._made = folder = Path(tempfile.mkdtemp(prefix="tracepipe-compiled-"))
                os.chown(folder, *owner)
        code = CompiledCode(folder)
        self.decoders: Sequence[MakeDecoder] = (lambda recording: _CompiledDecoder(recording, code),)

    def environment(self) -> dict[str, str]:
        return {} if self._made is None else {VARIABLE: str(self._made)}

    def close(self) -> None:
        if self._made is not None:
            shutil.rmtree(self._made, ignore_errors=True)
