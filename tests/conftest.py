"""What every kind of test shares: the stand-ins, the pictures, the skip of browser tests without Chromium."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.cores import CORES, running
from tests.support.devtools import find_chromium
from tests.support.gpu_libraries import build_engine
from tests.support.standin import build_standin

# Hundreds of processes are started here: each would compile all that it imports where the environment, as in
# many images of containers, says to keep no bytecode.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Under sudo a captured command runs as the user who called it, and the folders of tests are root's.
for name in ("SUDO_COMMAND", "SUDO_GID", "SUDO_UID", "SUDO_USER"):
    os.environ.pop(name, None)

# What is read in a test is in no cache, and stays in none: the tests of the cache have one of their own.
os.environ["TRACEPIPE_CACHE"] = ""

# Each processor has a process that tests: more threads of polars would wait for each other.
os.environ.setdefault("POLARS_MAX_THREADS", "1")

# How long an example takes says what else the machine is doing, not whether the code is right. Which core
# runs is the same for all examples of a test.
# A change is judged by the same examples as the one before it: a test of unchanged code does not fail. `make
# explore` tries others.
settings.register_profile(
    "tracepipe",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
# What the quick tests try of a property for which no number of examples is given.
settings.register_profile("quick", settings.get_profile("tracepipe"), max_examples=25)
settings.register_profile("explore", settings.get_profile("tracepipe"), derandomize=False)
settings.load_profile("tracepipe")

# What `pytest` alone leaves out: marks of pyproject.toml.
LEFT_OUT = "slow or alone or ebpf or gpu or vm or browser or cluster"
QUICK = f"not ({LEFT_OUT})"


@pytest.hookimpl(tryfirst=True)  # before xdist reads how many processes there are to be
def pytest_cmdline_main(config: pytest.Config) -> None:
    """`pytest` alone runs the quick tests, on all processors; files and marks choose others."""
    if config.args_source is not pytest.Config.ArgsSource.TESTPATHS or config.option.markexpr:
        return
    config.option.markexpr = QUICK
    if "PYTEST_XDIST_WORKER" in os.environ:
        return  # xdist's own processes have the same arguments, and must start no others
    if config.option.numprocesses is None:
        config.option.numprocesses = "auto"
    if config.option.dist == "no":
        config.option.dist = "worksteal"  # neighbours share fixtures, and no worker is idle at the end


def pytest_configure(config: pytest.Config) -> None:
    """Try fewer examples where quick tests run alone. And let SIGINT interrupt programs that tests start: a
    shell's `&` has it ignored, by them too.
    """
    if config.option.markexpr == QUICK:
        settings.load_profile("quick")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def hangup() -> Iterator[None]:
    """Lets SIGHUP end programs that the test starts, also under `nohup`."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture(autouse=True)
def _give_way() -> Iterator[None]:
    """Let a capture in the process of the tests have its priority only until the test ends."""
    before = os.getpriority(os.PRIO_PROCESS, 0)
    yield
    os.setpriority(os.PRIO_PROCESS, 0, before)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with what takes minutes: all else runs beside it."""
    minutes = {"vm": 0, "cluster": 1}
    items.sort(key=lambda item: min((minutes.get(mark.name, 2) for mark in item.iter_markers()), default=2))


def pytest_collection_finish() -> None:
    """Leave ten thousand tests and their modules out of every search for garbage: they stay to the end. And
    search seldom: it took a twelfth of the time.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.fixture(scope="module", autouse=True)
def _leave_out_libraries() -> Iterator[None]:
    """Leave what a file of tests imports out of these searches too: merging and pictures ask for one each."""
    yield
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let the interpreter find all of it at its end: libraries complain of what is left."""
    gc.unfreeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("browser") and find_chromium() is None:
        pytest.skip("no Chromium (apt install chromium)")


@pytest.fixture(params=CORES)
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the inner loops in Python, and again with the native core."""
    with running(request.param):
        yield request.param


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the stand-in programs and libraries."""
    return build_standin(tmp_path_factory.mktemp("standin"))


@pytest.fixture(scope="session")
def vec_add(standin: Path) -> str:
    """The program of the driver API."""
    return str(standin / "vec_add")


@pytest.fixture
def picture(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Paths for PNGs by name. They are kept in the folder $TRACEPIPE_SCREENSHOTS too, if it is set."""
    made: list[Path] = []

    def path_of(name: str) -> Path:
        made.append(tmp_path / f"{name}.png")
        return made[-1]

    yield path_of
    kept = os.environ.get("TRACEPIPE_SCREENSHOTS")
    if kept:
        Path(kept).mkdir(parents=True, exist_ok=True)
        for path in made:
            if path.exists():  # a failed test may not have got as far
                shutil.copy(path, kept)


@pytest.fixture(scope="session")
def kernels_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the engine `kernels`, with stand-ins of NVIDIA's."""
    return build_engine(tmp_path_factory.mktemp("kernels"), "kernels")


@pytest.fixture(scope="session")
def stalls_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the engine `stalls`, with stand-ins of NVIDIA's."""
    return build_engine(tmp_path_factory.mktemp("stalls"), "stalls")


@pytest.fixture(scope="session")
def warps_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library of the engine `warps`, with stand-ins of NVIDIA's."""
    return build_engine(tmp_path_factory.mktemp("warps"), "warps")
