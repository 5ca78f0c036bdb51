"""Measures how often `tracepipe warps` is right on a real GPU: uniform kernels, and planted causes.

    python benchmarks/findings_gpu.py [--keep FOLDER] [--only PART] [--recorded FOLDER] [--held-out]

Needs an NVIDIA GPU and nvcc, but for `--recorded`, which looks at the files that `--keep` left. Records the
kernels of findings_gpu.cu, each launched four times, with `--gpu warps`, and looks at each kernel for itself:
the rate of false alarms of a recording is that of a kernel then. Parts are `fma`, `special`, `shared`,
`global`, `tensor`, `lane0` (lane 0 of each warp stores its sum), `tree` (thread 0 that of its block),
`partial` (blocks with a part of a last warp) and `planted`. `--held-out` has other shapes and causes, which
no figure was chosen with.

The first table says in how many uniform kernels each kind was found; each finding stands below it. Grids are
whole waves, but clusters may not fill all SMs. A last wave is true of such, so the last column counts it
apart. The second table says of each planted cause whether it was found, and what else was.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import built  # noqa: E402
from tracepipe.analyses.findings import FINDERS, find_all  # noqa: E402
from tracepipe.analyses.findings.finding import Finding  # noqa: E402
from tracepipe.analyses.findings.kernels import kernels_of  # noqa: E402
from tracepipe.store.run import load_run  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import this_toolchain  # noqa: E402

Cause = tuple[str, str, int | str]
LANES_MASK = "late_lanes_mask"
WORKS = ("fma", "special", "shared", "global", "tensor", "lane0", "tree", "partial")
PLANTED = "planted"
OF_CLUSTERS = "wave of clusters"
# What each planted cause must be found as: the kind, and a number of the finding with its value.
CAUSES: dict[str, Cause] = {
    "period_x": ("imbalance", "modulus", 7),
    "period_y": ("imbalance", "modulus", 4),
    "period_z": ("imbalance", "modulus", 3),
    "heavy": ("imbalance", "across", "blocks"),
    "late_lanes": ("divergence", LANES_MASK, 0x00200020),
    "early_lanes": ("divergence", LANES_MASK, 0xFFDFFFDF),
    "upper_lanes": ("divergence", LANES_MASK, 0xFF000000),
    "late_warps": ("stride", "modulus", 4),
    "growing": ("imbalance", "across", "block index"),
    "border": ("straggler", "of", "border"),
    "stragglers": ("straggler", "of", "blocks"),
    "rows": ("imbalance", "across", "blocks"),
    "last": ("straggler", "of", "last block"),
    "part_of_a_wave": ("wave", "of", "blocks"),
}
HELD_OUT: dict[str, Cause] = CAUSES | {
    "period_x": ("imbalance", "modulus", 5),
    "period_y": ("imbalance", "modulus", 3),
    "period_z": ("imbalance", "modulus", 2),
    "late_lanes": ("divergence", LANES_MASK, 0x20202020),
    "early_lanes": ("divergence", LANES_MASK, 0xDFDFDFDF),
    "upper_lanes": ("divergence", LANES_MASK, 0xFFFF0000),
    "late_warps": ("stride", "modulus", 2),
}
# Of the kernel's name: `kernel<0, 3>`, `kernel<(int)0, (int)3>(…)`.
_TEMPLATE = re.compile(r"<\D*(\d+)\D+(\d+)")


class Kernel(NamedTuple):
    """A kernel, and what was found in it."""

    name: str
    grid: tuple[int, int, int]
    warps: int
    findings: list[Finding]

    def __str__(self) -> str:
        return f"{self.name} {'×'.join(map(str, self.grid))} of {self.warps} warps"


def record(program: Path, part: str, folder: Path) -> None:
    """Record a part, and keep the program's description of its kernels."""
    arguments = [PLANTED] if part == PLANTED else ["uniform", part]
    capture = [sys.executable, "-m", "tracepipe", "capture", "--force", "--gpu", "warps"]
    options = ["--layers", "gpu_kernel,gpu_warp", "--launches-per-kernel", "0", "--gpu-warps", "20000000"]
    command = [*capture, *options, "-o", str(folder / f"{part}.jsonl.zst"), "--", str(program), *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"the recording of {part} ended with {done.returncode}")
    (folder / f"{part}.txt").write_text(done.stdout)


