"""Finding compilers and NVIDIA's parts in every place that has them, and building with them: safely, once."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tracepipe.errors import CaptureUnavailable
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, Owner, ask_driver, driver_of
from tracepipe.tracer.gpu.build.toolchain import Compiler, Part, Parts, Toolchain, find_parts

H200 = Driver((13, 0), (Gpu("NVIDIA H200", "sm_90"),))
NOBODY = Driver(error="libcuda.so.1: cannot open shared object file")
ME = Owner(os.geteuid(), os.getegid(), Path("/nowhere"))
MACHINE = os.uname().machine
TARGET = {"x86_64": "x86_64-linux", "aarch64": "sbsa-linux"}.get(MACHINE, "")


def put(path: Path, text: str = "", *, runs: bool = False) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    if runs:
        path.chmod(0o755)
    return path


def nvcc(path: Path, version: str = "13.0", codes: str = "sm_75 sm_80 sm_90") -> Path:
    words = (
        f'case "$1" in --list-gpu-code) printf "%s\\n" {codes};; --version) echo "release {version}, V1";; '
    )
    return put(
        path, f'#!/bin/sh\n{words}*) echo made by {version} >"$(eval echo \\${{$#}})";; esac\n', runs=True
    )


def toolkit(root: Path, version: int = 13000) -> Path:
    put(root / "targets" / TARGET / "include/cuda.h", f"#define CUDA_VERSION {version}\n")
    put(root / "extras/CUPTI/include/cupti.h")
    put(root / "extras/CUPTI/lib64/libcupti.so")
    put(root / "compute-sanitizer/include/sanitizer.h")
    put(root / "compute-sanitizer/libsanitizer-public.so")
    nvcc(root / "bin/nvcc", f"{version // 1000}.{version % 1000 // 10}")
    return root


def packages_13(site: Path, version: str = "13.0") -> Path:
    kit = site / "nvidia/cu13"
    for header in ("cuda.h", "cupti.h", "sanitizer.h"):
        put(kit / "include" / header)
    put(kit / "lib/libcupti.so.13")
    put(kit / "lib/libsanitizer-public.so")
    nvcc(kit / "bin/nvcc", version)
    for name in ("nvidia_cuda_cupti", "nvidia_cuda_sanitizer_api", "nvidia_nvvm", "nvidia_cuda_crt"):
        (site / f"{name}-{version}.85.dist-info").mkdir(parents=True)
    return site


def packages_12(site: Path) -> Path:
    put(site / "nvidia/cuda_runtime/include/cuda.h", "#define CUDA_VERSION 12080\n")
    put(site / "nvidia/cuda_cupti/include/cupti.h")
    put(site / "nvidia/cuda_cupti/lib/libcupti.so.12")
    put(site / "nvidia/cuda_sanitizer_api/include/sanitizer.h")
    put(site / "nvidia/cuda_sanitizer_api/lib/libsanitizer-public.so")
    (site / "nvidia_cuda_cupti_cu12-12.8.90.dist-info").mkdir()
    (site / "nvidia_cuda_sanitizer_api_cu12-12.8.93.dist-info").mkdir()
    return site


def debian(root: Path) -> Path:
    put(root / "usr/include/cuda.h", "#define CUDA_VERSION 11080\n")
    put(root / "usr/include/cupti.h")
    put(root / f"usr/lib/{MACHINE}-linux-gnu/libcupti.so")
    return root


def look(root: Path, *packages: Path, **environment: str) -> Parts:
    return find_parts({"PATH": "", **environment}, packages, root)


# Where parts are found


@pytest.mark.skipif(not TARGET, reason=f"CUDA has no toolkit for {MACHINE}")
@pytest.mark.parametrize("place", ["usr/local/cuda", "usr/local/cuda-12.8", "opt/cuda"])
def test_a_toolkit_has_all_parts(tmp_path: Path, place: str) -> None:
    kit = toolkit(tmp_path / place, 12080)
    parts = look(tmp_path)
    assert [part.version for part in (*parts.sanitizer, *parts.cupti, *parts.nvcc)] == [(12, 8)] * 3
    assert parts.sanitizer[0].library == kit / "compute-sanitizer/libsanitizer-public.so"
    assert parts.cupti[0].include == (kit / "extras/CUPTI/include", kit / "targets" / TARGET / "include")


@pytest.mark.skipif(not TARGET, reason=f"CUDA has no toolkit for {MACHINE}")
def test_a_toolkit_that_is_reached_twice_counts_once(tmp_path: Path) -> None:
    toolkit(tmp_path / "usr/local/cuda-13.0")
    (tmp_path / "usr/local/cuda").symlink_to("cuda-13.0")
    parts = look(tmp_path, CUDA_HOME=str(tmp_path / "usr/local/cuda-13.0"))
    assert [len(found) for found in (parts.nvcc, parts.sanitizer, parts.cupti)] == [1, 1, 1]


@pytest.mark.skipif(not TARGET, reason=f"CUDA has no toolkit for {MACHINE}")
@pytest.mark.parametrize("variable", ["CUDA_HOME", "CUDA_PATH"])
def test_a_toolkit_is_named_by_the_environment(tmp_path: Path, variable: str) -> None:
    kit = toolkit(tmp_path / "elsewhere")
    assert look(tmp_path).cupti == []
    assert look(tmp_path, **{variable: str(kit)}).cupti[0].library == kit / "extras/CUPTI/lib64/libcupti.so"


def test_packages_of_13_lie_in_one_folder(tmp_path: Path) -> None:
    site = packages_13(tmp_path / "site")
    parts = look(tmp_path, site)
    assert parts.nvcc[0].path == site / "nvidia/cu13/bin/nvcc"
    assert parts.nvcc[0].mixed == ()
    assert [parts.sanitizer[0].version, parts.cupti[0].version] == [(13, 0), (13, 0)]


def test_packages_of_12_lie_apart_and_have_no_nvcc(tmp_path: Path) -> None:
    site = packages_12(tmp_path / "site")
    parts = look(tmp_path, site)
    assert parts.nvcc == []
    assert [parts.sanitizer[0].version, parts.cupti[0].version] == [(12, 8), (12, 8)]
    assert parts.cupti[0].include[1] == site / "nvidia/cuda_runtime/include"


def test_debians_package_lies_in_usr(tmp_path: Path) -> None:
    parts = look(debian(tmp_path))
    assert [part.version for part in parts.cupti] == [(11, 8)]


def test_a_library_without_its_header_is_not_a_part(tmp_path: Path) -> None:
    site = packages_13(tmp_path / "site")
    (site / "nvidia/cu13/include/cupti.h").unlink()
    assert look(tmp_path, site).cupti == []


def test_nvcc_of_the_path_is_found(tmp_path: Path) -> None:
    there = nvcc(tmp_path / "bin/nvcc", "12.9")
    assert look(tmp_path, PATH=str(there.parent)).nvcc[0].version == (12, 9)


def test_an_nvcc_that_does_not_run_is_reported_with_the_reason_and_comes_last(tmp_path: Path) -> None:
    put(tmp_path / "usr/local/cuda/bin/nvcc", "#!/bin/sh\necho no licence >&2; exit 1\n", runs=True)
    tools = Toolchain(H200, look(tmp_path), ME)
    with pytest.raises(CaptureUnavailable, match=r"nvcc does not show its version: no licence\.$"):
        tools.nvcc()
    there = nvcc(tmp_path / "opt/cuda/bin/nvcc", "13.0")
    assert Toolchain(H200, look(tmp_path), ME).nvcc().path == there


# What is chosen, and how failures are reported


def chain(driver: Driver = H200, user: Owner = ME, **found: list[Compiler] | list[Part]) -> Toolchain:
    return Toolchain(driver, Parts(**found), user)  # type: ignore[arg-type]


def part(version: tuple[int, int] | None) -> Part:
    return Part((Path("/i"),), Path(f"/{version}.so"), version)


def compiler(major: int, minor: int, *mixed: str) -> Compiler:
    return Compiler(Path("/nvcc"), (major, minor), "", mixed)


@pytest.mark.parametrize(
    ("ask", "hint"),
    [
        (lambda nothing: nothing.gxx(), "apt install g++"),
        (lambda nothing: nothing.nvcc(), "pip install 'tracepipe[gpu]'"),
        (lambda nothing: nothing.part("sanitizer"), "pip install 'tracepipe[gpu]'"),
        (lambda nothing: nothing.part("cupti"), "pip install 'tracepipe[gpu]'"),
    ],
)
def test_missing_parts_are_reported_with_how_to_install_them(
    ask: Callable[[Toolchain], object], hint: str
) -> None:
    with pytest.raises(CaptureUnavailable) as refusal:
        ask(chain())
    assert refusal.value.hint == hint


def test_the_newest_part_that_is_not_newer_than_the_driver_is_taken() -> None:
    tools = chain(cupti=[part((13, 5)), part((13, 0)), part((12, 8))])
    assert tools.part("cupti").version == (13, 0)


def test_without_a_driver_the_newest_part_is_taken() -> None:
    assert chain(NOBODY, cupti=[part((13, 5)), part((13, 0))]).part("cupti").version == (13, 5)


@pytest.mark.parametrize(
    ("cuda", "hint"),
    [
        ((13, 0), "pip install 'nvidia-cuda-cupti==13.0.*'"),
        ((12, 8), "pip install 'nvidia-cuda-cupti-cu12==12.8.*'"),
    ],
)
def test_a_part_newer_than_the_driver_is_reported(cuda: tuple[int, int], hint: str) -> None:
    with pytest.raises(CaptureUnavailable, match=r"for CUDA 13\.5, and the driver") as refusal:
        chain(Driver(cuda), cupti=[part((13, 5))]).part("cupti")
    assert refusal.value.hint == hint


def test_an_nvcc_of_a_newer_minor_version_is_taken() -> None:
    assert chain(nvcc=[compiler(14, 0), compiler(13, 5)]).nvcc().version == (13, 5)


def test_an_nvcc_of_a_newer_major_version_is_reported() -> None:
    with pytest.raises(CaptureUnavailable, match="too new for this driver") as refusal:
        chain(nvcc=[compiler(14, 0)]).nvcc()
    wanted = "'nvidia-cuda-nvcc==13.0.*' 'nvidia-nvvm==13.0.*' 'nvidia-cuda-crt==13.0.*'"
    assert refusal.value.hint == f"pip install {wanted}"


def test_an_nvcc_with_incompatible_packages_is_reported(tmp_path: Path) -> None:
    site = packages_13(tmp_path / "site")
    (site / "nvidia_nvvm-13.0.85.dist-info").rename(site / "nvidia_nvvm-13.5.37.dist-info")
    with pytest.raises(CaptureUnavailable, match=r"nvcc 13\.0 does not work with nvidia-nvvm 13\.5"):
        Toolchain(H200, look(tmp_path, site), ME).nvcc()


def test_an_nvcc_that_fits_is_taken_before_a_newer_one_that_does_not(tmp_path: Path) -> None:
    site = packages_13(tmp_path / "site", "13.2")
    (site / "nvidia_nvvm-13.2.85.dist-info").rename(site / "nvidia_nvvm-13.5.37.dist-info")
    nvcc(tmp_path / "usr/local/cuda/bin/nvcc", "13.0")
    assert Toolchain(H200, look(tmp_path, site), ME).nvcc().version == (13, 0)


def test_a_missing_gpu_is_reported_with_the_drivers_reason() -> None:
    with pytest.raises(CaptureUnavailable, match="cannot open shared object"):
        chain(NOBODY).architectures()


# The driver's answer


def test_the_driver_gives_its_version_and_gpus() -> None:
    numbers = [9, 0, 132, 2048, 32, 65536, 233472, 1024]
    gpus = [["H200", "4717ba2800112233445566778899aabb", *numbers], ["H200", "ff" * 16, *numbers]]
    answer = {"cuda": 13000, "gpus": [*gpus, ["B200", "", 10, 0, 0, 0, 0, 0, 0, 0]], "error": ""}
    answered = driver_of(0, json.dumps(answer).encode(), b"")
    assert answered.cuda == (13, 0)
    assert answered.architectures == ("sm_90", "sm_100")
    uuids = ["GPU-4717ba28-0011-2233-4455-66778899aabb", "GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"]
    limits = {
        "compute_capability": "9.0",
        "max_warps_per_sm": 64,
        "max_blocks_per_sm": 32,
        "registers_per_sm": 65536,
        "shared_bytes_per_sm": 233472,
        "reserved_shared_bytes": 1024,
    }
    assert answered.listed == [
        {"index": 0, "name": "H200", "uuid": uuids[0], "sm_count": 132, **limits},
        {"index": 1, "name": "H200", "uuid": uuids[1], "sm_count": 132, **limits},
        {"index": 2, "name": "B200", "compute_capability": "10.0"},
    ]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
def test_the_child_asks_a_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A libcuda with two GPUs, of 7 and 8 SMs and architecture 9.0, whose UUIDs are 16 times their number."""
    source = put(
        tmp_path / "libcuda.c",
        """
#include <string.h>
int cuDriverGetVersion(int *version) { *version = 12080; return 0; }
int cuInit(unsigned flags) { return flags != 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = index; return 0; }
int cuDeviceGetName(char *name, int bytes, int device) { strncpy(name, "Sim", bytes); return device < 0; }
int cuDeviceGetUuid(char *uuid, int device) { memset(uuid, device, 16); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 16 ? 7 + device : attribute == 39 ? 2048 : 0;
    return 0;
}
""",
    )
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    answered = ask_driver()
    assert (answered.cuda, answered.error, answered.architectures) == ((12, 8), "", ("sm_90",))
    assert answered.listed == [
        {
            "index": index,
            "name": "Sim",
            "uuid": f"GPU-{n * 4}-{n * 2}-{n * 2}-{n * 2}-{n * 6}",
            "sm_count": sms,
            "compute_capability": "9.0",
            "max_warps_per_sm": 64,
        }
        for index, n, sms in ((0, "00", 7), (1, "01", 8))
    ]


