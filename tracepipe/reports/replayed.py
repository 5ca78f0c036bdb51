"""A replay with a change as a recording of its own, which `convert --whatif` draws next to the real one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from tracepipe.analyses.changes import Recorded, asked, together
from tracepipe.analyses.gpu_work import COPY, outermost_rows, shapes_of
from tracepipe.analyses.program import WAIT
from tracepipe.analyses.replay import Changes, Replay, Timeline, whole
from tracepipe.errors import TracepipeError
from tracepipe.event.columns import Bools
from tracepipe.event.model import SCHEMA_VERSION
from tracepipe.store.run import Run

_KINDS: Final = ("without", "faster", "fuse", "overlap", "launches")
_HOST: Final = "replayed"


def replayed(run: Run, changes: Sequence[str]) -> Iterator[str]:
    """The lines of an event file with the replay of a recording with changes: `without=NAME`,
    `faster=KERNEL=N`, `fuse=CHAIN`, `overlap=COMM` and `launches=free`, as the options of `whatif`. It is of
    a host called "replayed". Raises TracepipeError for another change, a name that nothing has, and steps
    that cannot be replayed.
    """
    given: dict[str, list[str]] = {kind: [] for kind in _KINDS}
    for change in changes:
        kind, _, name = change.partition("=")
        if kind not in given or not name or (kind == "launches" and name != "free"):
            raise TracepipeError(
                f"No change is called {change!r}.",
                f"Write one of: {'=…, '.join(_KINDS[:-1])}=…, launches=free.",
            )
        given[kind].append(name)
    subject = Recorded(run)
    replay = Replay(whole(subject.program))
    replay.refuse_what_is_not_known()
    without, faster, fuse, overlap = (given[kind] for kind in _KINDS[:-1])
    (window,) = replay.windows()
    found: Changes = {}
    for one in asked(subject.has, without, faster, fuse, overlap, free=bool(given["launches"])):
        if not (made := one.made(window, [subject])) and one.missing:
            raise one.missing
        found = together(found, made)
    dropped = found[0].dropped if 0 in found else None
    timeline = window.run(found)
    counts = Counter[str]()
    for line in _lines(run, subject, timeline, dropped):
        counts[line["type"]] += 1
        yield json.dumps(line)
    del counts["header"]
    yield json.dumps({"type": "footer", "counts": counts, "losses": {}})


def _lines(
    run: Run, subject: Recorded, timeline: Timeline, dropped: Bools | None
) -> Iterator[dict[str, Any]]:
    """The lines of the file: the calls of the program and its work on the GPU at their new times. The replay
    begins at 0, and is put where the recorded program begins.
    """
    one, work, start = subject.program, subject.work, run.facts.header.start
    yield {
        "type": "header", "schema": SCHEMA_VERSION, "tool": "tracepipe", "host": _HOST, "boot": _HOST,
        "clock": run.facts.trace_clock, "clocks": [run.facts.trace_clock], "start": dict(start),
    }  # fmt: skip
    begin_ns = int(one.from_ns[0]) if len(one) else 0
    is_wait, tops = one.what == WAIT, outermost_rows(run, work.call)
    call = np.where(is_wait, one.work, tops[np.where(is_wait, 0, one.work)])
    names = run.values("userspace", call, "name", "pid", "tid")
    gpu = int(work.gpus[0]) if len(work.gpus) else 0  # a program of several is not replayed
    streams = run.shapes.values("stream", np.maximum(shapes_of(run, work), 0))
    called_ns, starts_ns, ends_ns = (
        (times_ns + begin_ns).tolist() for times_ns in (timeline.call_ns, timeline.start_ns, timeline.end_ns)
    )
    # A call that waits comes after its work, which has the call already.
    is_first = np.append(True, call[1:] != call[:-1]) if len(call) else is_wait
    launch = np.cumsum(is_first).tolist()
    rows = np.arange(len(one)) if dropped is None else np.flatnonzero(~dropped)
    for row in rows.tolist():
        ids = {"pid": names["pid"][row], "tid": names["tid"][row]}
        if is_first[row]:
            waits = row if is_wait[row] else row + 1 if row + 1 < len(one) and not is_first[row + 1] else None
            ends = waits is not None and is_wait[waits]
            until_ns = ends_ns[waits] if ends else called_ns[row] + int(one.called_ns[row] - one.call_ns[row])
            yield _span("userspace", names["name"][row], called_ns[row], until_ns, launch=launch[row], **ids)
        if not is_wait[row] and ends_ns[row] > starts_ns[row]:
            at = int(one.work[row])
            layer = "transfer" if work.what[at] == COPY else "gpu_kernel"
            on = {"pid": ids["pid"], "gpu": gpu, "stream": streams[at], "launch": launch[row]}
            yield _span(layer, work.name(run, at) or "", starts_ns[row], ends_ns[row], **on)


def _span(layer: str, name: str, start_ns: int, end_ns: int, **fields: Any) -> dict[str, Any]:  # noqa: ANN401
    known = {key: value for key, value in fields.items() if value is not None}
    dur_ns = max(end_ns - start_ns, 0)
    return {"ts_ns": start_ns, "type": layer, "name": name, "phase": "X", "dur_ns": dur_ns, **known}
