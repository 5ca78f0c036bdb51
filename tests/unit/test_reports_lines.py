"""Lines of Python: which the GPU worked for, what each allocated, and for which autograd's work is."""

from __future__ import annotations

import io
import json
from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tracepipe
from tests.support.recordings import Load, event, loader, span
from tracepipe.analyses.gpu_by_line import gpu_by_line
from tracepipe.reports import REPORTS
from tracepipe.reports.lines import Options, run
from tracepipe.store.run import load_run

SAMPLE = Path(__file__).parents[2] / "fixtures" / "python-stacks" / "input.jsonl"
TRAIN, TORCH = "/home/ann/train.py", "/usr/lib/python3/dist-packages/torch/nn/linear.py"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def stack(id: int, *places: tuple[str, int]) -> dict[str, Any]:
    frames = [{"function": "f", "file": file, "line": line} for file, line in places]
    return {"type": "stack", "id": id, "frames": frames}


def launch(at: int, id: int, **more: Any) -> dict[str, Any]:
    return span(at, at + 5, "cuLaunchKernel", launch=id, **more)


def kernel(at: int, id: int, dur_ns: int = 10, **more: Any) -> dict[str, Any]:
    return span(at, at + dur_ns, "gemm", "gpu_kernel", launch=id, gpu=0, stream=7, **more)


def ranged(at: int, end: int, name: str, **more: Any) -> list[dict[str, Any]]:
    return [event("B", at, name, "annotation", **more), event("E", end, name, "annotation", **more)]


def times(result: Any) -> dict[str, tuple[int, int]]:
    """Line → time on the GPU, and kernels."""
    return {row["line"]: (row["gpu_ns"], row["kernels"]) for row in result.as_json()["lines"]}


def test_the_sample_has_each_line_with_what_it_launched() -> None:
    result = run(load_run(str(SAMPLE)), Options())
    assert times(result) == {
        "model/net.py:17 forward, backward": (192_000, 8),
        "model/net.py:17 forward": (80_000, 4),
        "model/train.py:44 step": (10_000, 2),
        "model/train.py:38 step": (6_000, 0),
        "model/train.py:41 step": (6_000, 2),
        "autograd (line not known)": (4_000, 2),
    }
    as_json = result.as_json()
    assert sum(row["share_percent"] for row in as_json["lines"]) == pytest.approx(100)
    (copies,) = [row for row in as_json["lines"] if row["copies"]]
    assert (copies["line"], copies["copies"], copies["copied_bytes"]) == ("model/train.py:38 step", 2, 8_192)
    assert as_json["allocations"] == [{"line": "model/net.py:17 forward", "count": 1, "size_bytes": 1 << 20}]
    first = [(row["name"], row["count"], row["gpu_ns"]) for row in as_json["work"][:2]]
    assert first == [("gemm", 4, 96_000), ("reduce", 4, 96_000)]


def test_frames_choose_which_lines_stand_for_a_stack() -> None:
    sample = load_run(str(SAMPLE))
    inner, every = (times(run(sample, Options(frames))) for frames in ("innermost", "all"))
    assert inner["modules/linear.py:134 forward"] == (80_000, 4)
    assert inner["optim/sgd.py:120 step"] == (10_000, 2)
    # Each kernel once for a line, however often its stack has it; 298 µs less those of autograd.
    assert every["model/train.py:60 <module>"] == (102_000, 8)
    assert every["model/train.py:60 <module>, backward"] == (192_000, 8)
    assert every["modules/module.py:1775 _call_impl"] == (80_000, 4)


def test_a_call_inside_another_has_the_stack_of_that_one(load: Load) -> None:
    result = run(
        load(
            stack(1, (TRAIN, 7)),
            event("B", 2_000, "cudaLaunchKernel", stack=1),
            launch(2_001, 3),
            event("E", 2_010, "cudaLaunchKernel"),
            kernel(2_100, 3),
            launch(2_200, 4),
            kernel(2_300, 4, 20),
            kernel(2_400, 5, 30),
        ),
        Options(),
    )
    assert times(result) == {
        "ann/train.py:7 f": (10, 1),
        "(no Python)": (20, 1),
        "(launch call not recorded)": (30, 1),
    }


