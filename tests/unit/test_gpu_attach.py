"""A library that is loaded into a process which runs already: what that process notices of it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.compiled import compiled
from tests.support.gpu_libraries import FLAGS, NATIVE, ROOT, build_object, include_flags
from tests.support.gpu_records import kernel_renderer
from tests.support.recorded_program import Recorded
from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer import CaptureRequest
from tracepipe.tracer.gpu import choice
from tracepipe.tracer.gpu.attach.loader import CODE, enter
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.gpu.engines.streams import GpuEngine

pytestmark = pytest.mark.skipif(os.uname().machine != "x86_64", reason="it is done on x86-64 alone")
SOURCES = ROOT / "tests/gpu"
ENDS = {
    "nanosleep": "0 after 2 s, errno 0",
    "epoll_wait": "0, errno 0",
    "read": "1, errno 0",
    "pause": "-1, interrupted 1",
    "condition": "timed out 1",
    "work": "worked, errno 0",
    "threads": "worked, errno 0",
}


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the program and the library."""
    compiler, folder = shutil.which("gcc"), tmp_path_factory.mktemp("attached")
    if compiler is None:
        pytest.skip("there is no gcc")
    shared = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC"]
    empty = ["-Wl,-soname,libcuda.so.1", "-x", "c", os.devnull, "-o", str(folder / "libcuda.so.1")]
    subprocess.run([*shared, *empty], check=True)
    source, library = str(SOURCES / "attached.c"), str(folder / "library.so")
    subprocess.run([*shared, "-DLIBRARY", source, "-o", library], check=True)
    linked = ["-Wl,--no-as-needed", str(folder / "libcuda.so.1"), f"-Wl,-rpath,{folder}", "-pthread"]
    plain = [compiler, "-O2", source, "-pthread", "-o"]
    subprocess.run([*plain, str(folder / "program"), *linked], check=True)
    subprocess.run([*plain, str(folder / "without"), "-pthread"], check=True)
    folder.chmod(0o755)
    return folder


class Running:
    """A program that does something."""

    def __init__(self, program: Path, what: str) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen([str(program), what], stdin=pipe, stdout=pipe, text=True)
        self.pid = self.process.pid
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "begun\n"

    def end(self) -> tuple[str, int]:
        """What it printed, and its exit code."""
        printed, _ = self.process.communicate("\n")
        return printed.strip(), self.process.returncode


@pytest.fixture
def run(built: Path) -> Iterator[Callable[..., Running]]:
    started: list[Running] = []

    def start(what: str, program: str = "program") -> Running:
        started.append(Running(built / program, what))
        return started[-1]

    yield start
    for running in started:
        with suppress(ProcessLookupError):
            running.process.kill()
        running.process.communicate()


def entered(running: Running, built: Path, file: Path, library: str = "library.so") -> int:
    return enter(running.pid, built / library, "entry", str(file), lambda: None)


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_a_program_notices_nothing(
    run: Callable[..., Running], built: Path, tmp_path: Path, what: str
) -> None:
    """Whatever it does: a wait is as long as it would be, and what it computes is right."""
    running, file = run(what), tmp_path / "file"
    for time in range(1, 4):
        assert entered(running, built, file) == 42
        assert file.read_text() == "called\n" * time
    if what == "pause":
        running.process.send_signal(signal.SIGUSR1)
    assert running.end() == (ENDS[what], 0)


# The thread that was stopped looks at the clock for two seconds before it helps itself.
@pytest.mark.slow
@pytest.mark.parametrize("what", ["read", "condition", "threads"])
def test_a_stopped_program_continues_when_the_process_that_stopped_it_ends(
    run: Callable[..., Running], built: Path, tmp_path: Path, what: str
) -> None:
    """In the midst, without a chance to put anything right."""
    running = run(what)
    killed = f"""
import os, signal
from pathlib import Path
from tracepipe.tracer.gpu.attach.loader import enter
from tracepipe.tracer.gpu.attach.loader import StoppedThread
go_on = StoppedThread.go_on
StoppedThread.go_on = lambda thread: (go_on(thread), os.kill(os.getpid(), signal.SIGKILL))
enter({running.pid}, Path({str(built / "library.so")!r}), "entry", {str(tmp_path / "file")!r}, int)
"""
    done = subprocess.run([sys.executable, "-c", killed], cwd=ROOT)
    assert done.returncode == -signal.SIGKILL
    assert running.end() == (ENDS[what], 0)
    assert (tmp_path / "file").read_text() == "called\n"


