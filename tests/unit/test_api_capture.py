"""The library's captures without a probe: what is asked for, how the other process is heard and ended."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import tracepipe
from tests.support.program import PYTHONPATH
from tests.support.summaries import SUMMARY
from tracepipe import cli
from tracepipe.api.capture_block import Began
from tracepipe.api.record import Order
from tracepipe.hooks.hook import HOST_SAMPLE, PROBED_LAYERS
from tracepipe.tracer.request import CaptureRequest
from tracepipe.tracer.summary import CaptureSummary

NO_LAYERS = tracepipe.CaptureOptions(layers=())

# What is asked for -------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Order]:
    """What the command asks for with these arguments, and where it would write."""
    monkeypatch.chdir(tmp_path)
    found: list[Order] = []

    def record(order: Order, **_: Any) -> CaptureSummary:
        found.append(order)
        return SUMMARY

    monkeypatch.setattr("tracepipe.api.record.record", record)
    monkeypatch.setattr("tracepipe.tracer.plan.layers_here", lambda of_command: ("userspace", "syscall"))

    def ask(*argv: str) -> Order:
        monkeypatch.setattr(sys, "argv", ["tracepipe", "capture", *argv])
        with pytest.raises(SystemExit):
            cli.main()
        return found.pop()

    return ask


OPTIONS = {
    "--layers syscall,scheduler --method prebuilt --calls launches -- ./app 1": {
        "command": ["./app", "1"], "layers": ["syscall", "scheduler"], "method": "prebuilt",
        "calls": "launches",
    },
    "-- ./app": {"command": Path("./app")},
    "--wait-children -- ./app": {"command": "./app", "wait_children": True},
    "--hook nccl --only cu* --exclude *Get* --library /l.so --pid 4 --no-children": {
        "hooks": "nccl", "only": "cu*", "exclude": ["*Get*"], "libraries": ["/l.so"], "pids": 4,
        "children": False,
    },
    "--min-duration 10us --sample 3 --duration 1.5s --max-events 9 --max-size 2K --ring-bytes 64K --comm a": {
        "min_duration": "10us", "sample": 3, "duration": "1.5s", "max_events": 9, "max_size": "2K",
        "ring_bytes": "64K", "comm": "a",
    },
    "--gpu warps --kernel attn.* --launches 2- --blocks 0-3 --gpu-memory 1G --gpu-warps 7 -- ./app": {
        "command": "./app", "gpu": "warps", "kernel": "attn.*", "launches": "2-", "blocks": "0-3",
        "gpu_memory": "1G", "gpu_warps": 7,
    },
    "--thread-exits -- ./app": {"command": "./app", "thread_exits": True},
    "--gpu-stalls --gpu off -- ./app": {"command": "./app", "gpu_stalls": True, "gpu": "off"},
    "--warp-marks attn:softmax -- ./app": {"command": "./app", "warp_marks": "attn:softmax"},
    "--system -o x.jsonl.zst --force": {"system": True, "output": Path("x.jsonl.zst"), "force": True},
    "-o - --command-output printed -- ./app": {
        "command": "./app", "output": "-", "command_output": Path("printed"),
    },
}  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS)
def test_what_is_asked_for_is_what_the_command_asks_for(options: str, asked: Callable[..., Order]) -> None:
    given = dict(OPTIONS[options])
    own = {name: given.pop(name) for name in ("command", "pids", "output", "force") if name in given}
    ours = tracepipe.capture(options=tracepipe.CaptureOptions(**given), **own)  # type: ignore[arg-type]
    assert ours._order == asked(*options.split())
    assert ours.path == ours._order.output


@pytest.mark.parametrize(
    ("given", "layers"),
    [
        (None, ("userspace", "syscall")), ("", ("userspace", "syscall")), ("none", ()), ((), ()),
        ("syscall, scheduler,", ("syscall", "scheduler")), ("syscall", ("syscall",)),
        ("all", ("annotation", *PROBED_LAYERS, HOST_SAMPLE)),
    ],
)  # fmt: skip
def test_layers_are_one_text_or_several(
    given: Any, layers: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tracepipe.tracer.plan.layers_here", lambda of_command: ("userspace", "syscall"))
    ours = tracepipe.capture("./app", tracepipe.CaptureOptions(layers=given))
    assert ours._order.request.layers == layers


def test_this_process_is_recorded_where_no_other_is_named(tmp_path: Path) -> None:
    ours = tracepipe.capture(output="x", options=NO_LAYERS)
    assert ours._order.request.pids == (os.getpid(),)


def test_a_wrong_value_is_refused_at_once() -> None:
    with pytest.raises(tracepipe.TracepipeError, match="'soon' is not a duration"):
        tracepipe.capture(options=tracepipe.CaptureOptions(duration="soon", layers=()))
    with pytest.raises(TypeError, match="durtion"):
        tracepipe.capture(options=tracepipe.CaptureOptions(durtion="10s"))  # type: ignore[call-arg]
    with pytest.raises(tracepipe.TracepipeError, match="no command whose output"):
        tracepipe.capture(pids=1, options=tracepipe.CaptureOptions(command_output="printed", layers=()))


# The other process -------------------------------------------------------------------------------------


def test_the_block_is_recorded_and_then_summed_up(recorder: Callable[..., None]) -> None:
    recorder(
        "send('a note')", "send(Began())", "assert heard() == 'stop'", "send('another')", "send(SUMMARY)",
    )  # fmt: skip
    messages: list[str] = []
    with tracepipe.capture(output="x", notify=messages.append, options=NO_LAYERS) as run:
        assert (run.notes, messages) == (["a note"], ["a note"])
        assert repr(run) == "<Capture x: is being recorded>"
        with pytest.raises(tracepipe.TracepipeError, match="x is not complete"):
            _ = run.summary
    assert run.summary == SUMMARY
    assert run.notes == messages == ["a note", "another"]
    assert repr(run) == "<Capture x: 4 syscall, ended by stopped>"
    assert run.stop() == run.wait() == SUMMARY
    with pytest.raises(tracepipe.TracepipeError, match="records once"):
        run.__enter__()


@pytest.mark.slow
def test_a_command_is_waited_for_and_not_stopped(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "assert not caller.poll(0.3)", "send(SUMMARY)")
    with tracepipe.capture("./app", NO_LAYERS, output="x") as run:
        pass
    assert run.summary == SUMMARY


def test_an_exception_ends_the_recording_and_goes_on(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "assert heard() == 'stop'", "send(SUMMARY)")
    with (
        pytest.raises(ZeroDivisionError),
        tracepipe.capture("./app", NO_LAYERS, output="x") as run,
    ):
        _ = 1 / 0
    assert run.summary == SUMMARY


@pytest.mark.parametrize("kind", ["CaptureUnavailable", "OutputError", "TracepipeError"])
def test_a_refusal_is_raised_with_its_hint(kind: str, recorder: Callable[..., None]) -> None:
    recorder(f"send({kind}('It needs root.', 'sudo -E env tracepipe …'))")
    with (
        pytest.raises(getattr(tracepipe, kind), match="It needs root") as refused,
        tracepipe.capture(output="x", options=NO_LAYERS),
    ):
        pytest.fail("the block ran")
    assert type(refused.value).__name__ == kind
    # What was run is not tracepipe.
    assert refused.value.hint == "sudo -E env python …"


def test_what_is_written_now_is_the_answer_to_this_call(recorder: Callable[..., None]) -> None:
    recorder(
        "send(Began())",
        "assert heard() == 'write'",
        "send(Written(0, 'by-a-signal.jsonl'))",
        "send(Written(1, 'x.jsonl'))",
        "assert heard() == 'write'",
        "send(Written(2, '', OutputError('There is no room.', 'Free some.')))",
        "assert heard() == 'write'",
        "assert heard() == 'write'",  # this one was not answered in time
        "send(Written(3, 'x-2.jsonl'))",
        "send(Written(4, 'x-3.jsonl'))",
        "heard()",
        "send(SUMMARY)",
    )
    with tracepipe.capture(output="x.jsonl", options=tracepipe.CaptureOptions(last="10s", layers=())) as run:
        assert run.write_now() == "x.jsonl"
        with pytest.raises(tracepipe.OutputError, match="There is no room") as failed:
            run.write_now()
        assert failed.value.hint == "Free some."
        with pytest.raises(tracepipe.CaptureTimeout, match="were not written within 0 s"):
            run.write_now(timeout_s=0.0)
        assert run.write_now() == "x-3.jsonl"
    with pytest.raises(tracepipe.TracepipeError, match="is complete"):
        run.write_now()


def test_a_recording_that_the_end_wrote_first_is_the_answer(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "heard()", "send(replace(SUMMARY, recordings=(LAST,)))")
    with tracepipe.capture(output="x.jsonl", options=tracepipe.CaptureOptions(last="10s", layers=())) as run:
        assert run.write_now() == "x-2.jsonl"


def test_a_refusal_at_the_end_is_raised_there(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "heard()", "send(OutputError('The disk is full.'))")
    ran = False
    with (
        pytest.raises(tracepipe.OutputError, match="The disk is full"),
        tracepipe.capture(output="x", options=NO_LAYERS),
    ):
        ran = True
    assert ran


def test_a_recording_that_is_not_whole_is_an_error_and_has_a_summary(recorder: Callable[..., None]) -> None:
    recorder(
        "send(Began())",
        "heard()",
        "send(replace(SUMMARY, error='The disk is full.', hint='Free some space.'))",
    )
    with (
        pytest.raises(tracepipe.OutputError, match="The disk is full") as caught,
        tracepipe.capture(output="x", options=NO_LAYERS) as run,
    ):
        pass
    assert caught.value.hint == "Free some space."
    assert run.summary.counts == SUMMARY.counts


def test_an_exception_in_the_block_goes_on_though_the_recording_failed(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "heard()", "send(OutputError('The disk is full.'))")
    with (
        pytest.raises(ZeroDivisionError),
        tracepipe.capture(output="x", options=NO_LAYERS) as run,
    ):
        _ = 1 / 0
    assert run.notes == ["The disk is full."]


def test_a_refusal_within_the_block_is_what_is_raised(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "send(OutputError('The disk is full.'))")
    with (
        pytest.raises(tracepipe.OutputError, match="The disk is full"),
        tracepipe.capture(output="x", options=NO_LAYERS) as run,
    ):
        run.wait()


@pytest.mark.parametrize("begun", [(), ("send(Began())",)])
def test_a_recorder_that_dies_is_reported(begun: tuple[str, ...], recorder: Callable[..., None]) -> None:
    recorder(*begun, "sys.exit(7)")
    with (
        pytest.raises(tracepipe.TracepipeError, match="ended with 7"),
        tracepipe.capture("./app", NO_LAYERS, output="x"),
    ):
        pass


def test_without_an_interpreter_nothing_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "")
    with (
        pytest.raises(tracepipe.CaptureUnavailable),
        tracepipe.capture(output="x", options=NO_LAYERS),
    ):
        pass


def test_a_fork_that_leaves_the_block_does_not_end_it(recorder: Callable[..., None]) -> None:
    recorder("send(Began())", "assert heard() == 'stop'", "send(SUMMARY)")
    with tracepipe.capture(output="x", options=NO_LAYERS) as run:
        child = os.fork()
        if child == 0:
            run.__exit__(None, None, None)
            os._exit(5)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
        assert repr(run) == "<Capture x: is being recorded>"
    assert run.summary == SUMMARY


# The recorder's side -----------------------------------------------------------------------------------

ORDER = """
import sys
from unittest import mock
from tracepipe.api import capture_block
from tracepipe.errors import CaptureUnavailable
def record(order, *, notify, control):
    notify(f"{order.request.comm} {order.output} {order.force}")
    if order.request.comm == "refused": raise CaptureUnavailable("No.", "Do.")
    control.began()
    while not control.is_over(): pass
    from tests.support.summaries import SUMMARY
    return SUMMARY
