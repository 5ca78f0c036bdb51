"""The first screen: what was recorded, the steps, where the GPUs' time goes, the largest cause, and what to
ask next. It fits 24 lines of 80 columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from tracepipe.analyses.functions import functions_of
from tracepipe.analyses.idle_places import with_others
from tracepipe.analyses.overview import Overview, overview_of
from tracepipe.analyses.step_tables import slow_steps, step_names, steps_table, wall_ns
from tracepipe.present.writing.rendering import elided, names_within
from tracepipe.reports.largest_cause import COLUMNS, LEAST_PERCENT, cause_lines
from tracepipe.reports.report import SHARE, Column, Result, Table
from tracepipe.store.run import Run
from tracepipe.units import agree, counted, duration_text, steps_text

_STEPS, _PLACES, _NOTES = 3, 3, 1
# What is known of less of the idle time is not said of it.
_KNOWN_LEAST = 0.9
_KERNELS = 3
# By the number of kernels, so that their names take two lines at most.
_NAME_COLUMNS: Final = {1: 60, 2: 38, 3: 24}
_FILE_COLUMNS = 16


def screen(run: Run) -> Result:
    """The first screen of a recording."""
    found = overview_of(run)
    result = Result("", heading=_heading(run, found), notes_max=_NOTES)
    result.parts += cuda_errors(run)
    tables = _of_gpus(run, found) if found.whole_ns else _of_calls(run)
    result.parts += [table for table in tables if table.rows]
    says = [*cause_lines(run, found), *_slow(found), *_kernels(run)] if found.whole_ns else []
    lines = [*says, _next(run, found)]
    result.parts.append(Table("verdict", "", (Column("says", ""),), [(line,) for line in lines]))
    return result


def cuda_errors(run: Run) -> list[Table]:
    """Errors that kernels caused, which a user needs first. None of them: no table."""
    sentences = [(line,) for error in run.facts.footer.cuda_errors for line in error.split(". ")]
    return [Table("cuda_errors", "", (Column("says", ""),), sentences)] if sentences else []


def _heading(run: Run, found: Overview) -> str:
    facts = run.facts
    engine = facts.header.engine.partition(" (")[0] if facts.source != "tracepipe" else "tracepipe"
    parts, name = [engine or facts.source], ""
    if found.of_gpus:
        names = {gpu.get("name") for gpu in facts.gpus().values()} - {None, ""}
        of = f" ({str(names.pop()).removeprefix('NVIDIA ')})" if len(names) == 1 else ""
        parts.append(f"{counted(len(found.of_gpus), 'GPU|GPUs')}{of}")
        name = of
    parts.append(duration_text(facts.end_ns - facts.start_ns))
    if found.steps.are_marked:
        parts.append(steps_text(wall_ns(found).tolist()))
    file, text = Path(facts.path).name, ", ".join(parts)
    if len(f"{file}   {text}") > COLUMNS:
        text = text.replace(name, "", 1)
    return f"{elided(file, max(_FILE_COLUMNS, COLUMNS - 3 - len(text)))}   {text}"


def _of_gpus(run: Run, found: Overview) -> Iterator[Table]:
    """How the GPUs spent the steps, and why they were idle."""
    walls_ns, count = wall_ns(found), len(found.steps.number)
    order = sorted(range(count), key=lambda at: (-int(walls_ns[at]), at))
    shown = sorted(order) if count <= _STEPS else sorted({*order[: _STEPS - 1], order[count // 2]})
    steps = steps_table(found, shown, each=False)
    more = f"The longest {len(shown) - 1} steps, and one of median length"
    steps.title = more if count > len(shown) else ""
    yield steps
    if 100 * found.idle_ns >= LEAST_PERCENT / 2 * found.whole_ns:
        yield _idle(found)


def _idle(found: Overview) -> Table:
    """Where the program was while the GPUs were idle; the rows add up to the idle time."""
    idle_ns = found.idle_ns
    rows: list[tuple[Any, ...]] = [
        (one.idle_ns, 100 * one.idle_ns / idle_ns, one.range or "(no range)", one.line)
        for one in with_others(found.places, _PLACES - 1)
    ]
    columns = [
        Column("idle_ns", "idle", "ns"),
        SHARE,
        Column("range", "in the range"),
        Column("line", "line"),
    ]
    if not any(line for *_, line in rows):
        columns, rows = columns[:3], [row[:3] for row in rows]
    where = " in steps" if found.steps.are_marked else ""
    title = (
        f"{agree(len(found.of_gpus), 'GPU|GPUs')} idle {duration_text(idle_ns)} of "
        f"{duration_text(found.whole_ns)}{where} ({100 * idle_ns / found.whole_ns:.1f}%)"
    )
    if found.known_ns >= _KNOWN_LEAST * idle_ns:
        title += f", {100 * found.late_ns / found.known_ns:.1f}% of it with nothing launched"
    return Table("idle", title, columns, rows)


def _slow(found: Overview) -> list[str]:
    """The slowest step, where one is slow."""
    if not found.steps.are_marked:
        return []
    slowest = next(slow_steps(found), None)
    return [elided(slowest.text(f"Step {step_names(found)[slowest.at]}"), COLUMNS)] if slowest else []


def _kernels(run: Run) -> list[str]:
    """The kernels with the most time."""
    found = functions_of(run, "gpu_kernel", "total", _KERNELS)
    if not found.whole_ns:
        return []
    names = names_within([name for name, *_ in found.rows], _NAME_COLUMNS[len(found.rows)])
    shares = [
        f"{name} {100 * row[3] / found.whole_ns:.1f}%"
        for name, row in zip(names, found.rows, strict=True)
        if row[3]
    ]
    return [f"Kernels: {', '.join(shares)}" + (", …" if found.left_out else "")]


def _of_calls(run: Run) -> Iterator[Table]:
    """Where the time of the host goes, where no work of a GPU was recorded."""
    length_ns = max(run.facts.end_ns - run.facts.start_ns, 1)
    rows = [
        (name, title, count, total_ns, 100 * (total_ns or 0) / length_ns)
        for layer, (title, most) in _LAYERS.items()
        for name, _, count, total_ns, *_ in functions_of(run, layer, "total", most).rows
    ]
    columns = (
        Column("name", "call"), Column("layer", "layer"), Column("count", "count", "count"),
        Column("total_ns", "total", "ns"), Column("share_percent", "of the run", "percent"),
    )  # fmt: skip
    note = "Times of all threads are summed. No work of a GPU was recorded."
    yield Table("calls", "The calls with the most time", columns, rows, note)


_LAYERS: Final = {
    "userspace": ("CUDA call", 5), "hook": ("hooked", 3), "syscall": ("system call", 3),
    "kernel": ("driver", 2), "annotation": ("range", 3),
}  # fmt: skip
"""The layers with functions, what these are called, and how many are shown."""


def _next(run: Run, found: Overview) -> str:
    """The commands to go on with."""
    asked = ["gaps", "steps"] if found.steps.are_marked else ["gaps"]
    asked += ["lines"] if len(run.stacks) else ["annotations"] if len(run.layer("annotation")) else []
    asked = asked if found.whole_ns else ["layers", "gaps"]
    asked += ["warps"] if len(run.warp_table) else []
    return f"Next: tracepipe {'|'.join([*asked, 'open'])} FILE; all tables: summary --all FILE"
