"""The commands of docs/coming-from.md that need a GPU."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.gpu.bench import Bench
from tests.support.pages import ON_GPU, run_lines, section_blocks

pytestmark = pytest.mark.gpu
SOURCE = Path(__file__).parents[2] / "fixtures/capture-h200/vec_add.cu"


@pytest.mark.parametrize("section", ["kernel_trace", "kernelretsnoop"])
def test_the_commands_of_a_page_run(bench: Bench, section: str, tmp_path: Path) -> None:
    pytest.importorskip(
        "scipy", reason="no scipy (pip install 'tracepipe[reports]')"
    )  # for `tracepipe warps`
    shutil.copy(bench.built("vec_add", source=SOURCE), tmp_path)
    found = section_blocks("docs/coming-from.md", section)
    lines = [line for place, some in found if place == ON_GPU for line in some]
    printed = run_lines(lines, tmp_path)
    assert "vectorAdd" in printed
    assert "Traceback" not in printed