capture_block.record = record
capture_block.main(sys.argv[1])
"""


@pytest.mark.slow
def test_the_recorder_follows_its_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    from multiprocessing.connection import Pipe

    for comm, answers in (
        ("app", ["app x True", Began(), SUMMARY]),
        ("refused", ["refused x True", (tracepipe.CaptureUnavailable, "No.", "Do.")]),
    ):
        ours, theirs = Pipe()
        command = [sys.executable, "-c", ORDER, str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as process:
            theirs.close()
            ours.send(Order(CaptureRequest(comm=comm), "x", True))
            heard = [ours.recv() for _ in answers[:2]]
            if isinstance(heard[1], tracepipe.TracepipeError):
                heard[1] = type(heard[1]), heard[1].message, heard[1].hint
            assert heard == answers[:2]
            if len(answers) > 2:
                ours.send("stop")
                assert ours.recv() == answers[2]
        assert process.returncode == 0


@pytest.mark.slow
def test_the_recorder_ends_with_its_caller() -> None:
    from multiprocessing.connection import Pipe

    for end in ("close", "signal"):
        ours, theirs = Pipe()
        command = [sys.executable, "-c", ORDER, str(theirs.fileno())]
        environment = os.environ | {"PYTHONPATH": PYTHONPATH}
        with subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment) as process:
            theirs.close()
            ours.send(Order(CaptureRequest(comm="app"), "x", True))
            assert (ours.recv(), ours.recv()) == ("app x True", Began())
            if end == "close":
                ours.close()
            else:
                process.send_signal(signal.SIGTERM)
        assert process.returncode == (0 if end == "close" else 128 + signal.SIGTERM)
