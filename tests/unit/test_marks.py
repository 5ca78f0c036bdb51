"""What a mark in a kernel writes, by the header and for Triton, without a GPU."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.gpu_libraries import nvcc
from tests.support.ptx import Thread
from tracepipe.marks.ptx import Mark
from tracepipe.tracer.gpu.build.toolchain import find_parts

INCLUDE = Path(__file__).parents[2] / "tracepipe/marks/include"
KERNEL = """
.version 8.0
.target sm_75
.address_size 64
.visible .entry k() {
    .reg .b32 r;
"""


@pytest.fixture
def ptxas() -> str:
    parts = find_parts()
    found = [compiler.path.parent / "ptxas" for compiler in parts.nvcc]
    existing = [path for path in found if path.exists()]
    if not existing:
        pytest.skip("ptxas is not installed")
    return str(existing[0])


def test_each_mark_has_a_buffer_that_the_capture_finds(ptxas: str, tmp_path: Path) -> None:
    marks = [Mark("load", False), Mark("load", True), Mark("Store_0123456", False)]
    text = KERNEL + "".join(mark.text.replace("$0", "r") for mark in marks) + "\n    ret;\n}\n"
    (tmp_path / "k.ptx").write_text(text)
    command = [ptxas, "-arch=sm_75", "-o", str(tmp_path / "k.cubin"), str(tmp_path / "k.ptx")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    symbols = re.findall(rb"[^\0]*tracepipe_marks[^\0]*", (tmp_path / "k.cubin").read_bytes())
    assert len(symbols) == len(set(symbols)) == 3


@pytest.mark.parametrize("name", ["", "two words", "load-a", "é", "of_14_letters_"])
def test_a_wrong_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is no mark's name"):
        Mark(name, False)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_the_words_are_those_of_the_header(tmp_path: Path) -> None:
    names = ["a", "load", "Store_0123456", "_", "Z9", "abcdefghij", "abcdefghijk"]
    lines = (
        f'printf("%llx %llx\\n", TRACEPIPE_MARK_LOW_({name}), TRACEPIPE_MARK_HIGH_({name}));'
        for name in names
    )
    source = ["#include <cstdio>", "#include <tracepipe/mark.h>", "int main() {", *lines, "}", ""]
    (tmp_path / "words.cpp").write_text("\n".join(source))
    include = f"-I{INCLUDE}"
    subprocess.run(
        ["g++", "-std=c++14", include, "-o", str(tmp_path / "words"), str(tmp_path / "words.cpp")], check=True
    )
    done = subprocess.run([str(tmp_path / "words")], capture_output=True, text=True, check=True)
    for name, line in zip(names, done.stdout.splitlines(), strict=True):
        low, high = line.split()
        assert f"or.b64 low, low, 0x{low};" in Mark(name, False).text
        assert f"or.b64 high, high, 0x{high};" in Mark(name, True).text
        assert f"or.b64 low, low, {int(low, 16) | 1 << 45:#x};" in Mark(name, True).text


def of_triton(tmp_path: Path) -> str:
    return Mark("Store_0123456", True).text.replace("$0", "r").strip("{}")


def of_the_header(tmp_path: Path) -> str:
    source, made = tmp_path / "one.cu", tmp_path / "one.ptx"
    source.write_text(
        "#include <tracepipe/mark.h>\n__global__ void k() { TRACEPIPE_MARK_END(Store_0123456); }\n"
    )
    command = [nvcc(), f"-I{INCLUDE}", "-arch=sm_90", "--ptx", "-o", str(made), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    return made.read_text().partition("\n{")[2]


@pytest.mark.slow
@pytest.mark.parametrize("code", [of_triton, of_the_header])
def test_the_lowest_lane_writes_to_the_ring_of_its_slot(code: Callable[[Path], str], tmp_path: Path) -> None:
    records, counts, slots = 0x7F00_0000_0000, 0x7F10_0000_0000, 132 * 64
    text = code(tmp_path)
    for sm, slot, before in ((0, 0, 0), (131, 63, 1023), (7, 5, 1024), (1, 2, (1 << 32) - 1)):
        at = sm * 64 + slot
        special = {
            "activemask": 0xFFFF0F00, "laneid": 8, "lanemask_lt": 0xFF, "clock64": (1 << 50) | 0x1234,
            "smid": sm, "warpid": slot,
        }  # fmt: skip
        buffer = {0: records, 8: counts, 16: slots, 20: 0}
        counted = counts + 128 * at
        thread = Thread(special, buffer, {counted: before})
        thread.run(text)
        record = records + 16 * (at * 1024 + before % 1024)
        assert thread.written == [*range(record, record + 16, 4), counted]
        words = [thread.memory[place] for place in thread.written]
        low, high = words[0] | words[1] << 32, words[2] | words[3] << 32
        assert low & ((1 << 46) - 1) == 0x1234 | 1 << 45
        assert high >> 60 == before // 1024 % 16
        assert decoded(low, high) == "Store_0123456"
        assert words[4] == (before + 1) % (1 << 32)
        for other in (special | {"laneid": 9, "lanemask_lt": 0x1FF}, special | {"smid": 132}):
            elsewhere = Thread(other, buffer)
            elsewhere.run(text)
            assert elsewhere.written == []
        without = Thread(special, dict.fromkeys(buffer, 0))
        without.run(text)
        assert without.written == []


def decoded(low: int, high: int) -> str:
    characters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_"
    codes = [high >> 6 * at & 63 for at in range(10)] + [low >> 46 + 6 * at & 63 for at in range(3)]
    return "".join(characters[code - 1] for code in codes if code)
