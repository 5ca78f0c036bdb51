"""HolisticTraceAnalysis (HTA) and tracepipe on the same traces of ranks: figures, time and memory.

    python -m venv hta
    hta/bin/pip install HolisticTraceAnalysis==0.5.0
    python benchmarks/ranks_hta.py FOLDER --hta-python hta/bin/python

FOLDER has a trace of PyTorch's profiler for each rank, as `benchmarks/ranks_gpu.py record … --profiler` makes
them for each kind of slowness. HTA is in an environment of its own, which then has its libraries alone.
Without HTA, the exit code is 3.

A line has the figures of a rank, first HTA's and then tracepipe's: shares of the time from the GPU's first
work to its last, the share of the communication that compute hides, and the total times of the communication
kernel and of the other kernel that took longest. By default HTA rounds times to µs, and leaves out the last
step and what was launched outside of steps. This is turned off. tracepipe's figures are those of steps: if
kernels are outside of them, a line states how many.

HTA looks for stragglers in kernels called `ncclKernel…` only. If there are none, it is asked again with the
kernels called `ncclDevKernel…` renamed.

The costs are those of reading all ranks one after the other: `dataset build --jobs 1` and `ranks`, and HTA
with the figures above. Both include the start of Python. They are the least processor time and the largest
peak memory of a process, of `--runs` runs. `--times 4` has each trace four times, as traces of different
ranks: this shows how the costs grow with the number of ranks.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
_OTHER, _COMMUNICATION = "COMPUTATION", "COMMUNICATION"
"""Kinds of kernels, as HTA calls them."""

_FIGURES = """
with work as (
    select rank, start_ns, end_ns from kernels
    union all select rank, start_ns, end_ns from transfers where stream is not null
), spans as (
    select rank, max(end_ns) - min(start_ns) as span_ns from work group by rank
)
select rank, span_ns, span_ns - sum(busy_ns) as idle_ns, sum(compute_ns) as compute_ns,
    sum(communication_ns) as communication_ns, sum(exposed_ns) as exposed_ns
from steps join spans using (rank) group by rank, span_ns order by rank
"""
_LONGEST = """
with totals as (
    select kernels.rank, kernels.name, collectives.row is not null as communicates, sum(dur_ns) as ns
    from kernels left join collectives using (rank, row) group by all
)
select rank, communicates, max(ns) as ns from totals group by all
"""
_OUTSIDE = """
select count(*) as kernels from kernels
where not exists (
    select * from steps where steps.rank = kernels.rank
    and kernels.start_ns >= steps.start_ns and kernels.end_ns <= steps.end_ns
)
"""


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of a rank: shares of the GPU's time, of the communication, and times."""

    idle: float
    compute: float
    communication: float
    hidden: float
    longest_communication_ms: float
    longest_other_ms: float


@dataclass(frozen=True, slots=True)
class Ran:
    """What a process printed and what it cost, with the processes that it started."""

    output: str
    processor_s: float
    peak_mb: float


def ran(*command: object) -> Ran:
    """Run a command, and end with its exit code and message if it fails."""
    environment = os.environ | {"HTA_DISABLE_NS_ROUNDING": "1"}
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        started = subprocess.Popen(
            [str(word) for word in command], stdout=out, stderr=errors, cwd=ROOT, env=environment
        )
        _, status, cost = os.wait4(started.pid, 0)
        started.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        errors.seek(0)
        if started.returncode:
            print(errors.read(), end="", file=sys.stderr)
            sys.exit(started.returncode)
        return Ran(out.read(), cost.ru_utime + cost.ru_stime, cost.ru_maxrss / 1000)


def repeated(folder: Path, times: int, made: Path) -> Path:
    """A folder with each trace of a folder several times, as traces of different ranks."""
    files = sorted(folder.glob("**/*.json.gz"))
    made.mkdir()
    for file in files:
        with gzip.open(file, "rt") as stream:
            before, rank, after = re.split(r'(?<="rank": )(\d+)', stream.read(), maxsplit=1)
        for number in range(times):
            copy = int(rank) + number * len(files)
            with gzip.open(made / f"{copy}.json.gz", "wt", compresslevel=1) as out:
                out.write(f"{before}{copy}{after}")
    return made


