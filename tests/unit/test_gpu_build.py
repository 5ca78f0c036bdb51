"""The native GPU code built for every architecture, on machines without a GPU too: by the compilers here."""

from __future__ import annotations

import ctypes
import re
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.compiled import compiled
from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.gpu.build.driver import Driver, owner
from tracepipe.tracer.gpu.build.toolchain import NATIVE, Toolchain, find_parts
from tracepipe.tracer.gpu.engines import warps
from tracepipe.tracer.gpu.engines.kernels import KernelStream, StallStream

pytestmark = pytest.mark.slow

ARCHITECTURES = [75, 80, 86, 89, 90, 100, 120]
# Each engine's library, built.
LIBRARIES: dict[str, Callable[[Toolchain], Path]] = {
    "kernels": KernelStream.build,
    "warps": lambda tools: tools.build_host(NATIVE / "warps.cpp", ["sanitizer"]),
    "stalls": StallStream.build,
}
ROOT = Path(__file__).parents[2]
U64 = ctypes.c_uint64
NO_ROOM = (1 << 64) - 1


@pytest.fixture(scope="module")
def tools() -> Toolchain:
    """The compilers here, without a driver."""
    found = Toolchain(Driver(error="none in this test"), find_parts(), owner())
    try:
        for ask in (found.gxx, found.nvcc, lambda: found.part("sanitizer"), lambda: found.part("cupti")):
            ask()
    except CaptureUnavailable as refusal:
        pytest.skip(f"{refusal.message} {refusal.hint}")
    return found


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What is built is built here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def codes(fatbin: bytes) -> dict[int, bytes]:
    """Architecture → machine code of a fatbin.

    0       4       6       8        16 and on, one entry after the other, each of
    | magic | vers. | bytes | size   | kind u16, version u16, header bytes u32, size u64, …, at 28: sm u32
    """
    found, at = {}, 16
    while at < len(fatbin):
        kind, _, header_bytes, size_bytes = struct.unpack_from("<HHIQ", fatbin, at)
        assert kind == 2, "machine code, no PTX"
        end = at + header_bytes + size_bytes
        (architecture,) = struct.unpack_from("<I", fatbin, at + 28)
        found[architecture] = fatbin[at + header_bytes : end]
        at = end
    return found


def patches(
    tools: Toolchain, architectures: list[int] = ARCHITECTURES, defines: dict[str, int] | None = None
) -> bytes:
    wanted = [f"sm_{number}" for number in architectures]
    return tools.build_patches(NATIVE / "patches.cu", wanted, defines).read_bytes()


@pytest.mark.parametrize("name", LIBRARIES)
def test_a_library_exports_its_entry_alone_and_leaves_a_program_alone_that_is_not_captured(
    tools: Toolchain, name: str
) -> None:
    library = LIBRARIES[name](tools)
    more = ["attach", "follow_window"] if name == "kernels" else []
    later = {f"tracepipe_{function}" for function in [*more, "window_begins", "window_ends"]}
    with Elf(str(library)) as elf:
        assert {function for function, _ in elf.functions()} == {"InitializeInjection"} | later
    enters = f"import ctypes; print(ctypes.CDLL({str(library)!r}).InitializeInjection())"
    done = subprocess.run([sys.executable, "-c", enters], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "1\n", "")


@pytest.mark.parametrize("defines", [{}, {"TRACEPIPE_FIRST_BLOCK": 8, "TRACEPIPE_LAST_BLOCK": 15}])
def test_patches_are_built_for_every_architecture(tools: Toolchain, defines: dict[str, int]) -> None:
    assert list(codes(patches(tools, defines=defines))) == ARCHITECTURES


def test_empty_patches_are_built_for_every_architecture(tools: Toolchain) -> None:
    """They are what the cost of recording is measured against."""
    full, empty = codes(patches(tools)), codes(patches(tools, defines={"TRACEPIPE_EMPTY": 1}))
    assert list(empty) == ARCHITECTURES
    for number in ARCHITECTURES:
        assert len(empty[number]) < len(full[number])
        # Compute Sanitizer finds them by name.
        names = [set(re.findall(rb"\0(tracepipe_\w+)(?=\0)", code)) for code in (empty[number], full[number])]
        assert names[0] == names[1] >= {b"tracepipe_enter", b"tracepipe_exit"}


