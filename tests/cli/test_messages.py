"""What a command says of options and names that it cannot use, and where it uses colours."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_output import COLOUR, on_terminal, piped
from tracepipe.errors import TracepipeError
from tracepipe.tracer import capture
from tracepipe.tracer.request import CaptureRequest

pytestmark = pytest.mark.usefixtures("quick_doctor")
FIXTURES = Path(__file__).parents[2] / "fixtures"
WARPS = str(FIXTURES / "capture-h200" / "input.jsonl")
STALLS = str(FIXTURES / "gpu-stalls" / "input.jsonl")
RUNS = ["--", "true"]


@pytest.mark.parametrize(
    ("argv", "what", "hint"),
    [
        (["summary", "run", "--top", "x"], "--top takes a whole number from 0, not 'x'.", ""),
        (["summary", "run", "--top", "-1"], "--top takes a whole number from 0, not -1.", ""),
        (["summary", "run", "--top", "4e9"], "--top takes a whole number from 0, not '4e9'.", ""),
        (["layers", "run", "--top", "4000000000"], "--top takes a whole number up to 2147483647,", ""),
        (["diff", "a", "b", "--alpha", "2"], "--alpha takes a number from 0 to 1, not '2'.", ""),
        (["diff", "a", "b", "--min-change", "much"], "--min-change takes a number from 0, not 'much'.", ""),
        (["capture", "--sample", "0", *RUNS], "--sample takes a whole number from 1, not 0.", ""),
        (["capture", "--pid", "python"], "--pid takes a whole number from 1, not 'python'.", ""),
        (["capture", "--pid", "0"], "--pid takes a whole number from 1, not 0.", ""),
        (["live", "--top", "0", *RUNS], "--top takes a whole number from 1, not 0.", ""),
        (
            ["capture", "--ring-bytes", "5", *RUNS],
            "--ring-bytes: A ring buffer of 5 bytes is too small.",
            "Give 4K or more; 16M is the default.",
        ),
        (["capture", "--duration", "0", *RUNS], "--duration: 0 is too little: give more than 0.", ""),
        (["live", "--interval", "0ms", *RUNS], "--interval: 0ms is too little: give more than 0.", ""),
        (["capture", "--last", "0", *RUNS], "--last: 0 is too little: give more than 0.", ""),
        (["capture", "--max-size", "0K", *RUNS], "--max-size: 0K is too little: give more than 0.", ""),
        (
            ["capture", "--delay", "soon", *RUNS],
            "--delay: 'soon' is not a duration.",
            "Write 10s, 500ms, 20us, 2m; a number without a unit is in seconds.",
        ),
        (["timeline", "run", "--start", "5x"], "--start: '5x' is not a duration.", "Write 10s, 500ms"),
        (["gaps", "run", "--min", "x"], "--min: 'x' is not a duration.", "Write 10s, 500ms"),
        (["warps", "run", "--kernel", "("], "--kernel: '(' is not a regular expression: ", "Try a part"),
        (
            ["capture", "--gpu", "all", *RUNS],
            "--gpu takes auto, off, kernels or warps, not 'all'.",
            "",
        ),
        (["capture"], "There is nothing to record.", "Give one of: a command after --, --pid,"),
        (
            ["capture", "--system", "--pid", "5"],
            "More than one source of events is given.",
            "Give one of: a command after --, --pid,",
        ),
        (
            ["capture", "--repeat", "3", *RUNS],
            "--repeat 3 is given, but nothing ends the first window.",
            "Give --dur",
        ),
        (
            ["capture", "--gpu", "off", "--blocks", "1", *RUNS],
            "--gpu off records nothing of the GPUs",
            "Use --blocks with --gpu warps",
        ),
        (["cut", "run", "-o", "x"], "There is no stretch of time to cut.", "Give --from, --to or both."),
        (["convert"], "Missing argument: FILE...", ""),
        (["convert", "run", "--forma", "text"], "No such option: --forma", "Did you mean --force"),
        (
            ["diff", "a", "b", "--gate", "step<=+3%", "--junit", "x.xml"],
            "Too many arguments: x.xml",
            "--junit prints the XML: write --junit > x.xml.",
        ),
        (
            ["diff", "--a", "a", "--b", "b", "--junit", "x.xml"],
            "x.xml is of neither side.",
            "--junit prints the XML: write --junit > x.xml.",
        ),
        (["diff", "a", "b", "--junit", "--json"], "--junit and --json are two forms", "Give one of them."),
        (["validate", "a", "b"], "Too many arguments: b", ""),
        (["validat"], "No such command 'validat'. Did you mean 'validate'?", ""),
        (["convert", "a", "--offset", "x"], "--offset takes FILE=NANOSECONDS, not 'x'.", ""),
    ],
)
def test_an_error_of_usage_says_what_is_wrong_and_how_to_write_it(
    argv: list[str], what: str, hint: str
) -> None:
    code, out, err = piped(argv)
    first, *more, usage = err.splitlines()
    assert (code, out) == (2, "")
    assert first.startswith(f"tracepipe: {what}")
    assert len(more) == bool(hint) and "".join(more).startswith(f"  {hint}" if hint else "")
    assert usage.startswith("  Usage: tracepipe ") and usage.endswith(" -h explains it)")


@pytest.mark.parametrize("text", ["5", "5s", "5000ms", "0.083333333333m"])
def test_every_duration_takes_the_same_forms(text: str) -> None:
    _, _, err = piped(["timeline", WARPS, "--start", text])
    assert err.splitlines() == [
        "tracepipe: The stretch from 5.00 s to 719 ms of the run is empty.",
        "  The run lasts 719 ms; a number without a unit is in seconds.",
    ]


@pytest.mark.parametrize(
    ("argv", "what", "hint"),
    [
        (["warps", WARPS, "--kernel", "vecadd"], "No kernel with warps", "Did you mean vectorAdd?"),
        (["plot", WARPS, "--kernel", "vecadd", "-o", "-"], "No kernel with warps", "Did you mean vectorAdd?"),
        (
            ["report", WARPS, "--kernel", "vecadd", "-o", "-"],
            "No kernel with warps",
            "Did you mean vectorAdd?",
        ),
        (["warps", WARPS, "--kernel", "gemm"], "No kernel with warps", "Kernels with warps: vectorAdd."),
        (["warps", WARPS, "--launch", "99"], "No warps of launch 99 were recorded.", "Leave out --launch"),
        (
            ["warps", STALLS, "--kernel", "gemm"],
            "There are no warps to choose from.",
            "Neither warps nor threads with their index were recorded",
        ),
        (["stalls", STALLS, "--kernel", "matnul"], "No kernel with samples", "Did you mean matmul?"),
        (["stalls", STALLS, "--kernel", "x"], "No kernel with samples", "Kernels with samples: matmul, red"),
        (
            ["layers", WARPS, "--call", "cudamalloc"],
            "The recording has no call",
            "Did you mean cudaMalloc or ",
        ),
    ],
)
def test_a_name_that_the_recording_lacks_comes_with_near_ones(argv: list[str], what: str, hint: str) -> None:
    code, _, err = piped(argv)
    first, second = err.splitlines()
    assert code == 1
    assert first.startswith(f"tracepipe: {what}") and second.startswith(f"  {hint}")


def test_a_process_that_is_gone_is_noticed_before_anything_is_prepared() -> None:
    messages: list[str] = []
    gone = 2**22 + 1  # above any number that Linux gives
    with pytest.raises(TracepipeError, match=f"^No such process: {gone}$"):
        capture(CaptureRequest(pids=(gone,)), sys.stdout.buffer, notify=messages.append)
    assert messages == []


def test_losses_are_stated_once_where_a_capture_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.cli.test_cli_capture import SUMMARY

    recording = (FIXTURES / "losses" / "input.jsonl").read_bytes()
    monkeypatch.chdir(tmp_path)

    def record(order: Any, **_: Any) -> Any:
        Path(order.output).write_bytes(recording)
        return SUMMARY

    monkeypatch.setattr("tracepipe.api.record.record", record)
    monkeypatch.setattr("tracepipe.ui.serve.open_trace", lambda *_, **__: None)
    code, _, err = piped(["capture", "-o", "x.jsonl", "--open", *RUNS])
    assert code == SUMMARY.exit_code
    assert [line for line in err.splitlines() if "userspace" in line and "lost" in line] == [
        "lost: 3 userspace events happened and were not recorded (1 on processor 0, 2 on processor 5); "
        "raise --ring-bytes"
    ]


@pytest.mark.slow
@pytest.mark.usefixtures("without_pictures")
def test_the_page_can_list_all_that_it_advises_to(tmp_path: Path) -> None:
    pages = []
    for top in ([], ["--top", "0"], ["--top", "1"]):
        target = tmp_path / f"{len(pages)}.html"
        assert piped(["report", WARPS, "-o", str(target), *top])[0] == 0
        pages.append(target.read_text())
    by_default, every, one = pages
    assert "--top 0 lists all" in one and "--top 0" not in every
    assert len(one) < len(every) and len(by_default) < len(every)


# Colours --------------------------------------------------------------------------------------------------

COLOURED = ["--help", "summary --help", f"summary {WARPS}", "doctor"]


@pytest.fixture(autouse=True)
def no_choice_of_colours(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("command", COLOURED)
@pytest.mark.parametrize(
    ("variables", "coloured"),
    [
        ({}, True),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"NO_COLOR": "1", "FORCE_COLOR": "1"}, False),
        ({"FORCE_COLOR": "0"}, False),
    ],
)
def test_a_terminal_gets_colours_unless_the_user_wants_none(
    command: str, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    shown = on_terminal(command.split())
    assert (bool(COLOUR.search(shown)), "\\x1b" in shown) == (coloured, False)


@pytest.mark.parametrize("command", COLOURED)
@pytest.mark.parametrize(
    ("variables", "coloured"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"GITHUB_ACTIONS": "true"}, False)],
)
def test_a_pipe_gets_colours_only_where_the_user_wants_them(
    command: str, variables: dict[str, str], coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    _, shown, _ = piped(command.split())
    assert (bool(COLOUR.search(shown)), "\\x1b" in shown) == (coloured, False)


@pytest.mark.parametrize("command", COLOURED)
def test_a_dumb_terminal_gets_letters_alone(command: str) -> None:
    shown = on_terminal(command.split(), "dumb")
    assert "\x1b" not in shown and "\\x1b" not in shown