def test_kernels_of_a_graph_have_the_lines_that_captured_them(load: Load, tmp_path: Path) -> None:
    """The call that replays the graph, and what it launched by itself, keep the line of the call."""
    replays = [
        line
        for at in range(10_000, 50_000, 10_000)
        for line in (
            launch(at, at, stack=1),
            kernel(at + 100, at, stack=2),
            kernel(at + 110, at, stack=3),
            kernel(at + 120, at, 20, stack=4),
        )
    ]
    unknown = {"type": "stack", "id": 4, "frames": [{"function": "(capture not recorded)"}]}
    stacks = stack(1, (TRAIN, 90)), stack(2, (TORCH, 1), (TRAIN, 5)), stack(3, (TRAIN, 6)), unknown
    recorded = load(*stacks, *replays, launch(60_000, 3, stack=1), kernel(60_010, 3))
    captured = {
        "ann/train.py:5 f": (40, 4),
        "ann/train.py:6 f": (40, 4),
        "(capture not recorded)": (80, 4),
        "ann/train.py:90 f": (10, 1),
    }
    assert times(run(recorded, Options())) == captured
    assert {line: (gpu_ns, count) for line, gpu_ns, count in gpu_by_line(recorded)} == captured
    (chain,) = REPORTS["gaps"].run(recorded, REPORTS["gaps"].options()).as_json()["chains"]
    assert chain["launched_by"] == "ann/train.py:5 f"
    tracepipe.convert(tmp_path / "run.jsonl", tmp_path / "run.json", "chrome")
    shown = json.loads((tmp_path / "run.json").read_bytes())["traceEvents"]
    lines = Counter((one["name"], one["args"]["python"]) for one in shown if "python" in one.get("args", {}))
    assert lines == {
        ("cuLaunchKernel", "ann/train.py:90 f"): 5,
        **{("gemm", line): kernels for line, (_, kernels) in captured.items()},
    }


def test_backward_is_for_the_last_forward_range_with_its_number(load: Load) -> None:
    backward = {"tid": 9}
    result = run(
        load(
            stack(1, (TORCH, 1), (TRAIN, 1)),
            stack(2, (TORCH, 1), (TRAIN, 2)),
            # `aten::t` makes no backward and leaves the number to what comes next.
            *ranged(2_000, 2_010, "aten::t, seq = 5"),
            *ranged(2_020, 2_040, "aten::mm, seq = 5, op_id = 4"),
            launch(2_025, 1, stack=1),
            *ranged(2_050, 2_070, "aten::mm, seq = 6"),
            launch(2_055, 2, stack=2),
            *ranged(3_000, 3_100, "MmBackward0, seq = 5", **backward),
            # What runs in it has a number of its own, which is not meant.
            *ranged(3_010, 3_050, "aten::mm, seq = 6", **backward),
            launch(3_020, 3, **backward),
            *ranged(3_200, 3_300, "MmBackward0, seq = 7", **backward),
            launch(3_220, 4, **backward),
            launch(3_400, 5, **backward),
            kernel(4_000, 3),
            kernel(4_100, 4),
            kernel(4_200, 5),
        ),
        Options(),
    )
    assert times(result) == {"ann/train.py:1 f, backward": (10, 1), "autograd (line not known)": (20, 2)}


def test_a_stack_of_installed_packages_alone_does_not_hide_whom_autograd_works_for(load: Load) -> None:
    """Compiled code runs Python on autograd's thread, without a frame of the user's."""
    backward = {"tid": 9, "comm": "pt_autograd_0"}
    result = run(
        load(
            stack(1, (TRAIN, 1)),
            stack(2, (TORCH, 1)),
            *ranged(2_000, 2_040, "CompiledFunction, seq = 5"),
            launch(2_025, 1, stack=1),
            *ranged(3_000, 3_100, "CompiledFunctionBackward, seq = 5", **backward),
            launch(3_020, 3, stack=2, **backward),
            launch(3_220, 4, stack=2, **backward),
            launch(3_400, 5, stack=2),
            kernel(4_000, 3),
            kernel(4_100, 4),
            kernel(4_200, 5),
        ),
        Options(),
    )
    assert times(result) == {
        "ann/train.py:1 f, backward": (10, 1),
        "autograd (line not known)": (10, 1),
        "nn/linear.py:1 f": (10, 1),
    }


