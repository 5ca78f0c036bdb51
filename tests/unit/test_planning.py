"""What is said of a plan that has less than was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracepipe.capture.engines.bcc import PrebuiltEngine
from tracepipe.capture.find import library
from tracepipe.capture.plan import plan_of
from tracepipe.capture.request import CaptureRequest


def test_a_libcuda_that_is_not_found_is_told_of(standin: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "_cached", dict)
    monkeypatch.setattr(library, "_default_folders", list)
    said: list[str] = []
    runtime = str(standin / "libcudart.so.12")
    request = CaptureRequest(["true"], ("userspace",), libraries=(runtime,))
    plan, missing = plan_of(PrebuiltEngine(), request, 1, said.append)
    assert (plan.layers, missing) == (("userspace",), {})
    assert said == [
        "no CUDA driver calls: no libcuda.so.1 found: not where the dynamic linker of true looks; "
        "--library names the file"
    ]
    said.clear()
    request = CaptureRequest(["true"], ("userspace",), libraries=(runtime, str(standin / "libcuda.so.1")))
    plan_of(PrebuiltEngine(), request, 1, said.append)
    assert said == []


def test_a_script_is_no_library(tmp_path: Path, standin: Path) -> None:
    script = tmp_path / "script"
    script.write_text("#!/bin/sh\nexec true\n")
    script.chmod(0o755)
    said: list[str] = []
    request = CaptureRequest([str(script)], ("userspace",), libraries=(str(standin / "libcuda.so.1"),))
    plan_of(PrebuiltEngine(), request, 1, said.append)
    assert said == []
