"""Which calls are recorded: one rule, for the probes and for the engines for GPUs, which read it in C++."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.hooks.calls import CALL_RULES, CALL_SETS, call_rule
from tracepipe.hooks.sets import load_set
from tracepipe.tracer.engines.probes import PrebuiltEngine
from tracepipe.tracer.gpu.build.toolchain import NATIVE
from tracepipe.tracer.gpu.choice import CALLS_VARIABLE, calls_text
from tracepipe.tracer.gpu.engines.api_calls import parameters
from tracepipe.tracer.plan import plan_of
from tracepipe.tracer.request import CaptureRequest, calls_of

FUNCTIONS = sorted(parameters())


@pytest.mark.parametrize(
    ("function", "recorded_by"),
    [
        ("cudaGetDevice", {"all"}),
        ("cuCtxGetDevice", {"all"}),
        ("cudaPeekAtLastError", {"all"}),
        ("cuEventQuery", {"all"}),
        ("cuOccupancyMaxActiveBlocksPerMultiprocessor", {"all"}),
        ("cudaStreamIsCapturing", {"all"}),
        ("cudaSetDevice", {"all", "default"}),
        ("cudaMalloc", {"all", "default"}),
        ("cuIpcGetMemHandle", {"all", "default"}),
        ("cuGraphAddMemcpyNode", {"all", "default"}),
        ("cuStreamWaitEvent", {"all", "default", "launches"}),
        ("cuModuleGetFunction", {"all", "default", "launches"}),
        ("cuLaunchKernelEx", {"all", "default", "launches"}),
        ("cudaGraphLaunch", {"all", "default", "launches"}),
        ("cuMemcpyHtoDAsync_v2", {"all", "default", "launches"}),
        ("cuMemsetD8_v2", {"all", "default", "launches"}),
        ("cudaDeviceSynchronize", {"all", "default", "launches"}),
    ],
)
def test_each_rule_takes_its_functions(function: str, recorded_by: set[str]) -> None:
    assert {name for name, rule in CALL_RULES.items() if rule.allows(function)} == recorded_by


def test_what_allocates_copies_or_gives_names_is_never_left_out_as_a_question() -> None:
    hooks = [hook for name in CALL_SETS for hook in load_set(name).hooks if hook.effect]
    assert len(hooks) > 40
    for hook in hooks:
        assert CALL_RULES["default"].allows(hook.pattern), hook.pattern
        assert CALL_RULES["launches"].allows(hook.pattern) >= (hook.effect == "name"), hook.pattern


def test_a_query_only_function_that_was_named_is_recorded() -> None:
    assert calls_of("default", ("cudaGetDevice",)) == "all"
    assert calls_of("default", ()) == "default"
    assert calls_of("launches", ("cu*",)) == "launches"


def test_an_unknown_rule_is_an_error() -> None:
    with pytest.raises(TracepipeError, match="Unknown choice of calls: 'none'") as refusal:
        call_rule("none")
    assert refusal.value.hint == "Choose from: all, default, launches."


@pytest.mark.parametrize("calls", CALL_RULES)
def test_no_probe_is_set_on_what_is_left_out(standin: Path, calls: str) -> None:
    request = CaptureRequest(
        ["true"], ("userspace",), calls=calls, libraries=(str(standin / "libcuda.so.1"),)
    )
    plan, _ = plan_of(PrebuiltEngine(), request, 1, lambda _: None)
    names = {probe.name for probe in plan.probes}
    assert "cuLaunchKernel" in names
    assert ("cuCtxGetCurrent" in names) == (calls == "all")
    assert ("cuMemAlloc_v2" in names) == (calls != "launches")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_engines_for_gpus_take_the_same(tmp_path: Path) -> None:
    source = tmp_path / "takes.cpp"
    source.write_text(
        '#include "call_choice.h"\n#include <iostream>\n'
        "int main() {\n"
        "  tracepipe::CallChoice choice;\n"
        "  choice.read_settings();\n"
        "  for (std::string name; std::cin >> name;)\n"
        "    if (choice.takes(name)) std::cout << name << std::endl;\n"
        "}\n"
    )
    program = tmp_path / "takes"
    subprocess.run(["g++", "-std=c++17", f"-I{NATIVE}", "-o", str(program), str(source)], check=True)
    assert len(FUNCTIONS) > 500

    def taken(calls: str) -> list[str]:
        environment = {**os.environ, CALLS_VARIABLE: calls_text(calls)}
        asked = "\n".join(FUNCTIONS)
        return subprocess.run(
            [str(program)], input=asked, capture_output=True, text=True, check=True, env=environment
        ).stdout.split()

    assert taken("none") == []
    for calls, rule in CALL_RULES.items():
        assert taken(calls) == [name for name in FUNCTIONS if rule.allows(name)]
