"""What `--gpu auto` takes for which command, what it says, and what becomes of an engine that cannot work."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tracepipe.errors import CaptureUnavailable, TracepipeError
from tracepipe.tracer import CaptureRequest
from tracepipe.tracer.gpu import GPU_ENGINES, _engine, choice, start
from tracepipe.tracer.gpu.build.driver import Driver, Gpu, Owner
from tracepipe.tracer.gpu.build.toolchain import Parts, Toolchain
from tracepipe.tracer.gpu.choice import Choice, choose, has_thread_exits, launcher_of
from tracepipe.tracer.gpu.engines.kernels import KernelStream
from tracepipe.tracer.request import AUTO_WARPS, Filters, Last, Limits

H200 = Driver((13, 0), (Gpu("NVIDIA H200", "sm_90", "GPU-a", 132),))


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Makes programs in a folder that is the only one of $PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))

    def make(name: str, first_line: str = "\x7fELF") -> str:
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{first_line}\n")
        path.chmod(0o755)
        return str(path)

    for name in ("vec_add", "python3", "bash", "env", "timeout", "nice"):
        make(name)
    return make


# What a command is


@pytest.mark.parametrize(
    ("command", "launcher"),
    [
        (["vec_add"], ""),
        (["vec_add", "python3"], ""),
        (["python3", "train.py"], "python3"),
        (["bash", "-c", "./vec_add"], "bash"),
        (["env", "FOO=1", "-u", "BAR", "python3", "-m", "train"], "python3"),
        (["env", "timeout", "-k", "5", "10", "nice", "-n", "3", "python3"], "python3"),
        (["timeout", "10", "vec_add", "python3"], ""),
        (["env"], ""),
        (["env", "-i", "no-such-program"], ""),
    ],
)
def test_interpreters_are_found_behind_what_starts_them(
    programs: Callable[..., str], command: list[str], launcher: str
) -> None:
    assert launcher_of(command) == launcher


@pytest.mark.parametrize(
    ("first_line", "is_launcher"),
    [
        ("#!/opt/venv/bin/python3.12", True),
        ("#!/usr/bin/env python3", True),
        ("#!/usr/bin/env -S python3 -u", True),
        ("#!/bin/sh", True),
        ("#!/opt/bin/vec_add", False),
        ("#!", False),
        ("\x7fELF", False),
    ],
)
def test_a_script_is_what_interprets_it(
    programs: Callable[..., str], first_line: str, is_launcher: bool
) -> None:
    programs("train", first_line)
    assert launcher_of(["train"]) == ("train" if is_launcher else "")


@pytest.mark.parametrize(
    "name",
    ["torchrun", "accelerate", "deepspeed", "mpirun.openmpi", "srun", "jupyter-lab", "python3.13t", "pypy3"],
)
def test_launchers_are_known_by_name(programs: Callable[..., str], name: str) -> None:
    assert launcher_of([programs(name)]) == name


@pytest.mark.parametrize("name", ["ray-tracer", "sha", "pythonista", "python_kernels", "maker"])
def test_names_that_only_begin_so_are_programs(programs: Callable[..., str], name: str) -> None:
    assert launcher_of([programs(name)]) == ""


def test_a_link_is_taken_for_its_target(programs: Callable[..., str], tmp_path: Path) -> None:
    programs("real/python3.12")
    (tmp_path / "trainer").symlink_to(tmp_path / "real/python3.12")
    assert launcher_of(["trainer"]) == "trainer"


def test_a_command_that_is_not_a_program_is_an_error(programs: Callable[..., str]) -> None:
    with pytest.raises(TracepipeError, match="no program nothing"):
        launcher_of(["nothing"])


# The rule


def chosen(request: CaptureRequest, *, has_device: bool = True, **environment: str) -> Choice:
    return choose(request, environment, has_device=has_device)


def request(*command: str, **options: Any) -> CaptureRequest:
    return CaptureRequest(list(command), gpu="auto", **options)


def test_without_a_gpu_nothing_is_reported(programs: Callable[..., str]) -> None:
    assert chosen(request("vec_add"), has_device=False) == Choice("off")
    assert chosen(request("python3"), has_device=False, CUDA_INJECTION64_PATH="/x.so") == Choice("off")
    assert chosen(CaptureRequest(pids=(4,), gpu="auto")) == Choice("off")


def test_a_selection_without_a_gpu_is_reported(programs: Callable[..., str]) -> None:
    found = chosen(request("vec_add", gpu_kernels="x", gpu_warps=5), has_device=False)
    assert found == Choice(
        "off", "this machine has no NVIDIA GPU, so --kernel and --gpu-warps selects nothing"
    )


def test_the_users_own_injection_stays(programs: Callable[..., str]) -> None:
    found = chosen(request("vec_add", gpu_kernels="x"), CUDA_INJECTION64_PATH="/x.so")
    assert (found.engine, found.why) == ("off", "CUDA_INJECTION64_PATH is set")


@pytest.mark.parametrize(
    ("option", "value", "name"),
    [
        ("gpu_kernels", "attn", "--kernel"),
        ("gpu_launches", "3", "--launches"),
        ("gpu_launches_per_kernel", 0, "--launches-per-kernel"),
        ("gpu_blocks", "0", "--blocks"),
        ("gpu_memory_bytes", 1 << 20, "--gpu-memory"),
        ("gpu_warps", 5, "--gpu-warps"),
        ("gpu_thread_exits", True, "--thread-exits"),
        ("gpu_warp_marks", "attn:softmax", "--warp-marks"),
    ],
)
def test_a_selection_means_warps(programs: Callable[..., str], option: str, value: Any, name: str) -> None:
    assert chosen(request("python3", only=("cu*",), **{option: value})) == Choice("warps", f"by {name}")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"layers": ("syscall",)}, "--layers leaves out userspace"),
        ({"layers": ()}, "--layers leaves out userspace"),
        ({"only": ("cu*",)}, "--only need probes"),
        ({"exclude": ("cu*",), "libraries": ("/l.so",)}, "--exclude and --library need probes"),
        ({"filters": Filters(min_duration_ns=5)}, "--min-duration need probes"),
        ({"filters": Filters(sample=2)}, "--sample need probes"),
    ],
)
def test_what_only_probes_can_give_leaves_them_the_calls(
    programs: Callable[..., str], options: dict[str, Any], why: str
) -> None:
    found = chosen(request("vec_add", **options))
    assert (found.engine, found.why) == ("off", why)


def test_a_short_run_means_warps(programs: Callable[..., str]) -> None:
    assert chosen(request("python3", limits=Limits(10**10))).engine == "warps"
    assert chosen(request("python3", limits=Limits(10**10 + 1))).engine == "kernels"


def test_an_interpreter_means_kernels_and_another_program_warps(programs: Callable[..., str]) -> None:
    found = chosen(request("env", "python3", "train.py"))
    assert found == Choice("kernels", "python3 may start a long run", "--gpu warps records every warp")
    found = chosen(request("vec_add"))
    assert found == Choice("warps", "every warp of vec_add", "--gpu kernels costs next to nothing")


def test_auto_takes_what_costs_little_for_a_flight_recorder() -> None:
    found = chosen(request("vec_add", last=Last(10**9)))
    assert found == Choice("kernels", "for a flight recorder that stays on", "--gpu warps records every warp")


# What is made of it


class Machine:
    """A machine with a GPU, on which some of the engines can be made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.driver, self.refusals, self.messages = H200, dict[str, str](), list[str]()
        self.started = list[CaptureRequest]()
        self.children = 0
        self.node = folder / "nvidiactl"
        self.node.touch()
        monkeypatch.setattr(choice, "CONTROL_DEVICE", self.node)
        monkeypatch.setattr("tracepipe.tracer.gpu.build.toolchain.this_toolchain", self.toolchain)
        monkeypatch.delenv("CUDA_INJECTION64_PATH", raising=False)
        for name in ("kernels", "warps"):
            monkeypatch.setitem(GPU_ENGINES, name, self.maker(name))

    def toolchain(self) -> Toolchain:
        self.children += 1
        return Toolchain(self.driver, Parts(), Owner(os.geteuid(), os.getegid(), Path("/nowhere")))

    def maker(self, name: str) -> Any:
        def make(request: CaptureRequest, toolchain: Toolchain) -> Any:
            if name in self.refusals:
                raise CaptureUnavailable(f"No {name} here.", self.refusals[name])
            self.started.append(request)
            return name

        return make

    def start(self, request: CaptureRequest) -> tuple[CaptureRequest, Any]:
        return start(request, self.messages.append)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, programs: Callable[..., str], tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