def test_the_code_is_what_its_source_states(tmp_path: Path) -> None:
    if not (shutil.which("as") and shutil.which("objcopy")):
        pytest.skip("there is no assembler")
    source, made, code = NATIVE.parent / "attach/loader.S", tmp_path / "loader.o", tmp_path / "loader"
    subprocess.run(["as", "--64", str(source), "-o", str(made)], check=True)
    subprocess.run(["objcopy", "-O", "binary", "-j", ".text", str(made), str(code)], check=True)
    assert code.read_bytes() == CODE


def test_a_library_that_cannot_be_loaded_leaves_the_program_as_it_was(
    run: Callable[..., Running], built: Path, tmp_path: Path
) -> None:
    (built / "no.so").write_text("no library")
    running = run("read")
    with pytest.raises(CaptureUnavailable, match=r"cannot load .*/no.so: .*(too short|invalid ELF header)"):
        entered(running, built, tmp_path, "no.so")
    with pytest.raises(CaptureUnavailable, match="undefined symbol: nothing"):
        enter(running.pid, built / "library.so", "nothing", "", lambda: None)
    assert running.end() == (ENDS["read"], 0)


@pytest.mark.parametrize(
    ("program", "library", "message"),
    [
        ("without", "library.so", "does not use CUDA: it has not loaded libcuda.so.1"),
        ("program", "nowhere.so", "does not see .*/nowhere.so"),
    ],
)
def test_a_process_that_cannot_be_entered_is_refused_before_it_is_touched(
    run: Callable[..., Running], built: Path, tmp_path: Path, program: str, library: str, message: str
) -> None:
    running = run("read", program)
    with pytest.raises(CaptureUnavailable, match=message):
        entered(running, built, tmp_path, library)
    assert running.end() == (ENDS["read"], 0)


def test_a_stopped_process_stays_stopped(run: Callable[..., Running], built: Path, tmp_path: Path) -> None:
    running = run("read")
    running.process.send_signal(signal.SIGSTOP)
    os.waitpid(running.pid, os.WUNTRACED)
    with pytest.raises(CaptureUnavailable, match="is stopped") as refusal:
        entered(running, built, tmp_path)
    assert refusal.value.hint == f"kill -CONT {running.pid}"
    running.process.send_signal(signal.SIGCONT)
    assert running.end() == (ENDS["read"], 0)


def test_a_process_that_has_ended_is_named(run: Callable[..., Running], built: Path, tmp_path: Path) -> None:
    running = run("read")
    running.end()
    with pytest.raises(TracepipeError, match=f"No such process: {running.pid}"):
        entered(running, built, tmp_path)


