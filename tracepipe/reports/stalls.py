"""The reasons for which warps of each kernel waited, from hardware samples, with instructions and lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Final

from tracepipe.event.counters import SELECTED, STALL_GROUPS, stall_group
from tracepipe.kernel_names import kernel_title
from tracepipe.options import OTHER_RUN, Option, regex
from tracepipe.reports.kernel_choice import no_such_kernel
from tracepipe.reports.report import (
    KERNEL,
    SHARE,
    Column,
    Drawing,
    Report,
    Result,
    Table,
    not_listed,
    sentences,
)
from tracepipe.reports.stalls_and_warps import FEW_SAMPLES, side_by_side
from tracepipe.store.run import Run
from tracepipe.store.stalls import Instruction, Stalls, StallTable
from tracepipe.units import counted

_INSTRUCTIONS: Final = 5
_REASONS: Final = 4
_SAMPLES: Final = Column("samples", "samples", "count")
_NO_SAMPLES: Final = "no stall reasons were recorded: tracepipe capture --gpu-stalls -- COMMAND samples them"


@dataclass(frozen=True, slots=True)
class Options:
    """Options of `tracepipe stalls`."""

    kernel: Annotated[str, Option("Show kernels whose name this regular expression finds.", "REGEX")] = ""
    top: Annotated[int, Option("Show the N kernels with the most samples; 0: all.", "N")] = 10
    warps: Annotated[
        str, Option("Compare the reasons with what the warps of this recording show.", OTHER_RUN)
    ] = ""


def run(run: Run, options: Options, warps: Run | None = None) -> Result:
    """The kernels' samples by reason and instruction. `warps` is a recording of the same kernels with which
    they are compared. Raises TracepipeError if the pattern is invalid, or matches no kernel.
    """
    table = run.stall_table
    if not len(table):
        return Result("STALL REASONS", [], [_NO_SAMPLES])
    fits = regex(options.kernel).search
    chosen = [(name, samples) for name, samples in table.functions.items() if fits(name)]
    if not chosen:
        raise no_such_kernel("samples", options.kernel, table.functions)
    kernels = sorted(chosen, key=lambda one: (-one[1].total(), one[0]))
    shown = kernels[: options.top] if options.top > 0 else kernels
    total = sum(samples.total() for samples in table.functions.values())
    result = Result("STALL REASONS", [_groups(shown, total), _reasons(shown)])
    if table.instructions:
        result.parts.append(_instructions(table, [name for name, _ in shown]))
    result.parts.append(_advice(shown))
    if warps is not None:
        together, notes = side_by_side(run, warps, [name for name, _ in shown])
        result.parts += together
        result.notes += notes
    result.notes += [*not_listed(len(kernels) - len(shown), "kernel|kernels"), *_notes(table, shown)]
    return result


def _share(count: int, total: int) -> float:
    return 100 * count / max(total, 1)


def _groups(shown: list[tuple[str, Counter[str]]], total: int) -> Table:
    rows = []
    for name, samples in shown:
        groups: Counter[str] = Counter()
        for reason, count in samples.items():
            groups[stall_group(reason)] += count
        of_kernel = samples.total()
        shares = (_share(groups[group], of_kernel) for group in STALL_GROUPS)
        rows.append((kernel_title(name), of_kernel, _share(of_kernel, total), *shares))
    columns = (
        KERNEL,
        _SAMPLES,
        Column("share_percent", "of all", "percent"),
        *(Column(f"{group.replace(' ', '_')}_percent", group, "percent") for group in STALL_GROUPS),
    )
    note = "Shares of a kernel's samples. A sample states why one warp on an SM was waiting at an instant."
    return Table("groups", "What warps wait for", columns, rows, note)


def _reasons(shown: list[tuple[str, Counter[str]]]) -> Table:
    rows = [
        (kernel_title(name), reason, stall_group(reason), count, _share(count, samples.total()))
        for name, samples in shown
        for reason, count in sorted(samples.items(), key=lambda one: (-one[1], one[0]))[:_REASONS]
    ]
    columns = (KERNEL, Column("reason", "reason"), Column("group", "group"), _SAMPLES, SHARE)
    return Table("reasons", f"The {_REASONS} main reasons of each kernel", columns, rows, grouped=True)


def _instructions(table: StallTable, kernels: list[str]) -> Table:
    """The instructions of each kernel with the most samples of waiting warps."""
    wanted = set(kernels)
    found: dict[str, list[tuple[int, Instruction, Stalls]]] = {name: [] for name in kernels}
    for place, stalls in table.instructions.items():
        waiting = stalls.samples.total() - stalls.samples[SELECTED]
        if waiting and place.function in wanted:
            found[place.function].append((waiting, place, stalls))
    rows: list[tuple[Any, ...]] = []
    for name in kernels:
        of_kernel = sum(waiting for waiting, *_ in found[name])
        found[name].sort(key=lambda one: (-one[0], one[1]))
        for waiting, place, stalls in found[name][:_INSTRUCTIONS]:
            reasons = Counter({why: count for why, count in stalls.samples.items() if why != SELECTED})
            main = min(reasons, key=lambda why: (-reasons[why], why))
            where = f"+0x{place.offset_bytes:x}"
            share = _share(waiting, of_kernel)
            rows.append((kernel_title(name), where, stalls.line or None, main, waiting, share))
    columns = (
        KERNEL,
        Column("offset", "instruction"),
        Column("line", "line"),
        Column("reason", "main reason"),
        Column("samples", "waiting", "count"),
        SHARE,
    )
    note = (
        "Offsets are into the kernel's machine code (nvdisasm, cuobjdump -sass). A warp waits at the "
        "instruction that needs a result, not at the one that produces it."
    )
    title = f"The {_INSTRUCTIONS} instructions of each kernel at which warps wait most"
    return Table("instructions", title, columns, rows, note, grouped=True)


def _advice(shown: list[tuple[str, Counter[str]]]) -> Drawing:
    data = []
    for name, samples in shown:
        waiting = Counter({reason: count for reason, count in samples.items() if reason != SELECTED})
        if not waiting.total() or samples.total() < FEW_SAMPLES:
            continue
        reason = min(waiting, key=lambda why: (-waiting[why], why))
        share = _share(waiting[reason], samples.total())
        sentence = f"{share:.0f}% of the samples are {reason}: {advice_on(reason)}"
        data.append({"kernel": kernel_title(name), "reason": reason, "sentence": sentence})

    heading = "What the main reason usually means"
    return sentences("advice", heading, data, "{0[kernel]}: {0[sentence]}".format)


def _notes(table: StallTable, shown: list[tuple[str, Counter[str]]]) -> Iterator[str]:
    few = [kernel_title(name) for name, samples in shown if samples.total() < FEW_SAMPLES]
    if few:
        some = ", ".join(few[:3]) + (", …" if len(few) > 3 else "")
        yield f"fewer than {FEW_SAMPLES} samples, too few for reliable shares: {some}"
    if table.left_out:
        yield counted(
            table.left_out, "sample|samples is|are of functions or instructions beyond those kept apart"
        )
    if table.period_cycles:
        cycles = ", ".join(map(str, sorted(table.period_cycles)))
        yield f"one sample on each SM every {cycles} cycles"
    yield "samples show why warps wait, not which warp waits when: they are not converted to times"


_TENSOR: Final = "warps wait for the tensor cores. This is expected of a matrix product."
_ADVICE: Final = {
    "long_scoreboard": "warps wait for data from global or local memory (L1, L2, DRAM) or a texture. "
    "Usual causes: loads that are not coalesced, data that is loaded again, too few loads in flight. "
    "Load more per thread before the first use, stage data in shared memory, raise occupancy.",
    "short_scoreboard": "warps wait for shared memory, a special function or another slow operation of "
    "the SM. Usual causes: bank conflicts, and many sin, exp or rsqrt. Change the layout in shared "
    "memory, or use fewer such operations.",
    "lg_throttle": "the queue for loads and stores of global and local memory is full. Usual causes: "
    "many narrow accesses, and registers that spill. Use wider ones (float4), and look for spills.",
    "mio_throttle": "the queue for shared memory and special functions is full. Use fewer and wider "
    "accesses to shared memory.",
    "tex_throttle": "the queue for textures is full. Use fewer texture fetches, or plain loads for some.",
    "drain": "warps have exited and wait for their stores. Usual cause: many stores at the end that are "
    "not coalesced.",
    "imc_miss": "warps wait for a constant that is not in the cache. Usual cause: indices into constant "
    "memory that differ within a warp.",
    "barrier": "warps wait at __syncthreads() for others of their block. Usual causes: work that "
    "differs between the warps of a block, and large blocks of which only one or two fit an SM. Divide work "
    "more evenly, or use smaller blocks.",
    "membar": "warps wait for a memory fence. Use fewer fences, or of a narrower scope.",
    "math_pipe_throttle": "the arithmetic unit is busy with other warps. This is expected of a kernel "
    "bound by arithmetic; less arithmetic, or tensor cores, makes it faster.",
    "gmma": _TENSOR,
    "warpgroup_arrive": _TENSOR,
    "wait": "warps wait for an instruction of fixed latency. More independent work per thread, or more "
    "warps, hides it.",
    "not_selected": "warps are ready, but another warp is issued. There are enough warps; fewer warps "
    "with more registers each may do as well.",
    "dispatch_stall": "the dispatcher holds warps back. Usual cause: conflicts in the register file.",
    "no_instructions": "warps wait for their code. Usual causes: a kernel that is longer than the "
    "instruction cache, jumps, or a launch that has just begun. Unroll less.",
    "branch_resolving": "warps wait for the target of a branch. Usual cause: many short branches. Use "
    "fewer, or predicated code.",
    "sleeping": "all threads of the warps sleep or have yielded, as __nanosleep() does.",
}


def advice_on(reason: str) -> str:
    """Return a few sentences on a stall reason."""
    return _ADVICE.get(reason, "see the warp stall reasons in the documentation of Nsight Compute.")


REPORT = Report(
    "stalls",
    Options,
    run,
    suits=lambda run: len(run.stall_table) > 0,
    companions={"warps": ("scipy",)},
)