def test_the_log_of_what_is_compiled_is_read_for_stacks_of_a_command(machine: Machine) -> None:
    def names(asked: CaptureRequest) -> list[str]:
        made = _engine(asked, machine.toolchain(), KernelStream(Path("kernels.so")))
        made.close()
        return [stream.name for stream in made.streams]

    asked = replace(request("vec_add"), gpu="kernels")
    assert names(asked) == ["cupti", "torch.compile"]
    assert names(replace(asked, stacks="off")) == ["cupti"]
    assert names(replace(asked, gpu="off")) == ["cupti"], "stall reasons alone"
    assert names(replace(asked, command=[], pids=(1,))) == ["cupti"], "it runs already"


def test_the_engine_is_started_with_a_budget_and_reported(machine: Machine) -> None:
    became, device = machine.start(request("vec_add"))
    assert device == "warps"
    assert machine.started == [became]
    assert (became.gpu, became.gpu_warps, became.gpu_launches_per_kernel) == ("warps", AUTO_WARPS, 3)
    assert machine.messages == [
        "gpu warps: every warp of vec_add, for the first 3 launches of each kernel, up to 2000000 warps; "
        "--gpu kernels costs next to nothing"
    ]


@pytest.mark.parametrize(
    ("options", "launches"),
    [
        ({}, 3),
        ({"gpu_warps": 9}, 3),
        ({"gpu_kernels": "attn"}, 3),
        ({"gpu_launches": "10-20"}, None),
        ({"gpu_launches_per_kernel": 0}, 0),
        ({"gpu_launches": "10-", "gpu_launches_per_kernel": 5}, 5),
        ({"gpu": "warps"}, None),
        ({"gpu": "warps", "gpu_warps": 9}, 3),
    ],
)
def test_a_budget_is_for_the_first_launches_of_each_kernel(
    machine: Machine, options: dict[str, Any], launches: int | None
) -> None:
    """Unless the request says which."""
    became, device = machine.start(CaptureRequest(["vec_add"], **{"gpu": "auto", **options}))
    assert (device, became.gpu_launches_per_kernel) == ("warps", launches)