def test_every_nvcc_of_the_machine_will_do(tools: Toolchain) -> None:
    """Those of PyPI and of a toolkit stand side by side."""
    for compiler in tools.parts.nvcc:
        alone = Toolchain(tools.driver, replace(tools.parts, nvcc=[compiler]), tools.owner)
        assert list(codes(patches(alone, [75, 120]))) == [75, 120], compiler.path


@pytest.mark.parametrize("options", [(), ("-rdc=true",)], ids=["whole", "separate"])
@pytest.mark.parametrize("standard", [14, 20])
def test_a_program_with_marks_is_compiled(
    tools: Toolchain, tmp_path: Path, options: tuple[str, ...], standard: int
) -> None:
    """The capture finds the buffer by its symbol; both files have one, and may be linked."""
    include, gpu = f"-I{ROOT / 'tracepipe/marks/include'}", ROOT / "tests/gpu"
    nvcc = [str(tools.nvcc().path), include, f"-std=c++{standard}", "-arch=sm_90", *options]
    for name in ("marks", "marks_second"):
        made = tmp_path / f"{name}.cubin"
        done = subprocess.run(
            [*nvcc, "-cubin", "-o", str(made), str(gpu / f"{name}.cu")], capture_output=True
        )
        assert (done.returncode, done.stderr) == (0, b"")
        assert b"_ZN14tracepipe_mark15tracepipe_marksILi1EEE" in made.read_bytes()


@pytest.mark.parametrize(("name", "fits"), [("a_name_of_13c", True), ("a_name_of_14ch", False)])
def test_a_mark_has_a_short_name(tools: Toolchain, tmp_path: Path, name: str, fits: bool) -> None:
    source = tmp_path / "one.cu"
    source.write_text(
        f"#include <tracepipe/mark.h>\n__global__ void k() {{ TRACEPIPE_MARK_BEGIN({name}); }}\n"
    )
    nvcc = [str(tools.nvcc().path), f"-I{ROOT / 'tracepipe/marks/include'}", "-arch=sm_90", "-cubin", "-o"]
    done = subprocess.run([*nvcc, str(tmp_path / "made"), str(source)], capture_output=True, text=True)
    assert (done.returncode == 0) == fits
    assert fits or "13 characters at most" in done.stderr


