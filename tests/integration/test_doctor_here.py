"""Doctor on this machine: what it finds is what a capture then does."""

from __future__ import annotations

import gc
import os
import resource
import traceback
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.standin import needs
from tracepipe.doctor import AREAS, Diagnosis, can_capture, examine
from tracepipe.tracer import ENGINES

needs_ebpf = needs("prebuilt")


@pytest.fixture(scope="module")
def findings() -> list[Diagnosis]:
    return examine()


def rows(findings: list[Diagnosis], area: str) -> dict[str, Diagnosis]:
    return {finding.name: finding for finding in findings if finding.area == area}


def in_child(check: Callable[[], None]) -> None:
    """Run it in a process that may give up privileges."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.slow
def test_every_area_is_there_and_every_row_complete(findings: list[Diagnosis]) -> None:
    assert list(dict.fromkeys(finding.area for finding in findings)) == list(AREAS)
    assert set(rows(findings, "layers")) == {"userspace", "syscall", "kernel", "scheduler"}
    assert set(rows(findings, "methods")) == {*ENGINES, "auto"}
    for finding in findings:
        assert finding.detail
        if finding.area == "layers" and finding.state == "fails":
            assert finding.fix, finding


@pytest.mark.ebpf
@needs_ebpf
def test_layers_that_can_be_captured_here_are_found(findings: list[Diagnosis]) -> None:
    assert can_capture(findings)
    assert "tracefs" in rows(findings, "machine")["tracefs"].detail or Path("/sys/kernel/tracing").is_dir()
    methods, layers = rows(findings, "methods"), rows(findings, "layers")
    assert methods["prebuilt"].state == "works"
    for layer in ("userspace", "syscall", "scheduler"):
        assert "prebuilt" in layers[layer].detail
    has_kprobes = Path("/sys/bus/event_source/devices/kprobe/type").exists()
    assert (layers["kernel"].state == "fails") == (not has_kprobes)


@pytest.mark.ebpf
@needs_ebpf
def test_the_examination_leaves_no_file_open(findings: list[Diagnosis]) -> None:
    gc.collect()  # what tests before this one left open does not matter
    before = set(os.listdir("/proc/self/fd"))
    examine()
    assert set(os.listdir("/proc/self/fd")) == before


@pytest.mark.ebpf
@needs_ebpf
def test_a_user_without_root_is_refused(findings: list[Diagnosis]) -> None:
    def check() -> None:
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
        found = examine()
        assert not can_capture(found)
        assert rows(found, "machine")["privileges"].fix.startswith("sudo")
        for layer in ("userspace", "syscall", "scheduler"):
            assert "needs root" in rows(found, "layers")[layer].detail

    in_child(check)


@pytest.mark.ebpf
@needs_ebpf
def test_too_few_files_are_recognised(findings: list[Diagnosis]) -> None:
    def check() -> None:
        used = set(map(int, os.listdir("/proc/self/fd")))
        unused = [number for number in range(1000) if number not in used]
        resource.setrlimit(resource.RLIMIT_NOFILE, (unused[8], unused[8]))  # eight more can be opened
        found = rows(examine(), "methods")
        assert (found["prebuilt"].state, found["prebuilt"].fix) == ("fails", "ulimit -n 8192")

    in_child(check)