@pytest.mark.parametrize("calls", ["with calls of its own", ""])
def test_backward_is_for_the_python_around_the_forward_operator(calls: str, tmp_path: Path) -> None:
    """PyTorch's profiler has sequence numbers in the arguments. An operator such as `aten::expand` launches
    nothing, but its gradient does.
    """
    backward = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        traced("python_function", "train.py(1): main", 0, 900, 1),
        traced("python_function", "model.py(7): forward", 10, 100, 1),
        traced("cpu_op", "aten::expand", 20, 50, 1, **{"Sequence number": 5, "Fwd thread id": 0}),
        traced("cpu_op", "ExpandBackward0", 200, 100, 2, **backward),
        traced("cpu_op", "ExpandBackward0", 210, 80, 2, **backward),
        traced("cpu_op", "AccumulateGrad", 310, 10, 2),
    ]
    launches = [(220, 2), (312, 2), (400, 1)] + ([(30, 1)] if calls else [])
    for id, (ts, tid) in enumerate(launches, 1):
        events.append(traced("cuda_runtime", "cudaLaunchKernel", ts, 1, tid, correlation=id))
        events.append(traced("kernel", "k", 1_000 * id, id, 7, correlation=id, device=0, stream=7))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    result = run(load_run(str(path)), Options())
    expected = {
        "model.py:7 forward, backward": (1_000, 1),
        "autograd (line not known)": (2_000, 1),
        "train.py:1 main": (3_000, 1),
    }
    assert times(result) == expected | ({"model.py:7 forward": (4_000, 1)} if calls else {})
    assert "Backward: autograd launched it" in result.parts[0].note


def test_compiled_code_of_a_profile_leads_to_the_model() -> None:
    """Not to files of Inductor's cache, nor to Triton's launcher."""
    result = run(load_run(str(SAMPLE.parents[1] / "kineto-compiled" / "input.json")), Options())
    assert times(result) == {
        "t.py:15 forward, backward": (86_884, 33),
        "t.py:15 forward": (85_698, 23),
        "t.py:39 step": (3_104, 2),
        "t.py:39 step, backward": (2_560, 2),
    }


def test_the_stack_of_autograd_does_not_hide_whom_it_works_for(load: Load) -> None:
    result = run(
        load(
            stack(1, (TRAIN, 1)),
            {"type": "stack", "id": 2, "frames": [{"function": "autograd (line not known)"}]},
            *ranged(2_000, 2_040, "aten::mm, seq = 5"),
            launch(2_025, 1, stack=1),
            *ranged(3_000, 3_100, "MmBackward0, seq = 5", tid=9),
            launch(3_020, 3, stack=2, tid=9),
            launch(3_220, 4, stack=2, tid=10),
            kernel(4_000, 3),
            kernel(4_100, 4),
        ),
        Options(),
    )
    assert times(result) == {"ann/train.py:1 f, backward": (10, 1), "autograd (line not known)": (10, 1)}


def test_autograd_s_thread_is_known_by_its_name_alone(load: Load) -> None:
    lines = [launch(2_000, 1, tid=9, comm="pt_autograd_0"), kernel(2_100, 1)]
    assert times(run(load(*lines), Options())) == {"autograd (line not known)": (10, 1)}


def test_missing_stacks_and_calls_are_reported(load: Load) -> None:
    bare = span(2_000, 2_010, "gemm", "gpu_kernel", gpu=0, stream=7)
    result = run(load(bare, stack(1, (TRAIN, 1)) | {"omitted": 3}), Options())
    assert times(result) == {"(launch call not recorded)": (10, 1)}
    assert result.notes == ["some stacks are deeper than is recorded: they lack their outermost frames"]
    assert run(load(launch(2_000, 1)), Options()).notes == ["no stacks of Python were recorded"]


