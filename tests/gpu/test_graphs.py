"""Lines of kernels in CUDA graphs, and of those that torch.compile made, against what each program says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.gpu.bench import HERE, Bench
from tests.gpu.test_let_go import PATIENCE_S, Recorded, engine
from tests.support.program import PYTHONPATH
from tracepipe.analyses.gpu_by_line import Lines, work_by_stack
from tracepipe.store.run import load_run
from tracepipe.tracer.gpu.engines.compiled_code import VARIABLE, CompiledCode

pytestmark = pytest.mark.gpu

UNKNOWN = "(capture not recorded)"
PLAIN = {1, 2, 16, 17}
"""The kernels of graphs that are a capture of one stream and nothing else, and the capture the only one of
its time.
"""


@pytest.fixture(scope="module")
def library(bench: Bench) -> Path:
    return bench.built("graph_calls", "-shared", "-Xcompiler", "-fPIC")


@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_each_kernel_of_a_graph_has_the_line_that_captured_it(bench: Bench, library: Path, name: str) -> None:
    recorded = Recorded(engine(bench, name), [sys.executable, str(HERE / "graph_calls.py"), str(library)])
    recorded.wait_for(b"}\n")
    assert recorded.finish() == 0
    recorded.collect(is_final=True)
    events = recorded.events()
    expected = {int(number): line for number, line in json.loads(recorded.printed).items()}
    # The line of a node is that of the call of the program's own function `call`, if that added it.
    frames = {
        event["id"]: next(frame for frame in event["frames"] if frame["function"] != "call")
        for event in events
        if event["type"] == "stack"
    }
    seen: Counter[tuple[int, bool]] = Counter()
    for kernel in (event for event in events if event["type"] == "gpu_kernel"):
        found = re.search(r"numbered<\(?(?:int\)?)?(\d+)", kernel["name"])
        if found is None:
            continue
        number, frame = int(found[1]), frames[kernel["stack"]]
        is_known = frame["function"] != UNKNOWN
        if is_known:
            assert frame["line"] == expected[number]
        seen[number, is_known] += 1
    print(name, dict(seen), "lost", recorded.lost)
    assert {number for number, _ in seen} == set(expected) - {18, 19}
    unknown = {number for number, is_known in seen if not is_known}
    assert not unknown & (PLAIN if name == "warps" else set(expected))
    if name == "kernels":
        assert (seen[3, True], seen[10, True], seen[16, True]) == (7, 4, 200)


def lines_of(path: Path) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """The kernels of graphs, and the others, by name and line."""
    run = load_run(str(path))
    lines, graph_of = Lines(run), run.args.whole_numbers("graph")
    of_graphs, others = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for work in work_by_stack(run):
        if work.name != "gpu_kernel":
            continue
        names, args = run.shapes.texts("name", work.layer.shape[work.rows]), work.layer.args[work.rows]
        for name, stack, number in zip(names, work.stack.tolist(), args.tolist(), strict=True):
            is_of_graph = number >= 0 and graph_of[number] >= 0
            (of_graphs if is_of_graph else others)[str(name), lines.of(stack)[0]] += 1
    return of_graphs, others


@pytest.mark.parametrize("what", ["decode", "train"])
def test_a_replay_has_the_lines_of_the_eager_step(bench: Bench, tmp_path: Path, what: str) -> None:
    pytest.importorskip("torch")
    path = tmp_path / "run.jsonl"
    capture = [sys.executable, "-m", "tracepipe", "capture", "--gpu", "kernels", "--layers", "gpu_kernel"]
    options = ["--start-on", "profiler", "-o", str(path), "--"]
    command = [*capture, *options, sys.executable, str(HERE / "captured_model.py"), what]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": PYTHONPATH}, check=True, timeout=PATIENCE_S)
    graph, eager = lines_of(path)
    assert sum(graph.values()) > 50
    assert {key: count / 4 for key, count in graph.items()} == {
        key: count / 2 for key, count in eager.items()
    }


def test_lines_behind_compiled_code_are_those_that_inductor_states(bench: Bench, tmp_path: Path) -> None:
    """Inductor's provenance is kept only if it is asked for, and has the stacks of each kernel's nodes."""
    pytest.importorskip("torch")
    logs = tmp_path / "logs"
    logs.mkdir()
    more = {
        VARIABLE: str(logs),
        "INDUCTOR_PROVENANCE": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
    }
    command = [sys.executable, str(HERE / "captured_model.py"), "compile"]
    subprocess.run(command, env={**os.environ, **more}, check=True, timeout=PATIENCE_S)
    code, kernels, known = CompiledCode(logs), 0, 0
    for log in logs.iterdir():
        for file, line, stated in _stated(log):
            read = {
                (one.removesuffix(", backward"), *place)
                for one, *place in code.behind([("call", file, line)])
            }
            assert read <= stated
            kernels, known = kernels + 1, known + bool(read)
    print("kernels", kernels, "with lines", known)
    assert kernels > 20
    assert known >= 0.95 * kernels


def _stated(log: Path) -> list[tuple[str, int, set[tuple[str, str, int]]]]:
    """For each kernel's call: file and line of the generated code, and the lines of its nodes."""
    records: list[tuple[dict[str, Any], list[str]]] = []
    for text in log.read_text(errors="replace").splitlines():
        if text.startswith("\t") and records:
            records[-1][1].append(text[1:])
        elif (found := re.match(r"V\d{4} [^]]*\] (\{.*\})", text)) is not None:
            records.append((json.loads(found[1]), []))
    stated, code = [], ("", list[str]())
    for about, content in records:
        if "inductor_output_code" in about:
            code = about["inductor_output_code"]["filename"], content
        name = about.get("artifact", {}).get("name")
        if name != "inductor_provenance_tracking_kernel_stack_traces" or not content:
            continue
        traces, handle = json.loads("\n".join(content)), ""
        for line, text in enumerate(code[1], 1):
            if (found := re.match(r"\s*# \[Provenance debug handles\] (\S+)", text)) is not None:
                handle = found[1]
            elif handle and re.search(r"\.run\(|extern_kernels\.|torch\.ops\.|aten\.", text):
                frames = [re.findall(r'File "(.+?)", line (\d+), in (\S+)', one) for one in traces[handle]]
                places = {(one[-1][2], one[-1][0], int(one[-1][1])) for one in frames if one}
                if places:
                    stated.append((code[0], line, places))
                handle = ""
    return stated