@pytest.mark.parametrize("number", [ARCHITECTURES[0], ARCHITECTURES[-1]])
def test_the_kernel_that_answers_for_clock_pairs_is_assembled(
    tools: Toolchain, tmp_path: Path, number: int
) -> None:
    """At run time the driver does that, as the library has it as PTX."""
    text = re.search(r'R"\((.*?)\)"', (NATIVE / "clock_pairs.h").read_text(), re.DOTALL)
    assert text is not None
    source, made = tmp_path / "answer.ptx", tmp_path / "answer.cubin"
    source.write_text(text[1])
    command = [str(tools.nvcc().path), "--cubin", f"-arch=sm_{number}", "-o", str(made), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert b"tracepipe_answer" in made.read_bytes()


@pytest.mark.parametrize(
    "source",
    [*sorted((ROOT / "tests/gpu").glob("*.cu")), *sorted((ROOT / "benchmarks").glob("*.cu"))],
    ids=lambda source: source.name,
)
def test_programs_to_be_recorded_are_compiled(tools: Toolchain, tmp_path: Path, source: Path) -> None:
    """Those of the tests that need a GPU, and the benchmark's."""
    flags = ["-std=c++17", "-O2", "-arch=sm_90", "-rdc=true", "-Werror", "all-warnings", "-c"]
    flags.append(f"-I{ROOT / 'tracepipe/marks/include'}")
    assert compiled([str(tools.nvcc().path), *flags, str(source)], tmp_path / "made.o").stat().st_size


def test_what_cupti_opens_beside_itself_is_found(tools: Toolchain, tmp_path: Path) -> None:
    """Also where no folder of CUDA is among those that the dynamic linker searches."""
    source = tmp_path / "plans.cpp"
    source.write_text(
        "#include <cupti_profiler_host.h>\n"
        "int main() {\n"
        "  CUpti_Profiler_Host_Initialize_Params chip = {\n"
        "    CUpti_Profiler_Host_Initialize_Params_STRUCT_SIZE};\n"
        "  chip.profilerType = CUPTI_PROFILER_TYPE_PM_SAMPLING;\n"
        '  chip.pChipName = "GH100";\n'
        "  return cuptiProfilerHostInitialize(&chip);\n"
        "}\n"
    )
    program = tools.build_host(source, ["cupti"], is_program=True)
    with Elf(str(program)) as built:
        dynamic = built.dynamic()
    assert (dynamic.rpath, dynamic.runpath) == ([str(tools.part("cupti").library.parent)], [])
    assert subprocess.run([program]).returncode == 0


# The format of the records


def test_both_sides_have_the_same_kinds_losses_and_columns() -> None:
    header = (NATIVE / "warp_columns.h").read_text()
    kinds = re.findall(r"\b(KIND_\w+) = (\d+)", header)
    assert len(kinds) >= 5
    for name, number in kinds:
        assert warps.WarpKind[name.removeprefix("KIND_")] == int(number)
    assert {int(number) for number in re.findall(r"\bLOST_\w+ = (\d+)", header)} == set(warps.LOST_WHY)
    columns = {int(number): name.lower() for name, number in re.findall(r"COLUMN_(\w+) = (\d+)", header)}
    assert columns == warps.COLUMN_NAMES


@pytest.fixture(scope="module")
def layout(tools: Toolchain, tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The host's side of native/warp_record.h and native/device_memory.h, as functions."""
    library = tmp_path_factory.mktemp("layout") / "layout.so"
    source = ROOT / "tests/gpu/layout.cpp"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{NATIVE}"]
    subprocess.run([str(tools.gxx().path), *flags, str(source), "-o", str(library)], check=True)
    made = ctypes.CDLL(str(library))
    counts = {"exits_at": 1, "exits_that_fit": 2, "bytes_of_region": 2, "room_at_first": 1}
    counts |= {"shared_exits_at": 1, "bytes_of_shared_region": 1}
    for name, count in counts.items():
        function = getattr(made, name)
        function.argtypes, function.restype = [U64] * count, U64
    made.pair_of.argtypes = [ctypes.POINTER(U64), U64, ctypes.POINTER(U64)]
    made.pair_of.restype = ctypes.c_bool
    made.memory_make.argtypes, made.memory_make.restype = [U64], ctypes.c_void_p
    made.memory_take.argtypes, made.memory_take.restype = [ctypes.c_void_p, U64], U64
    made.memory_give_back.argtypes, made.memory_free.argtypes = [ctypes.c_void_p, U64, U64], [ctypes.c_void_p]
    return made


def constants(library: ctypes.CDLL, name: str, count: int = 1) -> list[int]:
    return list((U64 * count).in_dll(library, name))


def test_records_lie_as_they_are_drawn(layout: ctypes.CDLL) -> None:
    """The patches write two words at once: at a multiple of 16 where they have 64 bits, of 8 where 32."""
    assert constants(layout, "warp_fields", 8) == [0, 8, 16, 20, 24, 32, 40, 48]
    assert constants(layout, "exit_fields", 5) == [0, 8, 16, 24, 32]
    assert constants(layout, "entry_fields", 7) == [0, 48, 56, 64, 72, 84, 96]
    assert constants(layout, "region_head_bytes") == [64]


@given(warps=st.integers(1, 1 << 40), room=st.integers(0, 3))
def test_a_region_holds_its_warps_and_exits(layout: ctypes.CDLL, warps: int, room: int) -> None:
    (head_bytes,) = constants(layout, "region_head_bytes")
    (alignment,) = constants(layout, "region_alignment")
    exits_at, exits = layout.exits_at(warps), layout.exits_that_fit(warps, room)
    assert exits_at == head_bytes + warps * 48
    assert exits_at % 16 == 0
    size_bytes = layout.bytes_of_region(warps, room)
    assert exits_at + exits * 32 <= size_bytes < exits_at + exits * 32 + alignment
    assert size_bytes % alignment == 0
    assert exits <= layout.exits_that_fit(warps, 3) + 64
    assert layout.exits_that_fit(warps, 3) == 31 * warps, "32 lanes leave one by one, the first with its warp"
    assert warps > 1024 or layout.room_at_first(warps) == 3
    # A region of several kernels: a number for each of 64 slots of 512 SMs, then an Entry and an Exit a warp.
    exits_at = layout.shared_exits_at(warps)
    assert exits_at == head_bytes + 512 * 64 * 4 + warps * 96
    size_bytes = layout.bytes_of_shared_region(warps)
    assert exits_at + warps * 32 <= size_bytes < exits_at + warps * 32 + alignment


@example(offset_ns=0, drift_ppm=0, step_ns=1024, ways_ns=[(1024, 500), (500, 500)])  # both in one step
@given(
    offset_ns=st.integers(-(10**15), 10**15),
    drift_ppm=st.integers(-90, 90),
    step_ns=st.sampled_from([1, 32, 1024]),
    ways_ns=st.lists(st.tuples(st.integers(500, 3000), st.integers(500, 900)), min_size=1, max_size=60),
)
def test_a_clock_pair_holds_the_time_of_its_reading(
    layout: ctypes.CDLL, offset_ns: int, drift_ppm: int, step_ns: int, ways_ns: list[tuple[int, int]]
) -> None:
    """Rounds of a clock that drifts and steps, each with its own delays to and fro."""
    host_ns, words, read_at, widths_ns = 10**16, [], {}, []
    for to_ns, fro_ns in ways_ns:
        asked_ns, host_ns = host_ns, host_ns + to_ns
        shown_ns = host_ns - offset_ns + (host_ns - 10**16) * drift_ppm // 1_000_000
        shown_ns -= shown_ns % step_ns
        read_at.setdefault(shown_ns, []).append(host_ns)
        host_ns += fro_ns
        words += [asked_ns, shown_ns, host_ns]
        widths_ns.append(to_ns + fro_ns)
    pair = (U64 * 3)()
    assert layout.pair_of((U64 * len(words))(*words), len(ways_ns), pair)
    source_ns, low_ns, high_ns = pair
    assert any(low_ns <= at_ns <= high_ns for at_ns in read_at[source_ns])
    assert high_ns - low_ns <= min(widths_ns)


def test_all_rounds_bound_the_clock_closer_than_the_fastest_one(layout: ctypes.CDLL) -> None:
    # Before, source, after: fast on the way to the GPU, on the way back, and to it again.
    rounds, pair = (U64 * 9)(1000, 1300, 4000, 5000, 7800, 8500, 9000, 9301, 12000), (U64 * 3)()
    assert layout.pair_of(rounds, 3, pair)
    # 300 and 700 of the first two, each a nanosecond of drift and one of the clock's step wider.
    assert list(pair) == [7800, 7800 - 302, 7800 + 702]


@given(
    memory_bytes=st.integers(1, 64).map(lambda n: n * 256),
    steps=st.lists(st.one_of(st.integers(1, 40).map(lambda n: n * 256), st.integers(-20, -1)), max_size=60),
)
def test_regions_never_overlap_and_what_is_free_can_be_taken(
    layout: ctypes.CDLL, memory_bytes: int, steps: list[int]
) -> None:
    """A step takes so many bytes, or gives back one of the regions."""
    memory, held = layout.memory_make(memory_bytes), list[tuple[int, int]]()
    for step in steps:
        if step < 0:
            if held:
                layout.memory_give_back(memory, *held.pop(step % len(held)))
            continue
        at = layout.memory_take(memory, step)
        edges = [0, *(edge for start, size in sorted(held) for edge in (start, start + size)), memory_bytes]
        most = max(end - start for start, end in zip(edges[::2], edges[1::2], strict=True))
        assert (at == NO_ROOM) == (step > most)
        if at != NO_ROOM:
            assert at + step <= memory_bytes
            assert all(at + step <= other or other + taken <= at for other, taken in held)
            held.append((at, step))
    layout.memory_free(memory)


def test_tiny_launches_have_room_beside_large_ones_that_cannot_be_read(layout: ctypes.CDLL) -> None:
    """A GiB, and launches that launch kernels, of which none is known to have ended."""
    memory, large, tiny = layout.memory_make(1 << 30), 8 << 20, layout.bytes_of_region(1, 3)
    held = []
    while (at := layout.memory_take(memory, large)) != NO_ROOM:
        held.append(at)
    assert len(held) * large >= (1 << 30) * 7 // 8
    for _ in range(100):
        regions = [layout.memory_take(memory, tiny) for _ in range(600)]
        assert NO_ROOM not in regions
        assert regions[-1] - regions[0] == 599 * tiny, "adjacent ones are read at once"
        for at in regions:
            layout.memory_give_back(memory, at, tiny)
    layout.memory_free(memory)