def test_kernels_have_no_budget(machine: Machine) -> None:
    became, device = machine.start(request("python3"))
    assert (device, became.gpu, became.gpu_warps) == ("kernels", "kernels", None)
    assert machine.messages == ["gpu kernels: python3 may start a long run; --gpu warps records every warp"]


def test_marks_that_the_engine_does_not_record_are_reported(
    machine: Machine, programs: Callable[..., str]
) -> None:
    # As nvcc names the variable of the header to CUDA's runtime.
    programs("marked", "\x7fELF _ZN14tracepipe_mark15tracepipe_marksILi1EEE")
    note = "the program has marks in its kernels: --gpu warps records them"
    for program, gpu, is_noted in (
        ("marked", "kernels", True),
        ("marked", "warps", False),
        ("vec_add", "kernels", False),
    ):
        machine.messages.clear()
        machine.start(CaptureRequest([program], gpu=gpu))
        assert (note in machine.messages) == is_noted


def test_threads_have_a_smaller_budget_and_a_layer_of_their_own(machine: Machine) -> None:
    became, _ = machine.start(request("vec_add", gpu_thread_exits=True))
    assert became.gpu_warps == AUTO_WARPS // 32
    assert has_thread_exits(became)
    assert has_thread_exits(request("vec_add", layers=("gpu_thread",)))
    assert not has_thread_exits(request("vec_add", layers=("gpu_warp",)))


def test_a_budget_that_the_user_sets_is_kept(machine: Machine) -> None:
    became, _ = machine.start(request("vec_add", gpu_warps=7))
    assert became.gpu_warps == 7
    assert machine.messages == [
        "gpu warps: by --gpu-warps, for the first 3 launches of each kernel, up to 7 warps"
    ]


