"""The commands that record: what their options ask for, and what they say without recording anything."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer

from tests.cli.test_cli import run
from tracepipe.cli import app
from tracepipe.doctor.checks import FAILS, WORKS, Diagnosis
from tracepipe.hooks.hook import HOST_SAMPLE, PROBED_LAYERS
from tracepipe.tracer.find.kernels import Kernel, KernelListing
from tracepipe.tracer.request import CaptureRequest, Filters, Limits
from tracepipe.tracer.summary import CaptureSummary, Recording, summary_lines

__all__ = ["run"]

Run = Callable[..., tuple[int, str, str]]
SUMMARY = CaptureSummary(
    counts={"userspace": 4},
    losses={"userspace": 3, "scheduler": 1},
    cpu_losses={"userspace": {0: 1, 5: 2}},
    filtered={"syscall": 7},
    ended_by="duration",
    exit_code=9,
    wall_ns=2_500_000_000,
    attach_ns=0,
    detach_ns=0,
    engine="bcc 0.26.0",
)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[CaptureRequest]:
    """The requests of captures that are not made."""
    requests: list[CaptureRequest] = []

    def capture(request: CaptureRequest, sink: Any, **_: Any) -> CaptureSummary:
        requests.append(request)
        return SUMMARY

    monkeypatch.setattr("tracepipe.tracer.capture", capture)
    monkeypatch.setattr("tracepipe.tracer.plan.layers_here", lambda of_command: ("userspace", "syscall"))
    monkeypatch.chdir(tmp_path)
    return requests


def test_a_command_is_asked_for_as_it_is_typed(run: Run, asked: list[CaptureRequest]) -> None:
    assert run("capture", "-o", "x.jsonl", "--", "./train", "--pid", "4")[0] == SUMMARY.exit_code
    assert asked == [
        CaptureRequest(["./train", "--pid", "4"], ("userspace", "syscall"), gpu="auto", calls="default")
    ]


def test_every_option_has_its_effect_on_the_request(run: Run, asked: list[CaptureRequest]) -> None:
    options = (
        "--layers all --calls launches --hook nccl --hook kprobe:nv* --only cu* --exclude *Get* "
        "--library /l.so --pid 4 --pid 5 --no-children --min-duration 10us --sample 3 --duration 1.5s "
        "--max-events 9 --max-size 2K --method prebuilt --ring-bytes 64K"
    )
    assert run("capture", *options.split())[0] == 0
    assert asked == [
        CaptureRequest(
            layers=(*PROBED_LAYERS, HOST_SAMPLE),
            calls="launches",
            method="prebuilt",
            gpu="auto",
            pids=(4, 5),
            children=False,
            hooks=("nccl", "kprobe:nv*"),
            only=("cu*",),
            exclude=("*Get*",),
            libraries=("/l.so",),
            filters=Filters(10_000, 3),
            limits=Limits(1_500_000_000, 9, 2048),
            ring_bytes=65536,
        )
    ]


INCOMPLETE = replace(SUMMARY, error="/x: No space left on device", hint="Make room.")


@pytest.mark.parametrize(
    ("command", "options", "summary", "code"),
    [
        ("capture", "-- false", SUMMARY, 9),
        ("capture", "--exit-code recording -- false", SUMMARY, 0),
        ("capture", "-- false", INCOMPLETE, 9),
        ("capture", "-- true", replace(INCOMPLETE, exit_code=0), 125),
        ("capture", "--exit-code recording -- false", INCOMPLETE, 1),
        ("capture", "--pid 4", replace(INCOMPLETE, exit_code=0), 1),
        ("live", "-- false", INCOMPLETE, 9),
        ("live", "-- true", replace(INCOMPLETE, exit_code=0), 125),
    ],
)
def test_the_exit_code_is_the_commands_or_tells_that_the_recording_failed(
    run: Run,
    asked: list[CaptureRequest],
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    options: str,
    summary: CaptureSummary,
    code: int,
) -> None:
    monkeypatch.setattr("tracepipe.tracer.capture", lambda *_, **__: summary)
    ended, _, err = run(command, *options.split())
    assert (ended, f"tracepipe: {summary.error}" in err) == (code, bool(summary.error))


def test_options_for_gpus_have_their_effect_on_the_request(run: Run, asked: list[CaptureRequest]) -> None:
    options = "--gpu warps --kernel attn.* --launches 3- --blocks 0-131 --gpu-memory 64M --gpu-warps 500"
    assert run("capture", *options.split(), "--", "true")[0] == SUMMARY.exit_code
    assert asked == [
        CaptureRequest(
            ["true"],
            ("userspace", "syscall"),
            gpu="warps",
            calls="default",
            gpu_kernels="attn.*",
            gpu_launches="3-",
            gpu_blocks="0-131",
            gpu_memory_bytes=64 << 20,
            gpu_warps=500,
        )
    ]


def test_live_without_an_output_leaves_gpus_alone(run: Run, asked: list[CaptureRequest]) -> None:
    options = "--layers userspace --only cu* --pid 4 --no-children --duration 2s --method prebuilt"
    assert run("live", *options.split())[0] == SUMMARY.exit_code
    assert asked == [
        CaptureRequest(
            layers=("userspace",),
            method="prebuilt",
            pids=(4,),
            children=False,
            only=("cu*",),
            limits=Limits(2_000_000_000),
        )
    ]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        (["--pid", "12"], "pid-12.jsonl"),
        (["--comm", "python"], "python.jsonl"),
        (["--system"], "system.jsonl"),
        (["--", "/usr/bin/true"], "true.jsonl"),
    ],
)
def test_a_recording_is_called_after_what_it_is_of(
    run: Run, asked: list[CaptureRequest], options: list[str], name: str
) -> None:
    _, _, err = run("capture", *options)
    assert err.startswith(f"{name}: 4 userspace in 2.50 s, by bcc 0.26.0\n")


@pytest.mark.parametrize(
    ("counts", "samples", "text"),
    [
        ({}, 112, "112 samples of what warps wait for (tracepipe stalls)"),
        ({"gpu_kernel": 2}, 7, "2 gpu_kernel, 7 samples of what warps wait for (tracepipe stalls)"),
        ({}, 0, "no events"),
    ],
)
def test_samples_are_stated_beside_events(counts: dict[str, int], samples: int, text: str) -> None:
    summary = replace(SUMMARY, counts=counts, stall_samples=samples)
    assert next(summary_lines("x.jsonl", summary)) == f"x.jsonl: {text} in 2.50 s, by bcc 0.26.0"
    one = Recording("x-1.jsonl", counts, {}, {}, {}, 10**9, "stopped", 10**6, samples)
    assert one.text == f"x-1.jsonl: {text} of the last 1.00 s, by stopped; written in 0.00 s"


def test_losses_and_filters_are_reported(run: Run, asked: list[CaptureRequest]) -> None:
    _, _, err = run("capture", "-o", "x.jsonl", "--", "true")
    assert err.splitlines()[1:] == [
        "note: the recording ended by duration",
        "note: 7 syscall events were left out by the filters",
        "lost: 3 userspace events happened and were not recorded (1 on processor 0, 2 on processor 5); "
        "raise --ring-bytes",
        "lost: 1 scheduler event happened and was not recorded",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "one of"),
        (["--pid", "4", "--", "true"], "one of"),
        (["--system", "--comm", "x"], "one of"),
        (["--duration", "soon", "--", "true"], "not a duration"),
        (["--min-duration", "1 day", "--", "true"], "not a duration"),
        (["--max-size", "big", "--", "true"], "not a size"),
        (["--layers", "userspcae", "--", "true"], "userspcae"),
        (["--layers", "gpu_threads", "--", "true"], "gpu_threads"),
        (["--layers", "gpu_warp", "--gpu", "kernels", "--", "true"], "gpu_warp"),
        (["--layers", "gpu_kernel", "--gpu", "off", "--", "true"], "gpu_kernel"),
        (["--layers", "gpu_warp", "--pid", "4"], "from a program's start"),
        (["--layers", "gpu_kernel", "--comm", "cat"], "processes given by number"),
        (["--layers", "annotation", "--pid", "4"], "from a program's start"),
        (["--method", "dtrace", "--", "true"], "dtrace"),
        (["--sample", "0", "--", "true"], "--sample"),
        (["--gpu", "kernels", "--blocks", "0-131", "--", "true"], "cannot be used with --blocks"),
        (["--gpu", "off", "--kernel", "x", "--gpu-warps", "9", "--", "true"], "--kernel and --gpu-warps"),
        (["--kernel", "(", "--", "true"], "not a regular expression"),
        (["--launches", "0", "--", "true"], "not a range of launches"),
        (["--blocks", "9-3", "--", "true"], "not a range of blocks"),
        (["--gpu-memory", "some", "--", "true"], "not a size"),
        (["--gpu-memory", "1000", "--", "true"], "Give at least 1M"),
        (["--gpu-warps", "0", "--", "true"], "--gpu-warps"),
        (["--gpu", "warps", "--pid", "4"], "from a program's start"),
        (["--kernel", "attn", "--pid", "4"], "from a program's start"),
        (["--command-output", "message", "--pid", "4"], "There is no command after --"),
        (["--start-on", "api", "--", "true"], "for programs that record"),
        (["-o", "traces/%z.jsonl", "--", "true"], "%z in traces"),
    ],
)
def test_nonsense_is_an_error_of_usage(
    run: Run, asked: list[CaptureRequest], options: list[str], message: str
) -> None:
    code, _, err = run("capture", *options)
    assert code == 2
    assert message in err
    assert not asked


@pytest.mark.parametrize("command", ["capture", "live", "hooks test", "hooks list", "summary"])
def test_no_option_takes_the_divider_as_its_value(
    run: Run, asked: list[CaptureRequest], command: str
) -> None:
    at: Any = typer.main.get_command(app)
    for name in command.split():
        at = at.get_command(None, name)
    valued = [
        option.opts for option in at.params if option.param_type_name == "option" and not option.is_flag
    ]
    assert valued
    for options in valued:
        for option in options:
            code, _, err = run(*command.split(), option, "--", "./vec_add")
            assert code == 2
            assert f"Option {max(options, key=len)} requires an argument before --." in " ".join(err.split())
    assert not asked


def test_hooks_alone_need_no_layers(run: Run, asked: list[CaptureRequest]) -> None:
    run("capture", "--layers", "none", "--hook", "nccl", "-o", "x.jsonl", "--", "true")
    assert asked[0].layers == ()


def test_the_shipped_sets_are_listed(run: Run) -> None:
    code, out, _ = run("hooks", "list")
    assert code == 0
    names = {line.split()[0] for line in out.splitlines()}
    assert names == {"context-switch", "cublas", "cuda-driver", "cuda-runtime", "nccl", "nvidia-kmod"}


def test_a_wrong_hook_is_reported_with_near_names(run: Run, asked: list[CaptureRequest]) -> None:
    code, _, err = run("hooks", "test", "ncccl", "--", "true")
    assert code == 1
    assert "nccl" in err.splitlines()[1]
    assert not asked


def test_doctor_reports_what_works_and_its_exit_code_agrees(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [Diagnosis("layers", layer, WORKS, "", "") for layer in ("userspace", "syscall")]
    found.append(Diagnosis("layers", "scheduler", FAILS, "no tracefs", "mount it"))
    monkeypatch.setattr("tracepipe.cli.machine.examine", lambda **_: found)
    code, out, _ = run("doctor")
    assert code == 3
    assert "no tracefs" in out
    assert "mount it" in out
    code, out, _ = run("doctor", "--json")
    assert code == 3
    assert json.loads(out)["can_capture"] is False


def test_kernels_are_listed_in_columns(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        Kernel("add(int*)", "_Z3addPi", "sm_90", 16, 1024, 0, "k.cu:5", "./app"),
        Kernel("f()", "_Z1fv", "sm_100", None, 0, 8, "", "./app"),
    ]
    listing = KernelListing(rows, [], ["a note"])
    monkeypatch.setattr("tracepipe.cli.machine.list_kernels", lambda pattern, paths: listing)
    code, out, err = run("hooks", "list", "--kernels", "./app")
    assert (code, err) == (0, "note: a note\n")
    assert out.splitlines() == [
        "add(int*)  sm_90   16 registers         1024 B shared             k.cu:5  ./app",
        "f()        sm_100  registers not known  0 B shared     8 B stack          ./app",
    ]
    listing.rows, listing.near = [], ["add(int*)"]
    code, _, err = run("hooks", "list", "--kernels", "./app", "Add")
    assert (code, err.splitlines()[-2:]) == (
        1,
        ["tracepipe: There is no GPU kernel that fits Add in ./app.", "  Near: add(int*)."],
    )