def test_another_users_process_is_refused(run: Callable[..., Running], built: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("there is one user")
    running = run("read")
    tried = "import os; from pathlib import Path; from tracepipe.tracer.gpu.attach.loader import enter\n"
    tried += "os.setuid(65534)\n"
    tried += f"try: enter({running.pid}, Path('{built}/library.so'), 'entry', '', print)\n"
    tried += "except Exception as error: print(type(error).__name__, error.message)"
    done = subprocess.run([sys.executable, "-c", tried], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.startswith(f"CaptureUnavailable Process {running.pid} may not be"), done.stdout
    assert running.end() == (ENDS["read"], 0)


# The engine `kernels`, with a stand-in of CUPTI


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a program with CUPTI, and of the library of `kernels`."""
    folder, include = tmp_path_factory.mktemp("kernels"), include_flags()
    shared = ["g++", *FLAGS, *include, "-shared", "-fPIC"]
    driver = compiled(
        [*shared, "-Wl,-soname,libcuda.so.1", str(SOURCES / "cuda_standin.cpp")], folder / "libcuda.so.1"
    )
    exports = f"-Wl,--version-script={NATIVE / 'exports.map'}"
    compiled([*shared, exports, str(build_object(folder, "kernels"))], folder / "kernels.so")
    linked = ["-Wl,--no-as-needed", str(driver), "-Wl,-rpath,$ORIGIN", "-rdynamic"]
    program = ["g++", *FLAGS, *include, str(SOURCES / "cupti_standin.cpp"), *linked]
    compiled(program, folder / "program")
    return folder


class Attached(Recorded):
    """A program that runs, which is recorded when the test asks for it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "program", kernel_renderer(), TRACEPIPE_GPU_CHANNEL="")
        self._folder = folder

    def enter(self) -> None:
        """The earlier recording is over, or the program never was recorded."""
        engine = GpuEngine([KernelStream(self._folder / "kernels.so", calls="all")], ring_bytes=1 << 20)
        engine.enter([self.process.pid])
        self.channel.close()
        self.channel, self.renderer, self.events = engine.channel, engine.renderer(), []


@pytest.fixture
def attached(kernels: Path) -> Iterator[Attached]:
    made = Attached(kernels)
    assert made.answer() == "begun"
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


@pytest.mark.slow
def test_a_process_is_recorded_from_the_attachment_to_the_end_of_the_recording(attached: Attached) -> None:
    """And again, by another capture."""
    attached.do("launch 5")
    threads = Path(f"/proc/{attached.process.pid}/task")
    for count in (3, 4):
        attached.enter()
        attached.do(f"launch {count}")
        attached.wait_for(count)
        attached.stop()
        assert [event["name"] for event in attached.of("gpu_kernel")] == ["f"] * count
        assert attached.of("loss") == []
        assert {call["name"] for call in attached.of("userspace")} >= {"cuLaunchKernel"}
        assert attached.do("asked") == "asked for nothing"
        while attached.do("callbacks") != "no callbacks":
            pass
        assert len(list(threads.iterdir())) == 2, "one of the library's, which sleeps"
        assert "/memfd:tracepipe" not in Path(f"/proc/{attached.process.pid}/maps").read_text()
    assert attached.end() == 0


def test_one_capture_at_a_time(attached: Attached) -> None:
    attached.enter()
    with pytest.raises(CaptureUnavailable, match="another capture is recording its GPU's work"):
        attached.enter()
    attached.do("launch 2")
    attached.wait_for(2)
    assert attached.end() == 0


def test_needs_of_launches_and_limits_of_an_sm_are_recorded(attached: Attached) -> None:
    """What the driver chooses for a kernel limits nothing, so only what the program configured is kept."""
    attached.enter()
    attached.do("gpu")
    attached.do("needs 96 1024 4096 0")
    attached.do("launch 1")
    attached.do("needs 32 0 0 16384")
    attached.do("launch 1")
    attached.wait_for(2)
    attached.stop()
    first, second = (kernel["args"] for kernel in attached.of("gpu_kernel"))
    assert (first["registers"], first["shared_bytes"], "shared_config_bytes" in first) == (96, 5120, False)
    assert (second["registers"], second["shared_config_bytes"]) == (32, 16384)
    (gpu,) = attached.renderer.gpus
    assert (gpu["name"], gpu["sm_count"], gpu["compute_capability"]) == ("NVIDIA H200", 132, "9.0")
    assert (gpu["max_warps_per_sm"], gpu["max_blocks_per_sm"]) == (64, 32)
    assert (gpu["registers_per_sm"], gpu["shared_bytes_per_sm"]) == (65536, 233472)
    assert attached.end() == 0


def test_another_profiler_keeps_its_records(attached: Attached) -> None:
    assert attached.do("subscribe") == "subscribe"
    with pytest.raises(CaptureUnavailable, match="uses CUPTI there"):
        attached.enter()
    assert attached.do("asked") == "asked for nothing"


def test_the_gpus_of_a_process_are_recorded_if_an_engine_is_named() -> None:
    choice.check(CaptureRequest(pids=(1,), gpu="kernels"))
    choice.check(CaptureRequest(pids=(1,), layers=("gpu_kernel",), gpu="auto"))
    assert choice.choose(CaptureRequest(pids=(1,), gpu="auto"), {}, has_device=True).engine == "off"
    for request in (
        CaptureRequest(pids=(1,), gpu="warps"),
        CaptureRequest(pids=(1,), gpu="auto", gpu_kernels="attn"),
        CaptureRequest(pids=(1,), layers=("gpu_warp",), gpu="auto"),
    ):
        with pytest.raises(TracepipeError, match="Warps can be recorded only from a program's start"):
            choice.check(request)
    with pytest.raises(TracepipeError, match="for a command, or for processes given by number"):
        choice.check(CaptureRequest(comm="python3", gpu="kernels"))