def tracepipe(*arguments: object) -> Ran:
    """Run a command of tracepipe."""
    return ran(sys.executable, "-m", "tracepipe", *arguments)


def rows(dataset: Path, sql: str) -> list[dict[str, Any]]:
    """What a query gives."""
    found: list[dict[str, Any]] = json.loads(tracepipe("query", dataset, sql, "--json").output)["rows"]
    return found


def of_tracepipe(dataset: Path) -> dict[int, Figures]:
    """The figures of each rank of a dataset."""
    longest_ms = {(one["rank"], one["communicates"]): one["ns"] / 1e6 for one in rows(dataset, _LONGEST)}
    return {
        one["rank"]: Figures(
            idle=one["idle_ns"] / one["span_ns"],
            compute=one["compute_ns"] / one["span_ns"],
            communication=one["communication_ns"] / one["span_ns"],
            hidden=1 - one["exposed_ns"] / max(one["communication_ns"], 1),
            longest_communication_ms=longest_ms.get((one["rank"], True), 0),
            longest_other_ms=longest_ms.get((one["rank"], False), 0),
        )
        for one in rows(dataset, _FIGURES)
    }


def of_hta(files: dict[int, str]) -> dict[str, Any]:
    """HTA's figures of each rank, and its stragglers. Runs where HTA is installed."""
    try:
        from hta.analyzers.breakdown_analysis import BreakdownAnalysis
        from hta.analyzers.communication_analysis import CommunicationAnalysis
        from hta.common.trace import Trace
    except ImportError:
        print("HTA is not installed; this file's first lines say how to install it", file=sys.stderr)
        sys.exit(3)
    trace = Trace(trace_files=files)
    trace._filter_irrelevant_gpu_kernels = lambda *_: None  # all steps, and what was launched outside of them
    trace.load_traces(use_multiprocessing=False)
    times = BreakdownAnalysis.get_temporal_breakdown(trace, visualize=False).set_index("rank")
    overlap = CommunicationAnalysis.get_comm_comp_overlap(trace, visualize=False).set_index("rank")
    _, kernels = BreakdownAnalysis.get_gpu_kernel_breakdown(trace, visualize=False, num_kernels=10**6)
    totals_us = kernels.groupby(["rank", "kernel_type"])["sum (us)"].agg(["sum", "max"]).to_dict("index")
    none = {"sum": 0.0, "max": 0.0}
    figures = {}
    for rank, one in times.iterrows():
        span_us = one["kernel_time(us)"]
        communication = totals_us.get((rank, _COMMUNICATION), none)
        figures[int(rank)] = {
            "idle": one["idle_time(us)"] / span_us,
            "compute": one["compute_time(us)"] / span_us,
            "communication": communication["sum"] / span_us,
            "hidden": overlap.loc[rank, "comp_comm_overlap_pctg"] / 100,
            "longest_communication_ms": communication["max"] / 1e3,
            "longest_other_ms": totals_us.get((rank, _OTHER), none)["max"] / 1e3,
        }
    return {"ranks": figures, "stragglers": stragglers_text(trace)}


def stragglers_text(trace: Any) -> str:
    """The one and the two ranks that HTA would look at first."""
    from hta.analyzers.straggler_analysis import StragglerAnalysis

    def candidates() -> str:
        one, two = (StragglerAnalysis.get_potential_stragglers(trace, num_candidates=n) for n in (1, 2))
        return f"{one[0]} for one candidate, {' and '.join(map(str, sorted(two)))} for two"

    try:
        return candidates()
    except ValueError as error:
        symbols = trace.symbol_table
        symbols.sym_table = [name.replace("ncclDevKernel", "ncclKernel", 1) for name in symbols.sym_table]
        symbols.sym_index = {name: number for number, name in enumerate(symbols.sym_table)}
        return f"ValueError ({error}); with kernels renamed: {candidates()}"


