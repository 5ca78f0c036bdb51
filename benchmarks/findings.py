"""Measures how often `tracepipe warps` is right: false alarms on uniform kernels, detection of planted
effects.

    python benchmarks/findings.py [--trials 200] [--false-trials 50] [--only REGEX]

Kernels are simulated (`tests/support/synthetic_warps.py`): blocks handed out in order to free slots, noise
of four shapes on blocks, warps and lanes, times on a clock of 32 ns. A trial is a kernel with its own seed.
Noise is a share of a warp's life, once for each block and once for each warp.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.synthetic_warps import NOISES, SyntheticKernel
from tracepipe.analyses.findings import FINDERS, find_all

SIGMAS = (0.02, 0.05, 0.2)

# Kernels without an effect, but with waves, ramps, cold caches, and several launches.
UNIFORM: dict[str, dict[str, Any]] = {
    "one wave": {"blocks": 128},
    "four waves": {"blocks": 512},
    "four waves, the first cold": {"blocks": 512, "first_wave": 0.5},
    "a grid of 32×16": {"blocks": 512, "grid": (32, 16, 1), "warps": 8},
    "launched no faster than it runs": {"blocks": 200, "ramp_ns": 50, "life_ns": 2_000},
    "8 launches": {"blocks": 128, "launches": 8},
    "16 blocks of 8 warps": {"blocks": 16, "warps": 8},
    "threads, entry and exit": {"blocks": 64, "lanes_timed": True},
    "threads, exit only": {"blocks": 64, "lanes_timed": True, "entries": False},
    "threads, one warp": {"blocks": 1, "warps": 1, "lanes_timed": True, "entries": False},
    "threads, one warp, lanes in turn": {
        "blocks": 1,
        "warps": 1,
        "lanes_timed": True,
        "entries": False,
        "lane_step_ns": 200,
    },
    "threads, lanes in turn": {"blocks": 32, "lanes_timed": True, "lane_step_ns": 200},
    "threads, a clock of 1 µs": {"blocks": 4, "lanes_timed": True, "entries": False, "step_ns": 1024},
    "16 blocks of 3 warps": {"blocks": 16, "warps": 3, "lanes_timed": True, "entries": False},
}


# Of 512, one in sixteen at random.
HEAVY = tuple(np.flatnonzero(np.random.default_rng(5).random(512) < 1 / 16).tolist())


class Effect(NamedTuple):
    """A planted effect: the kind that must be found, and the kernel without noise and delay."""

    name: str
    kind: str
    kernel: dict[str, Any]
    delays: tuple[float, ...]
    """Shares of a warp's lifetime."""
    by: str = "delay"


