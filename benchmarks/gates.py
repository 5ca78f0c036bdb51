"""Measures how often gates of `tracepipe diff` are broken, where nothing changed and where steps are longer.

    python benchmarks/gates.py [--runs N]

Records a program whose steps are ranges of NVTX, natively timed loops, N times as it is and N times each with
3%, 5% and 10% longer loops, in turn. Then recordings are drawn: 100 times five and five of the first kind,
and five of the first and five of another. Needs g++ and a header of NVTX (pip install nvidia-nvtx).
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tracepipe.analyses.gates import Gate, judge  # noqa: E402
from tracepipe.analyses.wall_time import wall_time_of  # noqa: E402
from tracepipe.libraries import np  # noqa: E402
from tracepipe.store.run import load_run  # noqa: E402
from tracepipe.tracer.gpu.build.toolchain import find_parts  # noqa: E402

LONGER = (0, 3, 5, 10)
DRAWS, SIDE = 100, 5
ALPHA = 0.05
GATES = ("step<=+0%", "step<=+1%", "step<=+3%")
PROGRAM = """
#include <nvtx3/nvToolsExt.h>
#include <cstdio>
#include <cstdlib>
int main(int, char **arguments) {
    volatile unsigned work = 0;
    char name[32];
    for (int step = 0; step < 60; step++) {
        snprintf(name, sizeof name, "step %d", step);
        nvtxRangePushA(name);
        for (long at = 0, count = atol(arguments[1]); at < count; at++) work += unsigned(at);
        nvtxRangePop();
    }
}
"""
LOOPS = 2_000_000


def built(folder: Path) -> Path:
    """The program. Raises CalledProcessError, and StopIteration without a header of NVTX."""
    includes = [path for part in find_parts().cupti for path in part.include]
    header = next(path for path in includes if (path / "nvtx3/nvToolsExt.h").exists())
    source, program = folder / "steps.cpp", folder / "steps"
    source.write_text(PROGRAM)
    subprocess.run(["g++", "-O1", f"-isystem{header}", str(source), "-ldl", "-o", str(program)], check=True)
    return program


def step_ns(program: Path, percent: int, output: Path) -> int:
    """The median step of a new recording."""
    command = [
        sys.executable,
        "-m",
        "tracepipe",
        "capture",
        "--layers",
        "annotation",
        "--force",
        "-o",
        str(output),
    ]
    given = {**os.environ, "PYTHONPATH": str(ROOT), "TRACEPIPE_CACHE": "off"}
    loops = str(LOOPS * (100 + percent) // 100)
    subprocess.run([*command, "--", str(program), loops], check=True, capture_output=True, env=given)
    return wall_time_of(load_run(str(output))).median_step_ns


def answers(first: Sequence[int], other: Sequence[int], gate: str) -> Counter[str]:
    """How often each answer is given of recordings that are drawn from both."""
    draw, found = random.Random(1), Counter[str]()
    for _ in range(DRAWS):
        if first is other:
            values = draw.sample(first, 2 * SIDE)
        else:
            values = draw.sample(first, SIDE) + draw.sample(other, SIDE)
        array = np.array(values, np.float64)
        found[judge(Gate.read(gate), array, array, SIDE, ALPHA, 1).answer] += 1
    return found


def main() -> None:
    """Record, draw and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--runs", type=int, default=12)
    runs = max(parser.parse_args().runs, 2 * SIDE)
    found: dict[int, list[int]] = {percent: [] for percent in LONGER}
    with tempfile.TemporaryDirectory() as folder:
        program = built(Path(folder))
        for _ in range(runs):
            for percent in random.sample(LONGER, len(LONGER)):
                found[percent].append(step_ns(program, percent, Path(folder) / "run.jsonl"))
    print(f"{runs} recordings of each, {SIDE} and {SIDE} drawn {DRAWS} times, alpha {ALPHA}")
    for percent, steps_ns in found.items():
        middle = float(np.median(steps_ns))
        spread = 100 * float(np.ptp(steps_ns)) / middle
        print(f"steps {percent}% longer: {middle / 1e6:.3f} ms, {spread:.1f}% between the least and the most")
        for gate in GATES:
            counts = answers(found[0], steps_ns, gate)
            says = ", ".join(f"{counts[answer]} {answer}" for answer in ("broken", "held", "cannot tell"))
            print(f"    {gate}: {says}")


if __name__ == "__main__":
    main()
