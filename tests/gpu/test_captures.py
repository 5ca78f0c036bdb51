"""Captures of streams while other threads of the program use CUDA: as natively, all of them succeed."""

from __future__ import annotations

import subprocess

import pytest

from tests.gpu.bench import Bench
from tests.gpu.test_let_go import Recorded, engine

pytestmark = pytest.mark.gpu

OTHER = 'extern "C" __global__ void other(unsigned *count) { atomicAdd(count, 1); }\n'
SECONDS = "1"


@pytest.fixture(scope="module")
def captures(bench: Bench, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The program, and the module that its threads load."""
    folder = tmp_path_factory.mktemp("captures")
    source, cubin = folder / "other.cu", folder / "other.cubin"
    source.write_text(OTHER)
    target = f"-arch={bench.tools.architectures()[0]}"
    subprocess.run(
        [str(bench.tools.nvcc().path), "-cubin", target, "-o", str(cubin), str(source)], check=True
    )
    return [str(bench.built("captures", "-ldl")), str(cubin)]


@pytest.mark.parametrize("others", ["u", "uu", "llmu"])
@pytest.mark.parametrize("mode", ["thread", "relaxed"])
@pytest.mark.parametrize("name", ["kernels", "warps"])
def test_no_capture_fails(bench: Bench, captures: list[str], name: str, mode: str, others: str) -> None:
    """Modules come and go meanwhile (`u`), memory too (`m`), and kernels are launched (`l`)."""
    program, cubin = captures
    recorded = Recorded(engine(bench, name), [program, mode, others, SECONDS, cubin])
    recorded.wait_for(b"\n")
    assert recorded.finish() == 0
    recorded.recording.close()
    words = recorded.printed.split()
    figures = dict(zip(words[::2], words[1::2], strict=True))
    print(name, mode, others, recorded.printed.decode().strip(), "lost", recorded.lost)
    assert int(figures[b"captures"]) > 0
    assert int(figures[b"modules"]) > 0
    assert (figures[b"failed"], figures[b"refused"]) == (b"0", b"0")