def kernels(folder: Path, part: str) -> Iterator[Kernel]:
    """Each kernel of a part in order, with the findings in it alone."""
    found = {}
    for kernel in kernels_of(load_run(str(folder / f"{part}.jsonl.zst")), "", None).first(0):
        if named := _TEMPLATE.search(kernel.kernel):
            key = (*named.groups(), *map(str, kernel.grid or ()), str(kernel.warps_of_a_block))
            found[key] = find_all([kernel]).findings
    for line in (folder / f"{part}.txt").read_text().splitlines():
        name, *numbers = line.split()
        x, y, z, warps = map(int, numbers[2:])
        yield Kernel(name, (x, y, z), warps, found[tuple(numbers)])


def is_of(finding: Finding, cause: Cause) -> bool:
    """Whether the finding has the kind and the number of the cause. Lanes may be those that exit first: the
    GPU may run the longer side of a branch before the other.
    """
    kind, number, value = cause
    values = (value, value ^ 0xFFFFFFFF) if isinstance(value, int) and number == LANES_MASK else (value,)
    return finding.kind == kind and finding.numbers.get(number) in values


def kind_of(finding: Finding) -> str:
    """The column of the first table that counts the finding."""
    return OF_CLUSTERS if finding.numbers.get("blocks_per_cluster") else finding.kind


def uniform_rows(by_part: dict[str, list[Kernel]]) -> Iterator[tuple[str, ...]]:
    """A row for each kind of work, and one for all: the share of kernels in which each kind was found."""
    for name, kernels_of_it in (*by_part.items(), ("all", list(chain(*by_part.values())))):
        counts = Counter(kind for kernel in kernels_of_it for kind in set(map(kind_of, kernel.findings)))
        count = len(kernels_of_it)
        shares = (f"{counts[kind] / max(count, 1):.1%}" for kind in (*FINDERS, OF_CLUSTERS))
        yield (name, str(count), *shares)


def table(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")
    print()


def show(folder: Path, parts: list[str], causes: Mapping[str, Cause]) -> None:
    """The tables of the parts, and each finding in a uniform kernel."""
    by_part = {part: list(kernels(folder, part)) for part in parts}
    planted = by_part.pop(PLANTED, [])
    if by_part:
        table(("uniform", "kernels", *FINDERS, OF_CLUSTERS), uniform_rows(by_part))
    for kernel in chain(*by_part.values()):
        for finding in kernel.findings:
            print(f"{kernel}: {finding.kind}: {finding.sentence}")
    if planted:
        rows = (planted_row(kernel, causes[kernel.name]) for kernel in planted)
        table(("planted", "kernel", "found", "what else"), rows)


def planted_row(kernel: Kernel, cause: Cause) -> tuple[str, ...]:
    """Whether the cause was found, and what else was."""
    others = [finding for finding in kernel.findings if not is_of(finding, cause)]
    found = "yes" if len(others) < len(kernel.findings) else "no"
    return kernel.name, str(kernel), found, "; ".join(f"{other.kind}: {other.evidence}" for other in others)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the recordings in this folder")
    parser.add_argument(
        "--recorded", type=Path, metavar="FOLDER", help="examine the recordings of --keep, and record nothing"
    )
    parser.add_argument("--only", choices=[*WORKS, PLANTED], action="append", help="parts; all without it")
    parser.add_argument("--held-out", action="store_true", help="the kernels that no figure was chosen with")
    given = parser.parse_args()
    parts, causes = given.only or [*WORKS, PLANTED], HELD_OUT if given.held_out else CAUSES
    if given.recorded:
        show(given.recorded, parts, causes)
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        source, options = Path(__file__).with_suffix(".cu"), ["-DHELD_OUT"] if given.held_out else []
        program = built(this_toolchain(), source, Path(temporary) / "findings_gpu", *options)
        for part in parts:
            record(program, part, folder)
        show(folder, parts, causes)


if __name__ == "__main__":
    main()