def test_lines_beyond_the_top_are_counted() -> None:
    result = run(load_run(str(SAMPLE)), Options(top=2))
    assert len(times(result)) == 2
    assert "4 more lines are not listed: --top 0 lists all" in result.notes


def test_exported_calls_and_kernels_have_their_stacks() -> None:
    sample = load_run(str(SAMPLE))
    kernels, stacks = (sample.table(name).pl() for name in ("kernels", "stacks"))
    assert kernels.filter(name="sgd")["python"].to_list() == ["model/train.py:44 step"] * 2
    assert kernels.filter(name="reduce")["python"].null_count() == 4
    number = kernels.filter(name="sgd")["stack"][0]
    assert stacks.filter(stack=number).select("frame", "line", "is_library").rows() == [
        (0, 120, True), (1, 44, False), (2, 60, False)
    ]  # fmt: skip
    calls = sample.calls.pl()
    assert calls.filter(name="cudaFree")["python"].to_list() == [None]


@pytest.mark.slow
@pytest.mark.parametrize(("recording", "belongs"), [("python-stacks", True), ("host-layers", False)])
def test_a_page_has_lines_where_there_are_stacks(recording: str, belongs: bool) -> None:
    out = io.BytesIO()
    page = REPORTS["report"]
    page.run(load_run(str(SAMPLE.parents[1] / recording / "input.jsonl")), page.options()).files[".html"](out)
    assert ("Lines of Python" in out.getvalue().decode()) is belongs


@pytest.mark.parametrize("seed", range(6))
def test_slices_of_python_functions_are_stacks_where_none_were_recorded(seed: int, tmp_path: Path) -> None:
    """PyTorch's profiler writes functions as slices: a kernel is for the innermost one around its launch that
    is in no library, found here one by one.
    """
    rng, events, expected = Random(seed), list[dict[str, Any]](), Counter[str]()
    files = ("train.py", "model.py", "torch/nn/modules/module.py", "/usr/lib/python3.11/threading.py", "")
    slices: dict[int, list[tuple[int, int, str, int]]] = {1: [], 2: []}

    def nest(tid: int, start: int, end: int, depth: int) -> None:
        while start < end - 2 and depth:
            begin, stop = sorted(rng.sample(range(start, end + 1), 2))
            file, line = rng.choice(files), rng.randrange(1, 4)
            slices[tid].append((begin, stop, file, line))
            name = f"{file}({line}): f" if file else "<built-in method mm>"
            events.append(traced("python_function", name, begin, stop - begin, tid))
            nest(tid, begin, stop, depth - 1)
            start = stop

    for tid in slices:
        nest(tid, 0, 2_000, 6)
    for id in range(1, 60):
        at, tid = rng.randrange(2_000), rng.choice((1, 2))
        events.append(traced("cuda_runtime", "cudaLaunchKernel", at, 1, tid, correlation=id))
        events.append(traced("kernel", "k", 3_000 + id, id, 7, correlation=id, device=0, stream=7))
        # The slices are in the order of their begins, a caller before what it calls.
        around = [one for one in slices[tid] if one[0] <= at < one[1] and one[2]][::-1]
        own = [one for one in around if one[2] in ("train.py", "model.py")] or around[:1]
        line = f"{'/'.join(own[0][2].split('/')[-2:])}:{own[0][3]} f" if own else "(no Python)"
        expected[line] += id * 1_000
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": events}))
    result = run(load_run(str(path)), Options(top=0))
    assert {row["line"]: row["gpu_ns"] for row in result.as_json()["lines"]} == expected
    assert any("stacks" in note for note in result.notes) is not any(slices.values())


def traced(category: str, name: str, ts: int, dur: int, tid: int, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": tid,
        "ts": ts,
        "dur": dur,
        "args": args,
    }
