"""The shipped sets: that they load, whom they name, and that CUDA's headers agree with their signatures."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tracepipe.hooks.hook import Hook
from tracepipe.hooks.names import HookIndex
from tracepipe.hooks.sets import HookSet, load_set, shipped_sets
from tracepipe.hooks.slots import MAX_SLOTS, slots

SETS = ("context-switch", "cublas", "cuda-driver", "cuda-runtime", "nccl", "nvidia-kmod")
# A toolkit's, or those of the packages that the test extra brings.
_FOLDERS = [
    *sorted(Path("/usr/local").glob("cuda*/include")),
    *(Path(folder, "nvidia/cu13/include") for folder in sys.path),
]
_INCLUDE = next(
    (folder for folder in _FOLDERS if (folder / "cuda.h").exists() and (folder / "cuda_runtime.h").exists()),
    None,
)
needs_cuda_headers = pytest.mark.skipif(
    _INCLUDE is None or shutil.which("gcc") is None,
    reason="no CUDA headers under /usr/local/cuda*/include or of PyPI, or no gcc",
)

# Prototypes as the preprocessor leaves them, one for each ABI version and default stream.
_PROTOTYPE = re.compile(r"\b((?:__)?cu(?:da)?[A-Z]\w*)\s*\(([^(){};]*)\)\s*;")
_PARAMETER = re.compile(r"^(.*?[\s*])(\w+)?$")
_WORDS_OF = {"dim3": 2}
# Structures by value of more than 16 bytes stand on the stack on x86-64 and behind a pointer on aarch64.
_BIG = re.compile(r"^(struct )?(cudaExtent|cudaPitchedPtr|CUipcMemHandle|CUipcEventHandle|cudaIpc\w+) ?$")


@cache
def _set(name: str) -> HookSet:
    return load_set(name)


def _found(name: str, symbol: str, target: str = "") -> Hook | None:
    hooks = [hook for hook in _set(name).hooks if target in ("", hook.target)]
    return HookIndex(hooks, _set(name).variants).find(symbol)


def test_these_sets_are_shipped() -> None:
    assert set(SETS) <= set(shipped_sets())


@pytest.mark.parametrize("name", SETS)
def test_a_set_states_what_it_is_and_where_its_names_come_from(name: str) -> None:
    hooks = _set(name)
    assert 20 < len(hooks.about) < 120
    assert "https://" in hooks.source
    assert hooks.hooks


@pytest.mark.parametrize("name", SETS)
def test_every_signature_fits_into_a_record(name: str) -> None:
    for hook in _set(name).hooks:
        assert len(slots(hook.signature)) <= MAX_SLOTS, hook.origin


@pytest.mark.parametrize("name", SETS)
def test_no_hook_stands_behind_one_that_takes_all_of_its_symbols(name: str) -> None:
    hooks = _set(name).hooks
    for hook in hooks:
        if not re.search(r"[*?[]", hook.pattern):
            one_target = [other for other in hooks if other.target == hook.target]
            if hook.target == "uprobe":
                one_target = [other for other in one_target if other.library == hook.library]
            assert HookIndex(one_target, _set(name).variants).find(hook.pattern) is hook, hook.origin


@pytest.mark.parametrize(
    ("symbol", "pattern"),
    [
        ("cuMemAlloc_v2", "cuMemAlloc"),
        ("cuMemcpyHtoD_v2_ptds", "cuMemcpyHtoD"),
        ("cuLaunchKernel_ptsz", "cuLaunchKernel"),
        ("cuLaunchKernelEx", "cuLaunchKernelEx"),
        ("cuCtxCreate_v2", "cuCtxCreate"),
        ("cuCtxCreate_v4", "cuCtxCreate_v4"),
        ("cuMemPrefetchAsync_ptsz", "cuMemPrefetchAsync"),
        ("cuMemPrefetchAsync_v2_ptsz", "cuMemPrefetchAsync_v2"),
        ("cuSomethingOfCuda14", "cu[A-Z]*"),
    ],
)
def test_versions_of_a_driver_function_have_the_signature_of_their_arguments(
    symbol: str, pattern: str
) -> None:
    hook = _found("cuda-driver", symbol)
    assert hook is not None
    assert (hook.pattern, hook.signature.result) == (pattern, "CUresult")


def test_the_driver_set_takes_nothing_but_the_driver_api() -> None:
    assert [_found("cuda-driver", symbol) for symbol in ("cudaMalloc", "cudbgMain", "curl_easy_init")] == [
        None,
        None,
        None,
    ]


def test_the_runtimes_kernels_are_named_when_they_are_registered() -> None:
    hook = _found("cuda-runtime", "__cudaRegisterFunction")
    assert hook is not None
    assert hook.effect == "name"
    assert {argument.name: argument.position for argument in hook.signature.arguments} == {
        "handle": 1,
        "symbol": 3,
    }


@pytest.mark.parametrize(
    ("name", "symbol", "arguments", "effect"),
    [
        ("cuda-runtime", "__cudaGetKernel", ["handle out", "function"], "name"),
        ("cuda-driver", "cuKernelGetFunction", ["handle out", "function"], "name"),
        ("cuda-runtime", "cudaGetDevice", ["device out"], ""),
        ("cuda-driver", "cuCtxGetDevice", ["device out"], ""),
        ("nvidia-kmod", "nv_mem_alloc", ["size_bytes"], ""),
        ("nvidia-kmod", "nv_mem_free", [], ""),
    ],
)
def test_what_is_recorded_of_some_functions(
    name: str, symbol: str, arguments: list[str], effect: str
) -> None:
    hook = _found(name, symbol, "kprobe" if name == "nvidia-kmod" else "uprobe")
    assert hook is not None
    assert [one.name + " out" * one.out for one in hook.signature.arguments] == arguments
    assert hook.effect == effect


def test_a_dim3_takes_two_words() -> None:
    hook = _found("cuda-runtime", "cudaLaunchKernel_ptsz")
    assert hook is not None
    assert {argument.name: argument.position for argument in hook.signature.arguments} == {
        "function": 0,
        "grid": 1,
        "block": 3,
        "shared_bytes": 6,
        "stream": 7,
    }


def test_names_of_values() -> None:
    assert _set("cuda-driver").values["CUresult"][908] == "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD"
    assert _set("cuda-runtime").values["cudaError_t"][999] == "cudaErrorUnknown"
    assert _set("cuda-runtime").values["cudaMemcpyKind"] == {
        0: "HtoH",
        1: "HtoD",
        2: "DtoH",
        3: "DtoD",
        4: "default",
    }
    assert _set("nvidia-kmod").values["errno"][-25] == "ENOTTY"
    assert _set("nvidia-kmod").values["NV_STATUS"][0x51] == "NV_ERR_NO_MEMORY"
    assert _set("nccl").values["ncclDataType_t"][9] == "ncclBfloat16"
    assert _set("cublas").values["cudaDataType_t"][14] == "CUDA_R_16BF"


@pytest.mark.parametrize(
    ("symbol", "layer"),
    [
        ("nvidia_unlocked_ioctl", "kernel"),
        ("nvidia_ioctl", "kernel"),
        ("nv_ioctl_dispatcher", "kernel"),
        ("nv_drm_get_dev_info_ioctl", "kernel"),
        ("uvm_unlocked_ioctl_entry", "kernel"),
        ("nv_mem_alloc", "kernel"),
        ("nv_mem_access_ok", "kernel"),
        ("nv_dma_map_alloc", "kernel"),
        ("nv_dma_unmap_scatterlist", "kernel"),
        ("os_alloc_mem", "kernel"),
        ("nv_schedule_work", "scheduler"),
        ("nv_schedule_uvm_isr", "scheduler"),
        ("nv_gpu_scheduler_schedule", "scheduler"),
        ("nv_kthread_q_schedule_q_item", "scheduler"),
        ("nv_kthread_q_item_init", "scheduler"),
        ("nv_dma_exec_command", "kernel"),
        ("nvidia_isr_kthread_bh", "kernel"),
        ("nv_post_event", "kernel"),
    ],
)
def test_functions_that_tracers_of_the_driver_know_are_in_its_set(symbol: str, layer: str) -> None:
    hook = _found("nvidia-kmod", symbol)
    assert hook is not None
    assert hook.layer == layer
    assert "nvidia" in hook.modules


def test_no_pointer_of_the_kernel_is_recorded() -> None:
    for name in ("nvidia-kmod", "context-switch"):
        for hook in _set(name).hooks:
            assert all(argument.kind != "ptr" for argument in hook.signature.arguments), hook.origin


def test_context_switches_are_seen_in_the_driver_in_fences_and_in_interrupts() -> None:
    for symbol in ("nv_create_context", "nv_destroy_context", "nv_bind_context_dma", "nv_gr_ctx_switch"):
        assert _found("context-switch", symbol, "kprobe") is not None, symbol
    fence = _found("context-switch", "dma_fence:dma_fence_signaled", "tracepoint")
    assert fence is not None
    assert fence.everywhere
    assert [argument.name for argument in fence.signature.arguments] == ["driver", "context", "seqno"]
    interrupt = _found("context-switch", "irq:irq_handler_entry", "tracepoint")
    assert interrupt is not None
    assert (interrupt.name, interrupt.layer, interrupt.everywhere) == ("gpu_complete", "scheduler", True)
    assert interrupt.condition is not None


@pytest.mark.parametrize(
    ("symbol", "arguments"),
    [
        ("ncclAllReduce", ["send", "receive", "count", "datatype", "op", "comm", "stream"]),
        ("ncclCommInitRank", ["comm", "ranks", "id", "rank"]),
        ("ncclCommSplit", ["parent", "color", "key", "comm"]),
        ("ncclAllReduceConfig", ["send", "receive", "count", "datatype", "op", "comm", "stream"]),
        ("ncclCommInitRankConfig", ["comm", "ranks", "id", "rank"]),
        ("ncclGroupEnd", []),
        ("ncclSomethingNew", []),
    ],
)
def test_nccl(symbol: str, arguments: list[str]) -> None:
    hook = _found("nccl", symbol)
    assert hook is not None
    assert [argument.name for argument in hook.signature.arguments] == arguments
    assert hook.signature.result == "ncclResult_t"


@pytest.mark.parametrize(
    ("symbol", "shape", "result"),
    [
        ("cublasSgemm_v2", ["i32"] * 3, "cublasStatus_t"),
        ("cublasSgemm_v2_64", ["i64"] * 3, "cublasStatus_t"),
        ("cublasGemmStridedBatchedEx", ["i32"] * 3, "cublasStatus_t"),
        ("cublasSgemm", [], "cublasStatus_t"),  # the older interface's: nothing is known of its arguments
        ("cublasSdot", [], ""),
        ("cublasSdot_v2", [], "cublasStatus_t"),
    ],
)
def test_cublas(symbol: str, shape: list[str], result: str) -> None:
    hook = _found("cublas", symbol)
    assert hook is not None
    kinds = [argument.kind for argument in hook.signature.arguments if argument.name in ("m", "n", "k")]
    assert (kinds, hook.signature.result) == (shape, result)


@needs_cuda_headers
@pytest.mark.parametrize(
    ("name", "header", "at_least"), [("cuda-driver", "cuda.h", 550), ("cuda-runtime", "cuda_runtime.h", 330)]
)
def test_signatures_fit_cudas_headers(name: str, header: str, at_least: int) -> None:
    prototypes = _prototypes(header)
    assert len(prototypes) >= at_least
    sizes = _sizes(header, {kind for words in prototypes.values() for kind in words if kind})
    wrong = []
    for symbol, words in prototypes.items():
        hook = _found(name, symbol)
        if hook is None or _is_of_32_bits(symbol, prototypes):
            continue
        for argument in hook.signature.arguments:
            kind = words[argument.position] if argument.position < len(words) else ""
            size, pointee = sizes.get(kind, (0, 0))
            if argument.kind == "dim3":
                fits = kind == "dim3"
            elif argument.out:
                fits = pointee * 8 == argument.bits
            elif argument.kind == "str":
                fits = kind.replace(" ", "") == "constchar*"
            else:
                fits = size * 8 == argument.bits
            if not fits:
                wrong.append(f"{symbol}: {argument} is {kind or 'nothing'}")
    assert not wrong, "\n".join(wrong)


@needs_cuda_headers
def test_literal_names_are_functions_of_cudas_headers() -> None:
    known = set(_prototypes("cuda.h")) | set(_prototypes("cuda_runtime.h"))
    unknown = [
        hook.pattern
        for name in ("cuda-driver", "cuda-runtime")
        for hook in _set(name).hooks
        # Those with underscores are between nvcc and its runtime, and stand in headers for nvcc alone.
        if "*" not in hook.pattern and not hook.pattern.startswith("__") and hook.pattern not in known
    ]
    assert unknown == []


def _prototypes(header: str) -> dict[str, list[str]]:
    """Function → the C types of its machine words, of all forms of the header; "" for half a dim3."""
    found: dict[str, list[str]] = {}
    for options in ([], ["-DCUDA_API_PER_THREAD_DEFAULT_STREAM"], ["-D__CUDA_API_VERSION_INTERNAL"]):
        if header != "cuda.h" and options == ["-D__CUDA_API_VERSION_INTERNAL"]:
            continue
        text = _run(["gcc", "-E", "-P", "-x", "c++", *options, f"-I{_INCLUDE}", "-"], f"#include <{header}>")
        for symbol, parameters in _PROTOTYPE.findall(" ".join(text.split())):
            words: list[str] = []
            for parameter in parameters.split(","):
                match = _PARAMETER.match(parameter.split("=")[0].strip())
                kind = " ".join(match[1].split()) if match else ""
                if not kind or _BIG.match(kind):
                    break  # void, or what stands behind it is in other places on other machines
                words += [kind] if kind not in _WORDS_OF else [kind, ""]
            found.setdefault(symbol, words)
    return found


def _is_of_32_bits(symbol: str, prototypes: dict[str, list[str]]) -> bool:
    """Whether it is a function of CUDA 3.1, whose addresses and sizes had 32 bits: all its _v2 differs in."""

    def wide(words: list[str]) -> list[str]:
        return [word.replace("_v1", "").replace("unsigned int", "size_t") for word in words]

    newer = prototypes.get(f"{symbol}_v2")
    return newer is not None and wide(newer) == wide(prototypes[symbol])


def _sizes(header: str, kinds: set[str]) -> dict[str, tuple[int, int]]:
    """C type → its size and that of what it points to, bytes, as the compiler says."""
    lines = []
    for kind in sorted(kinds):
        target = kind[: kind.rindex("*")].strip() if kind.endswith("*") else ""
        pointee = f"sizeof({target})" if target and target.replace("const", "").strip() != "void" else "0"
        lines.append(f'printf("%zu %zu %s\\n", sizeof({kind}), (size_t)({pointee}), "{kind}");')
    program = f"#include <{header}>\n#include <cstdio>\nint main() {{ {' '.join(lines)} return 0; }}"
    with tempfile.TemporaryDirectory() as folder:
        binary = f"{folder}/sizes"
        # With it cuda.h has the types of old versions too.
        options = ["-w", "-D__CUDA_API_VERSION_INTERNAL", f"-I{_INCLUDE}", "-o", binary]
        _run(["g++", "-x", "c++", *options, "-"], program)
        rows = [line.split(" ", 2) for line in _run([binary], "").splitlines()]
    return {kind: (int(size), int(pointee)) for size, pointee, kind in rows}


def _run(command: list[str], text: str) -> str:
    return subprocess.run(command, input=text, capture_output=True, text=True, check=True).stdout
