"""What the fuzzer found before, and recordings of every degenerate kind: everything is done with each."""

from __future__ import annotations

import warnings
from pathlib import Path
from random import Random

import pytest

from tests.fuzz import run
from tests.fuzz.judge import Asked, judge
from tests.fuzz.mutations import FINDS, recording

FOUND = sorted(FINDS.iterdir())
# With these the quick tests do everything too.
SAMPLE = {"all-times-equal", "only-begins", "one-warp"}


# The first asks everything of each, the second as the fuzzer does.
@pytest.mark.parametrize(
    ("find", "seed"),
    [
        pytest.param(find, seed, marks=pytest.mark.slow if seed == 1 and find.stem not in SAMPLE else ())
        for find in FOUND
        for seed in (1, 2)
    ],
    ids=lambda value: value.stem if isinstance(value, Path) else None,
)
def test_recordings_that_the_fuzzer_found_pass(find: Path, seed: int, tmp_path: Path) -> None:
    path = tmp_path / find.name
    path.write_bytes(find.read_bytes())
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # what NumPy says of empty columns
        judge(path, Asked(Random(seed), everything=seed == 1))


def test_a_case_is_the_same_each_time() -> None:
    assert [recording(Random(f"1 {case}")) for case in range(50)] == [
        recording(Random(f"1 {case}")) for case in range(50)
    ]


def test_a_failing_case_is_made_small_and_a_hang_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(path: Path, asked: Asked) -> None:
        if b"cuInit" in path.read_bytes():
            raise ValueError("cuInit")

    monkeypatch.setattr(run, "judge", fails)
    path = tmp_path / "input.jsonl"
    case = next(
        case for case in range(500)
        if (data := recording(Random(f"1 {case}"))).count(b"cuInit") and data.count(b"\n") > 9
    )  # fmt: skip
    with pytest.raises(ValueError, match="cuInit"):
        run.run_case(1, case, path)
    small = run.reduced(1, case, path)
    assert b"cuInit" in small and b"\n" not in small

    def hangs(path: Path, asked: Asked) -> None:
        while True:
            pass

    monkeypatch.setattr(run, "judge", hangs)
    monkeypatch.setattr(run, "CASE_SECONDS", 0.01)
    with pytest.raises(run.TooMuchWork):
        run.run_case(1, 0, path)