def test_warps_that_are_asked_for_have_no_budget_and_no_message(machine: Machine) -> None:
    asked = CaptureRequest(["vec_add"], gpu="warps")
    assert machine.start(asked) == (asked, "warps")
    assert machine.messages == []


def test_without_the_device_no_process_is_started_and_nothing_is_reported(machine: Machine) -> None:
    machine.node.unlink()
    assert machine.start(request("vec_add")) == (CaptureRequest(["vec_add"], gpu="off"), None)
    assert (machine.children, machine.messages) == (0, [])


def test_a_driver_without_gpus_is_silent_and_one_that_fails_is_not(machine: Machine) -> None:
    machine.driver = Driver((13, 0), error="cuInit: CUDA_ERROR_NO_DEVICE")
    assert machine.start(request("vec_add"))[1] is None
    assert machine.messages == []
    assert machine.start(request("vec_add", gpu_blocks="5"))[1] is None
    assert machine.messages == [
        "gpu off: CUDA sees no GPU: cuInit: CUDA_ERROR_NO_DEVICE; nvidia-smi shows more"
    ]
    machine.driver = Driver((13, 0), error="cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")
    assert machine.start(request("vec_add"))[1] is None
    assert machine.messages[1:] == [
        "gpu off: CUDA sees no GPU: cuInit: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH; nvidia-smi shows more"
    ]