def table_text(hta: dict[int, Figures], own: dict[int, Figures]) -> str:
    """A line for each rank, in each column HTA's figure and then tracepipe's; then the largest difference."""
    names = ("idle", "compute", "communication", "of it hidden", "longest comm., ms", "longest other, ms")
    lines = ["rank  " + "  ".join(f"{name:>17}" for name in names)]
    differ = [0.0] * len(names)
    for rank, of_rank in sorted(own.items()):
        pairs = list(zip(astuple(hta[rank]), astuple(of_rank), strict=True))
        cells = (f"{a:>8.1f} {b:>8.1f}" if a > 1 or b > 1 else f"{a:>8.2%} {b:>8.2%}" for a, b in pairs)
        lines.append(f"{rank:>4}  " + "  ".join(cells))
        differ = [max(most, abs(a - b)) for most, (a, b) in zip(differ, pairs, strict=True)]
    return "\n".join([*lines, "most  " + "  ".join(f"{most:>17.1e}" for most in differ)])


def slow_text(report: dict[str, Any]) -> str:
    """Ranks that tracepipe calls slow."""
    return ", ".join(f"{one['ranks']} ({one['slow']})" for one in report["slow"]) or "none"


def compare(folder: Path, hta_python: Path, runs: int) -> None:
    """Print the table, the slow ranks and the costs."""
    own_costs, hta_costs = [], []
    with tempfile.TemporaryDirectory() as made:
        for run in range(runs):
            dataset = Path(made, str(run))
            built = tracepipe("dataset", "build", folder, "-o", dataset, "--jobs", "1")
            report = tracepipe("ranks", dataset, "--json", "--top", "0")
            own_costs.append(
                (built.processor_s + report.processor_s, max(built.peak_mb, report.peak_mb)),
            )
            files = {one["rank"]: one["source"] for one in rows(dataset, "select rank, source from ranks")}
            asked = ran(hta_python, __file__, "--figures", json.dumps(files))
            hta_costs.append((asked.processor_s, asked.peak_mb))
        own, outside = of_tracepipe(dataset), rows(dataset, _OUTSIDE)[0]["kernels"]
    found = json.loads(asked.output)
    print(table_text({int(rank): Figures(**one) for rank, one in found["ranks"].items()}, own))
    if outside:
        print(f"{outside} kernels are outside of steps: in HTA's figures alone")
    print(f"stragglers by HTA: {found['stragglers']}")
    print(f"slow by tracepipe: {slow_text(json.loads(report.output))}")
    (own_s, own_mb), (hta_s, hta_mb) = (
        (min(seconds for seconds, _ in costs), max(peak_mb for _, peak_mb in costs))
        for costs in (own_costs, hta_costs)
    )
    print(f"HTA: {hta_s:.1f} s of processor time, {hta_mb:.0f} MB; tracepipe: {own_s:.1f} s, {own_mb:.0f} MB")
    print(
        f"HTA takes {hta_s / own_s:.1f} times the processor time and {hta_mb / own_mb:.1f} times the memory"
    )


def main() -> None:
    """Compare, or print HTA's figures where HTA is installed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path)
    parser.add_argument(
        "--hta-python", type=Path, default=sys.executable, help="the Python that HTA is installed for"
    )
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--figures", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.figures:
        files = {int(rank): file for rank, file in json.loads(given.figures).items()}
        print(json.dumps(of_hta(files)))
    elif given.folder:
        with tempfile.TemporaryDirectory() as made:
            folder = given.folder.resolve()
            if given.times > 1:
                folder = repeated(folder, given.times, Path(made, "copies"))
            compare(folder, given.hta_python.absolute(), given.runs)
    else:
        parser.error("name a folder of traces")


if __name__ == "__main__":
    main()
