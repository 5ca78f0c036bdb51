"""What calls of the CUDA libraries do, told by their names: launch, allocate, copy."""

from __future__ import annotations

import re
from functools import cache

from tracepipe.hooks.sets import load_set
from tracepipe.reports.frames.libraries import pl
from tracepipe.reports.frames.nesting import first_of_their_kind
from tracepipe.reports.frames.run import Run

# Not cuLaunchHostFunc and its like, which run on the host.
_LAUNCH = re.compile(
    r"(__)?cu(da)?(Launch(Cooperative)?Kernel(MultiDevice|Ex|ExC)?|LaunchGrid(Async)?|Launch|GraphLaunch)"
    r"(_v\d+)?(_ptsz|_ptds)?"
)
_SETS = ("cuda-driver", "cuda-runtime")
MEMORY_EFFECTS = ("alloc", "free", "alloc_host", "free_host", "set")


def is_launch(name: str) -> bool:
    """Whether a call of that name puts kernels, or a graph of them, on a stream."""
    return _LAUNCH.fullmatch(name) is not None


@cache
def _effects() -> tuple[dict[str, tuple[str, str]], tuple[str, ...]]:
    """Function → effect and direction, as the shipped hooks have them; endings that a name may have."""
    known: dict[str, tuple[str, str]] = {}
    variants: set[str] = set()
    for name in _SETS:
        hooks = load_set(name)
        variants.update(hooks.variants)
        known |= {hook.pattern: (hook.effect, hook.direction) for hook in hooks.hooks if hook.effect}
    return known, tuple(sorted(variants, key=len, reverse=True))


def effect_of(name: str) -> tuple[str, str]:
    """What a successful call does (`alloc`, …, `transfer`) and the direction, "" each where unknown."""
    known, variants = _effects()
    before = ""
    while name not in known and name != before:
        before = name
        name = next((name.removesuffix(end) for end in variants if name.endswith(end)), name)
    return known.get(name, ("", ""))


def launches(run: Run) -> pl.DataFrame:
    """The calls that launch kernels, a runtime's call and the driver's inside it once."""
    names = run.calls["name"].unique()
    launching = names.filter(pl.Series([is_launch(name) for name in names], dtype=pl.Boolean))
    flagged = run.calls["name"].is_in(launching.to_list()) & (run.calls["kind"] != "no_begin")
    return first_of_their_kind(run.calls, flagged.to_numpy())


def effects_of_calls(run: Run) -> pl.DataFrame:
    """What calls did to memory: rows of `run.calls` with `effect`, `direction` and `failed`.

    A runtime's call and the driver's inside it count once. A call that failed did nothing.
    """
    names = run.calls["name"].unique().to_list()
    effects = {name: effect_of(name) for name in names}
    calls = run.calls.with_columns(
        pl.col("name").replace_strict({k: v[0] for k, v in effects.items()}, default="").alias("effect"),
        pl.coalesce(
            pl.col("args").str.json_path_match("$.direction"),
            pl.col("name").replace_strict({k: v[1] or None for k, v in effects.items()}, default=None),
            pl.lit("copy"),
        ).alias("direction"),
        (pl.col("result").fill_null(0) != 0).alias("failed"),
    )
    found = []
    for effect in (*MEMORY_EFFECTS, "transfer"):
        flagged = (calls["effect"] == effect) & (calls["kind"] != "no_begin")
        found.append(first_of_their_kind(calls, flagged.to_numpy()))
    return pl.concat(found)
