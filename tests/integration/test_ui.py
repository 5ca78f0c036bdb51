"""Traces in the real Perfetto UI, in headless Chromium without a network."""

from __future__ import annotations

import contextlib
import fnmatch
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support import sample_traces
from tests.support.browser import View, show, show_link
from tracepipe.ui.serve import LOOPBACK, UI_PORT

pytestmark = pytest.mark.browser

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_TRACEPIPE = [sys.executable, "-m", "tracepipe"]


def _converted(fixture: str, output_format: str) -> Callable[[Path], Path]:
    """The maker of a file that `tracepipe convert` makes of a fixture."""

    def make(path: Path) -> Path:
        source = _FIXTURES / fixture / "input.jsonl"
        command = [*_TRACEPIPE, "convert", str(source), "--format", output_format, "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True)
        return path

    return make


_THREADS = ["vec_add 4242", "vec_add 4242 / main 4242", "vec_add 4242 / worker 4243"]
_LAYERS = [f"process * / thread * / {layer}*" for layer in ("CUDA API", "syscalls", "driver", "scheduler")]
# name, the file's maker, and globs of the tracks that the UI must show, in their order.
CASES: list[tuple[str, Callable[[Path], Path], list[str]]] = [
    (
        "sample.pftrace",
        sample_traces.write_protobuf,
        ["GPU 0", "GPU 0 / SM 2", "GPU 0 / SM 10", *_THREADS],
    ),
    ("sample.json", sample_traces.write_chrome_json, _THREADS),
    (
        "layered-launch.pftrace",
        _converted("layered-launch", "perfetto"),
        _LAYERS,
    ),
    ("layered-launch.json", _converted("layered-launch", "chrome"), _LAYERS),
    (
        "h200.pftrace",
        _converted("gpu-h200", "perfetto"),
        [
            "GPU 0 NVIDIA H200",
            "GPU 0 NVIDIA H200 / active warps",
            "GPU 0 NVIDIA H200 / stream 0",
            "GPU 0 NVIDIA H200 / SM 0",
            "GPU 0 NVIDIA H200 / SM 0 / slot 0",
            "GPU 0 NVIDIA H200 / SM 0 / slot 1",
            "GPU 0 NVIDIA H200 / SM 2",
            "GPU 0 NVIDIA H200 / SM 10",
            "record 405 / record (405) / CUDA API*",
        ],
    ),
]


def _take_ctrl_c() -> None:
    """Run in a child: a test run that was started by nohup or in the background has SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def _opened(trace: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A running `tracepipe open`, with the link that it printed."""
    command = [*_TRACEPIPE, "open", "--no-browser", str(trace), *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_take_ctrl_c) as process:
        assert process.stderr
        try:
            printed = ""
            for line in process.stderr:
                printed += line
                if line.startswith("open http"):
                    break
            assert "open http" in printed, printed
            yield process, line.removeprefix("open ").strip()
        finally:
            process.kill()


def _size_px(png: Path) -> tuple[int, int]:
    # \x89PNG\r\n\x1a\n | u32 length | "IHDR" | u32 width | u32 height | …, big-endian
    width, height = struct.unpack_from(">II", png.read_bytes(), 16)
    return width, height


@pytest.mark.parametrize(("name", "make", "tracks"), CASES, ids=[name for name, _, _ in CASES])
def test_the_ui_shows_every_track_and_complains_of_nothing(
    name: str,
    make: Callable[[Path], Path],
    tracks: list[str],
    tmp_path: Path,
    picture: Callable[[str], Path],
) -> None:
    png = picture(name)
    seen = show(make(tmp_path / name), png)
    assert seen.complaints == []
    # Each glob once: the UI gives a group and its only track one path, and has tracks of its own between.
    found = [glob for path in seen.tracks for glob in tracks if fnmatch.fnmatchcase(path, glob)]
    assert list(dict.fromkeys(found)) == tracks
    assert seen.end_ns > seen.start_ns
    width, height = _size_px(png)
    # It grows with the tracks that it shows.
    assert width == View().width and height >= View().height


def test_a_selected_launch_leads_to_its_kernel(tmp_path: Path, picture: Callable[[str], Path]) -> None:
    trace = sample_traces.write_protobuf(tmp_path / "flow.pftrace")
    arrow = (
        "select o.name as launch, i.name as kernel from flow"
        " join slice o on o.id = slice_out join slice i on i.id = slice_in"
    )
    view = View(
        select=1,
        start_ns=sample_traces.START_NS,
        end_ns=sample_traces.START_NS + 800_000,
        sql=arrow,
    )
    seen = show(trace, picture("flow"), view)
    assert seen.complaints == []
    assert seen.rows == [{"launch": "cudaLaunchKernel", "kernel": "vec_add"}]
    assert (seen.start_ns, seen.end_ns) == (sample_traces.START_NS, sample_traces.START_NS + 1_000_000)


def test_a_real_capture_leads_from_the_call_to_the_warps(
    tmp_path: Path, picture: Callable[[str], Path]
) -> None:
    trace = _converted("capture-h200", "perfetto")(tmp_path / "capture.pftrace")
    launches = (
        "select o.id, o.ts, i.ts + i.dur as ended, o.name as call, t.name as track from flow"
        " join slice o on o.id = slice_out join slice i on i.id = slice_in join track t on t.id = i.track_id"
        " where i.name = 'vectorAdd' order by o.ts"
    )
    launched = show(trace, picture("capture-all"), View(sql=launches)).rows
    assert [(row["call"], row["track"]) for row in launched] == [("cuLaunchKernel", "stream 0")] * 3
    second = launched[1]
    view = View(
        select=second["id"],
        details=False,
        start_ns=second["ts"] - 4000,
        end_ns=second["ended"] + 3000,
        collapse=("SM ?", "SM ??", "SM ???"),
        sql="select count(*) as warps from slice where name glob 'vectorAdd block * warp *'",
    )
    seen = show(trace, picture("capture"), view)
    assert seen.complaints == []
    assert seen.rows == [{"warps": 3 * 16 * 8}]
    wanted = [
        "CPU Scheduling / CPU 6 Scheduling",
        "GPU 0 NVIDIA H200",
        "GPU 0 NVIDIA H200 / active warps",
        "GPU 0 NVIDIA H200 / stream 0",
        "GPU 0 NVIDIA H200 / SM 0 / slot 7",
        "vec_small * / vec_small (*) / CUDA API*",
        "vec_small * / vec_small (*) / syscalls*",
        "vec_small * / device memory",
    ]
    found = [glob for path in seen.tracks for glob in wanted if fnmatch.fnmatchcase(path, glob)]
    assert list(dict.fromkeys(found)) == wanted


def test_a_file_that_is_not_a_trace_is_refused_visibly(
    tmp_path: Path, picture: Callable[[str], Path]
) -> None:
    trace = tmp_path / "noise.pftrace"
    trace.write_bytes(b"no trace of anything " * 100)
    seen = show(trace, picture("refused"))
    assert seen.tracks == []
    assert any("Cannot open this file" in complaint for complaint in seen.complaints)


def test_open_local_shows_the_trace_until_ctrl_c(tmp_path: Path, picture: Callable[[str], Path]) -> None:
    """The link that `open --local` prints, opened as a user's browser would: no option of the tests in it."""
    trace = _converted("capture-h200", "perfetto")(tmp_path / "vec add.pftrace")
    with _opened(trace, "--local") as (process, link):
        assert link.startswith("http://127.0.0.1:")
        seen = show_link(link, picture("open-local"))
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert seen.complaints == []
    assert seen.title.startswith("vec_add.pftrace ")  # a space would show as %20
    # What is in sight first: the work of the GPU, and the tracks on which it is.
    assert sorted(seen.pinned) == ["CPU use", "CUDA API (486)", "GPU busy", "active warps", "stream 0"]
    first_ns, last_ns = seen.in_sight_ns
    assert seen.start_ns < first_ns < last_ns < seen.end_ns


def test_open_hands_the_trace_to_the_public_ui_and_ends(
    tmp_path: Path, picture: Callable[[str], Path]
) -> None:
    """The page is ui.perfetto.dev to the browser: its policy, CORS and the loopback rules all apply."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((LOOPBACK, UI_PORT))
        except OSError:
            pytest.skip(
                f"another program has port {UI_PORT}, the only one that ui.perfetto.dev may fetch from"
            )
    trace = sample_traces.write_protobuf(tmp_path / "vec add.pftrace")
    with _opened(trace) as (process, link):
        assert link.startswith("https://ui.perfetto.dev/#!/?url=")
        seen = show_link(link, picture("open"))
        assert process.wait(60) == 0
        assert process.stderr
        assert process.stderr.read() == "vec add.pftrace is in the UI\n"
    assert seen.complaints == []
    assert seen.title.startswith("vec_add.pftrace ")  # a space would show as %20
    assert "vec_add 4242 / worker 4243" in seen.tracks