def test_the_users_injection_is_left_alone_and_reported(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_INJECTION64_PATH", "/x.so")
    assert machine.start(request("vec_add"))[1] is None
    assert machine.messages == [
        "gpu off: CUDA_INJECTION64_PATH is set; --gpu kernels or warps loads tracepipe's library instead"
    ]
    assert machine.start(CaptureRequest(["vec_add"], gpu="kernels"))[1] == "kernels"
    assert machine.messages[1:] == [
        "CUDA_INJECTION64_PATH is set: tracepipe's library is loaded instead of the one that it names"
    ]


def test_the_other_engine_is_taken_where_one_cannot_work(machine: Machine) -> None:
    machine.refusals = {"warps": "apt install nvcc"}
    became, device = machine.start(request("vec_add", gpu_kernels="attn", gpu_memory_bytes=1 << 20))
    assert device == "kernels"
    assert became == CaptureRequest(["vec_add"], gpu="kernels")
    assert machine.messages == [
        "gpu warps: not available: No warps here. apt install nvcc",
        "gpu kernels: as warps is not available, and without --kernel and --gpu-memory",
    ]
    machine.refusals = {"kernels": "apt install cupti"}
    became, device = machine.start(request("python3"))
    assert (device, became.gpu_warps) == ("warps", AUTO_WARPS)
    assert machine.messages[2:] == [
        "gpu kernels: not available: No kernels here. apt install cupti",
        "gpu warps: as kernels is not available, "
        "for the first 3 launches of each kernel, up to 2000000 warps",
    ]


def test_no_engine_is_chosen_where_neither_can_work(machine: Machine) -> None:
    machine.refusals = {"kernels": "k", "warps": "w"}
    assert machine.start(request("vec_add")) == (CaptureRequest(["vec_add"], gpu="off"), None)
    assert machine.messages == [
        "gpu warps: not available: No warps here. w",
        "gpu kernels: not available: No kernels here. k",
        "gpu off: neither engine is available",
    ]
    assert machine.children == 1


def test_an_engine_that_the_user_chose_is_not_replaced_where_it_fails(machine: Machine) -> None:
    machine.refusals = {"warps": "apt install nvcc"}
    with pytest.raises(CaptureUnavailable, match="No warps here"):
        machine.start(CaptureRequest(["vec_add"], gpu="warps"))


@pytest.mark.parametrize("engine", ["kernels", "warps"])
def test_an_engine_that_was_named_fails_where_cuda_sees_no_gpu(machine: Machine, engine: str) -> None:
    machine.driver = Driver(error="libcuda.so.1: cannot open shared object file")
    with pytest.raises(CaptureUnavailable, match=r"CUDA sees no GPU: libcuda.so.1: cannot open") as refusal:
        machine.start(CaptureRequest(["vec_add"], gpu=engine))
    assert "nvidia-smi" in refusal.value.hint
    assert machine.started == []


@pytest.mark.parametrize(
    ("layers", "options", "engine"),
    [
        (("gpu_kernel",), {}, "kernels"),
        (("gpu_warp",), {}, "warps"),
        (("gpu_thread",), {}, "warps"),
        (("userspace", "gpu_kernel", "gpu_warp"), {}, "warps"),
        (("gpu_kernel",), {"gpu_kernels": "attn"}, "warps"),
        (("gpu_kernel",), {"gpu": "warps"}, "warps"),
    ],
)
def test_a_layer_of_gpus_names_the_engine(
    machine: Machine, layers: tuple[str, ...], options: dict[str, Any], engine: str
) -> None:
    asked = CaptureRequest(["vec_add"], layers, **{"gpu": "auto", **options})
    became, device = machine.start(asked)
    assert (became.gpu, device, became.gpu_warps) == (engine, engine, None)
    assert machine.messages == []
    machine.refusals = {engine: "apt install it"}
    with pytest.raises(CaptureUnavailable, match=f"No {engine} here"):
        machine.start(asked)


@pytest.mark.parametrize(
    ("gpu", "layer", "hint"),
    [
        ("off", "gpu_kernel", "Use --gpu kernels."),
        ("off", "gpu_warp", "Use --gpu warps."),
        ("kernels", "gpu_warp", "Use --gpu warps."),
        ("kernels", "gpu_thread", "Use --gpu warps."),
    ],
)
def test_a_layer_that_the_named_engine_does_not_record_is_an_error(
    machine: Machine, gpu: str, layer: str, hint: str
) -> None:
    with pytest.raises(TracepipeError, match=f"--gpu {gpu} does not record {layer}") as refusal:
        machine.start(CaptureRequest(["vec_add"], ("userspace", layer), gpu=gpu))
    assert refusal.value.hint == hint


def test_a_layer_of_gpus_needs_a_command(machine: Machine) -> None:
    with pytest.raises(TracepipeError, match="for a command, or for processes given by number"):
        machine.start(CaptureRequest(system=True, layers=("gpu_kernel",), gpu="auto"))


def test_the_library_for_a_running_process_is_built_by_its_user(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def toolchain_for(user: Owner) -> Toolchain:
        made.append((user.uid, user.gid))
        return machine.toolchain()

    monkeypatch.setattr("tracepipe.tracer.gpu.build.toolchain.toolchain_for", toolchain_for)
    became, device = machine.start(CaptureRequest(pids=(os.getpid(),), gpu="kernels"))
    assert (became.gpu, device, made) == ("kernels", "kernels", [(os.geteuid(), os.getegid())])
    with pytest.raises(TracepipeError, match="No such process"):
        machine.start(CaptureRequest(pids=(1 << 30,), gpu="kernels"))


@pytest.mark.parametrize("gpu", ["kernels", "off"])
def test_a_selection_is_for_warps(machine: Machine, gpu: str) -> None:
    with pytest.raises(TracepipeError, match=f"--gpu {gpu} .* --blocks") as refusal:
        machine.start(CaptureRequest(["vec_add"], gpu=gpu, gpu_blocks="0-5"))
    assert refusal.value.hint == "Use --blocks with --gpu warps."


def test_options_that_auto_cannot_use_are_refused_before_it_searches(machine: Machine) -> None:
    with pytest.raises(TracepipeError, match="not a range of blocks"):
        machine.start(request("vec_add", gpu_blocks="5-1"))
    assert machine.children == 0


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"gpu": "warps"}, "together with --gpu warps"),
        ({"gpu_kernels": "f"}, "together with --kernel"),
        ({"layers": ("gpu_warp",)}, "together with gpu_warp"),
        ({"gpu_counters_ns": 10**6}, "exclude each other"),
        ({"command": [], "pids": (1,)}, "from a program's start"),
    ],
)
def test_stall_reasons_go_with_kernels_or_alone(options: dict[str, Any], says: str) -> None:
    request = CaptureRequest(command=["./app"], gpu="auto", gpu_stalls=True)
    choice.check(request)
    assert choice.named_engine(request) == "kernels"
    assert choice.named_engine(replace(request, gpu="off")) == "off"
    with pytest.raises(TracepipeError, match=says):
        choice.check(replace(request, **options))