EFFECTS = (
    Effect(
        "lane 31 late in every warp",
        "divergence",
        {"late_lanes": (31,), "blocks": 128},
        (0.03, 0.06, 0.1, 0.2),
    ),
    Effect(
        "lanes 16–19 late in half the warps, threads",
        "divergence",
        {"late_lanes": (16, 17, 18, 19), "late_lanes_share": 0.5, "lanes_timed": True, "blocks": 64},
        (0.06, 0.1, 0.2, 0.5),
    ),
    Effect(
        "lane 31 late in a single warp, threads in turn",
        "divergence",
        {
            "late_lanes": (31,),
            "blocks": 1,
            "warps": 1,
            "lanes_timed": True,
            "entries": False,
            "lane_step_ns": 200,
        },
        (0.1, 0.2, 0.5, 1.0),
    ),
    Effect(
        "t mod 8 = 7 late", "stride", {"late_lanes": (7, 15, 23, 31), "blocks": 128}, (0.03, 0.06, 0.1, 0.2)
    ),
    Effect(
        "t mod 8 = 7 late, threads",
        "stride",
        {"late_lanes": (7, 15, 23, 31), "lanes_timed": True, "blocks": 64},
        (0.03, 0.06, 0.1, 0.2),
    ),
    Effect(
        "t mod 8 = 7 late, threads, one block",
        "stride",
        {"late_lanes": (7, 15, 23, 31), "lanes_timed": True, "blocks": 1, "warps": 8},
        (0.03, 0.06, 0.1, 0.2),
    ),
    Effect("every 4th warp late", "stride", {"warps": 8, "late_warps": (3, 7)}, (0.03, 0.06, 0.1, 0.2)),
    Effect("a block of 512 late", "straggler", {"late_blocks": (500,)}, (0.2, 0.5, 1.0, 2.0)),
    Effect("4 blocks of 512 late", "straggler", {"late_blocks": (30, 99, 250, 500)}, (0.2, 0.5, 1.0, 2.0)),
    Effect(
        "a block of 128 late in 20 launches",
        "straggler",
        {"blocks": 128, "late_blocks": (77,), "launches": 20},
        (0.1, 0.2, 0.5, 1.0),
    ),
    Effect(
        "border of 16×8 late in 4 launches",
        "straggler",
        {
            "blocks": 128,
            "grid": (16, 8, 1),
            "launches": 4,
            "late_blocks": tuple(b for b in range(128) if b % 16 in (0, 15) or b // 16 in (0, 7)),
        },
        (0.06, 0.1, 0.2, 0.5),
    ),
    Effect("an SM of 32 slow", "imbalance", {"late_sms": (5,)}, (0.12, 0.3, 0.5, 1.0)),
    Effect("work grows along the grid", "imbalance", {}, (0.3, 0.6, 1.0, 2.0), "trend"),
    Effect("every 7th block late", "imbalance", {"late_blocks": tuple(range(3, 512, 7))}, (0.2, 0.5, 1.0)),
    Effect("a block of 16, at random, late", "imbalance", {"late_blocks": HEAVY}, (2.0, 3.0, 7.0)),
    Effect("warps one after the other", "wave", {"warps": 8}, (0.05, 0.1, 0.2, 0.5), "in_order"),
    Effect("blocks for a wave and a part", "wave", {}, (0.9, 0.5, 0.25, 0.1), "part"),
)


def planted(effect: Effect, sigma: float, delay: float) -> SyntheticKernel:
    """The kernel of a trial."""
    options = dict(effect.kernel)
    if effect.by == "part":
        options["blocks"] = 128 + round(128 * delay)
    else:
        options[effect.by] = delay
    lanes = sigma if options.get("lanes_timed") else 0.0
    return SyntheticKernel(sigma=sigma, lane_sigma=lanes, **options)


def found_in(kernel: SyntheticKernel, seed: int) -> set[str]:
    """The kinds of findings in one trial."""
    return {finding.kind for finding in find_all([kernel.run(seed)]).findings}


def _false_alarms(job: tuple[dict[str, Any], str, float, int]) -> Counter[str]:
    options, noise, sigma, trials = job
    lanes = sigma if options.get("lanes_timed") else 0.0
    kernel = SyntheticKernel(noise=noise, sigma=sigma, lane_sigma=lanes, **options)
    return Counter(kind for seed in range(trials) for kind in found_in(kernel, seed))


def _detected(job: tuple[Effect, float, float, int]) -> float:
    effect, sigma, delay, trials = job
    kernel = planted(effect, sigma, delay)
    return float(np.mean([effect.kind in found_in(kernel, 10_000 + seed) for seed in range(trials)]))


def false_alarms(
    pool: ProcessPoolExecutor, trials: int, uniform: dict[str, dict[str, Any]]
) -> Iterator[tuple[str, ...]]:
    """A row for each uniform kernel and noise: the share of trials in which each kind was found."""
    jobs = [(o, noise, sigma, trials) for o in uniform.values() for noise in NOISES for sigma in SIGMAS]
    counts = iter(pool.map(_false_alarms, jobs))
    total: Counter[str] = Counter()
    for name in uniform:
        sums: Counter[str] = Counter()
        for _ in range(len(NOISES) * len(SIGMAS)):
            sums += next(counts)
        total += sums
        of = trials * len(NOISES) * len(SIGMAS)
        yield (name, str(of), *(f"{sums[kind] / of:.2%}" for kind in FINDERS))
    of = max(trials * len(jobs), 1)
    yield ("all", str(of), *(f"{total[kind] / of:.2%}" for kind in FINDERS))


def detections(pool: ProcessPoolExecutor, trials: int, effects: list[Effect]) -> Iterator[tuple[str, ...]]:
    """A row for each effect and size: the share of trials in which it was found, by level of noise."""
    jobs = [(e, sigma, delay, trials) for e in effects for delay in e.delays for sigma in SIGMAS]
    rates = iter(pool.map(_detected, jobs))
    for effect in effects:
        for delay in effect.delays:
            size = f"{delay:.0%}" if effect.by != "part" else f"{1 + delay:.2f} waves"
            yield (effect.kind, effect.name, size, *(f"{next(rates):.0%}" for _ in SIGMAS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=200, help="of each planted effect, size and noise")
    parser.add_argument("--false-trials", type=int, default=50, help="of each uniform kernel and noise")
    parser.add_argument("--only", type=re.compile, default="", help="rows whose name this expression matches")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    uniform = {name: kernel for name, kernel in UNIFORM.items() if re.search(given.only, name)}
    effects = [effect for effect in EFFECTS if re.search(given.only, effect.name)]
    with ProcessPoolExecutor(given.jobs) as pool:
        _print(("uniform kernel", "trials", *FINDERS), false_alarms(pool, given.false_trials, uniform))
        noises = tuple(f"noise {sigma:.0%}" for sigma in SIGMAS)
        _print(("kind", "planted", "size", *noises), detections(pool, given.trials, effects))


def _print(header: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> None:
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}", flush=True)
    for row in rows:
        print(f"| {' | '.join(row)} |", flush=True)
    print()


if __name__ == "__main__":
    main()
