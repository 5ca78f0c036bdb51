"""The notes on a plan that has less than was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracepipe.errors import TracepipeError
from tracepipe.tracer.engines.probes import PrebuiltEngine
from tracepipe.tracer.find import library
from tracepipe.tracer.plan import plan_of
from tracepipe.tracer.request import CaptureRequest


def test_a_missing_libcuda_is_reported(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cached", dict)
    monkeypatch.setattr(library, "_default_folders", list)
    messages: list[str] = []
    runtime = str(standin / "libcudart.so.12")
    request = CaptureRequest(["true"], ("userspace",), libraries=(runtime,))
    plan, missing = plan_of(PrebuiltEngine(), request, 1, messages.append)
    assert (plan.layers, missing) == (("userspace",), {})
    assert messages == [
        "no CUDA driver calls: no libcuda.so.1 found: not where the dynamic linker of true looks; "
        "name the file with --library"
    ]
    messages.clear()
    request = CaptureRequest(["true"], ("userspace",), libraries=(runtime, str(standin / "libcuda.so.1")))
    plan_of(PrebuiltEngine(), request, 1, messages.append)
    assert messages == []


@pytest.mark.parametrize(
    ("layers", "there", "not_there"),
    [
        (("memory",), {"cuMemAlloc_v2", "cuMemFree_v2"}, {"cuMemcpyHtoD_v2", "cuLaunchKernel"}),
        (("transfer",), {"cuMemcpyHtoD_v2"}, {"cuMemAlloc_v2", "cuLaunchKernel"}),
        (("memory", "userspace"), {"cuMemAlloc_v2", "cuMemcpyHtoD_v2", "cuLaunchKernel"}, set()),
    ],
)
def test_what_calls_did_needs_the_calls_that_did_it(
    standin: Path, layers: tuple[str, ...], there: set[str], not_there: set[str]
) -> None:
    request = CaptureRequest(["true"], layers, libraries=(str(standin / "libcuda.so.1"),))
    plan, missing = plan_of(PrebuiltEngine(), request, 1, lambda _: None)
    assert (plan.layers, missing) == (("userspace",), {})
    names = {probe.name for probe in plan.probes}
    assert there <= names
    assert not names & not_there


def test_what_calls_did_is_not_missing_where_a_device_records_the_calls() -> None:
    messages: list[str] = []
    request = CaptureRequest(["true"], ("userspace", "memory"))
    plan, missing = plan_of(PrebuiltEngine(), request, 1, messages.append, frozenset({"userspace"}))
    assert (plan.probes, missing, messages) == ([], {}, [])


def test_a_script_is_not_a_library(tmp_path: Path, standin: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexec true\n")
    script.chmod(0o755)
    messages: list[str] = []
    request = CaptureRequest([str(script)], ("userspace",), libraries=(str(standin / "libcuda.so.1"),))
    plan_of(PrebuiltEngine(), request, 1, messages.append)
    assert messages == []


def test_nothing_at_all_is_no_missing_layer() -> None:
    with pytest.raises(TracepipeError, match="neither a layer nor a hook") as refused:
        plan_of(PrebuiltEngine(), CaptureRequest(["true"], ()), 1, lambda _: None)
    assert refused.value.hint == "Name layers with --layers, or functions with --hook."