@pytest.mark.parametrize(
    ("returncode", "answer", "errors", "message"),
    [
        (-11, b"", b"", "signal 11"),
        (1, b"", b"Traceback\nOSError: no", "OSError: no"),
        (0, b"[]", b"", "did not answer"),
        (0, b'{"cuda":13000,"gpus":[],"error":"cuInit: CUDA_ERROR_NO_DEVICE"}', b"", "CUDA_ERROR_NO_DEVICE"),
    ],
)
def test_the_error_of_a_failing_driver_is_reported(
    returncode: int, answer: bytes, errors: bytes, message: str
) -> None:
    assert message in driver_of(returncode, answer, errors).error


def test_gpus_that_are_hidden_on_purpose_are_not_a_fault() -> None:
    assert Driver((13, 0), error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH").is_broken
    assert not Driver((13, 0), error="cuInit: CUDA_ERROR_NO_DEVICE").is_broken
    assert not Driver((13, 0)).is_broken
    assert not H200.is_broken


# The cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the builds for who runs the tests."""
    if os.geteuid() == 0:
        monkeypatch.setattr("tracepipe.tracer.gpu.build.cache.ROOT_CACHE", tmp_path / "cache")
        return tmp_path / "cache/0"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/tracepipe"


def patches_chain(tmp_path: Path, codes: str = "sm_75 sm_80 sm_90") -> Toolchain:
    """g++ is not run, and nvcc writes its version to the file that is named."""
    made = nvcc(tmp_path / "tools/nvcc", codes=codes)
    tools = [Compiler(made, (13, 0), "nvcc 13.0")]
    return chain(nvcc=tools, gxx=[Compiler(Path("/g++"), (12, 2), "g++ 12.2")], sanitizer=[part((13, 0))])


def test_a_build_is_made_once(tmp_path: Path, cache: Path) -> None:
    source = put(tmp_path / "native/p.cu", "1")
    tools = patches_chain(tmp_path)
    path = tools.build_patches(source, ["sm_90"])
    assert path.parent == cache
    assert path.read_text() == "made by 13.0\n"
    made_ns = path.stat().st_mtime_ns
    assert tools.build_patches(source, ["sm_90"]) == path
    assert path.stat().st_mtime_ns == made_ns
    assert list(cache.iterdir()) == [path]


def test_whatever_decides_the_outcome_makes_another_build(tmp_path: Path, cache: Path) -> None:
    source = put(tmp_path / "native/p.cu", "1")
    tools = patches_chain(tmp_path)
    made = {tools.build_patches(source, ["sm_90"]), tools.build_patches(source, ["sm_80"])}
    put(tmp_path / "native/record.h", "2")
    made.add(tools.build_patches(source, ["sm_90"]))
    put(source, "3")
    made.add(tools.build_patches(source, ["sm_90"]))
    newer = [Compiler(tools.parts.nvcc[0].path, (13, 0), "nvcc 13.0 update 1")]
    made.add(chain(nvcc=newer, gxx=tools.parts.gxx, sanitizer=[part((13, 0))]).build_patches(source))
    blocks = {"FIRST": 0, "LAST": 131}
    made.add(tools.build_patches(source, ["sm_90"], blocks))
    made.add(tools.build_patches(source, ["sm_90"], {**blocks, "LAST": 132}))
    assert len(made) == len(list(cache.iterdir())) == 7


def test_names_for_the_preprocessor_reach_the_compiler(tmp_path: Path, cache: Path) -> None:
    tools = patches_chain(tmp_path)
    lists = 'if [ "$1" = --list-gpu-code ]; then echo sm_90; else echo "$@" >"$(eval echo \\${$#})"; fi'
    put(tools.parts.nvcc[0].path, f"#!/bin/sh\n{lists}\n", runs=True)
    path = tools.build_patches(put(tmp_path / "native/p.cu"), ["sm_90"], {"FIRST": 5, "LAST": 7})
    assert {"-DFIRST=5", "-DLAST=7"} <= set(path.read_text().split())


def test_a_gpu_gets_the_code_of_its_own_architecture_or_the_one_before(tmp_path: Path, cache: Path) -> None:
    source = put(tmp_path / "native/p.cu", "1")
    tools = patches_chain(tmp_path, "sm_80 sm_86 sm_90")
    assert tools.build_patches(source, ["sm_87"]) == tools.build_patches(source, ["sm_86"])
    for wish, message in {
        "sm_75": "generates no code for sm_75",
        "sm_120": "sm_120",
        "hopper": "not a GPU architecture",
    }.items():
        with pytest.raises(CaptureUnavailable, match=message):
            tools.build_patches(source, [wish])


def test_an_nvcc_that_lists_no_architectures_is_reported_with_the_reason(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools = patches_chain(tmp_path)
    fatal = "nvcc fatal   : Could not open output file '/nowhere/tmpxft_1'"
    put(tools.parts.nvcc[0].path, f'#!/bin/sh\necho "{fatal}" >&2; exit 1\n', runs=True)
    source = put(tmp_path / "native/p.cu", "1")
    with pytest.raises(CaptureUnavailable, match=r"does not list the GPUs .*: nvcc fatal   : Could not open"):
        tools.build_patches(source, ["sm_90"])
    monkeypatch.setenv("TMPDIR", "/nowhere")
    with pytest.raises(CaptureUnavailable) as refusal:
        tools.build_patches(source, ["sm_90"])
    assert refusal.value.hint == "Set TMPDIR to a writable folder, which /nowhere is not."


@pytest.mark.parametrize("why", ["No space left on device", "Disk quota exceeded"])
def test_a_compiler_on_a_full_disk_is_reported_with_the_folder(
    why: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    bad = put(tmp_path / "g++", f"#!/bin/sh\necho one >&2; echo 'error: x.s: {why}' >&2; exit 1\n", runs=True)
    with pytest.raises(CaptureUnavailable, match=f"as the disk is full: error: x.s: {why}") as refusal:
        chain(gxx=[Compiler(bad, (12, 2), "")]).build_host(put(tmp_path / "a.cpp"))
    room, errors = (
        f"Free some space in {tmp_path}, or set TMPDIR to a folder with free space.",
        f"one | error: x.s: {why}",
    )
    assert refusal.value.hint == f"{room} Its output: {errors}"


def test_a_failing_compiler_is_reported_with_its_error(tmp_path: Path, cache: Path) -> None:
    bad = put(
        tmp_path / "g++",
        "#!/bin/sh\necho 'In file x'>&2; echo 'a.cpp:1: error: no such thing.'>&2; exit 1\n",
        runs=True,
    )
    source = put(tmp_path / "a.cpp")
    with pytest.raises(
        CaptureUnavailable, match=r"a could not be built: a\.cpp:1: error: no such thing\.$"
    ) as no:
        chain(gxx=[Compiler(bad, (12, 2), "")]).build_host(source)
    assert no.value.hint.startswith(f"Run it to see why: {bad} ")
    assert no.value.hint.endswith("Its output: In file x | a.cpp:1: error: no such thing.")
    assert list(cache.iterdir()) == []
