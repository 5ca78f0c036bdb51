"""Hooks as text: signatures, TOML files, the command line, and the errors for mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.hooks import hook_of
from tracepipe.errors import InputError
from tracepipe.hooks import sets, signature
from tracepipe.hooks.hook import Argument, Condition
from tracepipe.hooks.names import near_names
from tracepipe.hooks.sets import load_set, read_hooks, shipped_sets
from tracepipe.hooks.signature import NamedCondition

SET = """
about = "Calls of a library for
 tests"
source = "this file"
target = "uprobe:libodd.so.1"
variants = ["_v2"]

[[hook]]
functions = [
    "oddAlloc(out address: ptr, size_bytes: u64) -> oddResult",
    "oddAllocHost(out address: ptr, size_bytes: u64) -> oddResult if size_bytes > 0x1000",
]
effect = "alloc"
condition = "size_bytes >= 64"

[[hook]]
functions = ["odd_isr(_, irq: i32)"]
target = "kprobe:odd, odd-drm"
layer = "scheduler"
name = "interrupt"
returns = false
everywhere = true

[values.oddResult]
0 = "ODD_SUCCESS"
-1 = "ODD_FAILED"
0x10 = "ODD_BUSY"
""".replace("for\n tests", "for tests")


def written(folder: Path, text: str) -> str:
    path = folder / "odd.toml"
    path.write_text(text)
    return str(path)


def refused(text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        read_hooks([text])
    return caught.value


def test_a_set_in_a_file(tmp_path: Path) -> None:
    path = written(tmp_path, SET)
    found = load_set(path)
    assert (found.name, found.about, found.origin) == ("odd", "Calls of a library for tests", path)
    assert found.variants == ("_v2",)
    assert found.values == {"oddResult": {0: "ODD_SUCCESS", -1: "ODD_FAILED", 16: "ODD_BUSY"}}
    alloc, host, isr = found.hooks
    size = Argument("size_bytes", 1)
    assert (alloc.target, alloc.library, alloc.pattern, alloc.layer, alloc.effect) == (
        *("uprobe", "libodd.so.1", "oddAlloc", "hook", "alloc"),
    )
    assert alloc.signature.arguments == (Argument("address", 0, "ptr", out=True), size)
    assert alloc.signature.result == "oddResult"
    assert alloc.condition == Condition(size, ">=", 64)
    assert host.condition == Condition(size, ">", 4096)  # its own before the hook's
    assert (isr.target, isr.modules, isr.layer, isr.name) == (
        *("kprobe", ("odd", "odd_drm"), "scheduler", "interrupt"),
    )
    assert (isr.returns, isr.everywhere) == (False, True)
    assert isr.signature.arguments == (Argument("irq", 1, "i32"),)
    assert alloc.origin != host.origin
    assert not found.is_shipped


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("uprobe:libc.so.6:malloc", ("uprobe", "libc.so.6", (), "malloc", "hook")),
        ("uprobe:/opt/a:b/lib.so:f(x: u8)", ("uprobe", "/opt/a:b/lib.so", (), "f", "hook")),
        ("uprobe::main", ("uprobe", "", (), "main", "hook")),
        ("uprobe:libcuda.so:cuInit", ("uprobe", "libcuda.so", (), "cuInit", "userspace")),
        (
            "uprobe:/opt/*/libcudart.so*:cudaFree",
            ("uprobe", "/opt/*/libcudart.so*", (), "cudaFree", "userspace"),
        ),
        ("kprobe:nv_*", ("kprobe", "", (), "nv_*", "kernel")),
        (
            "kprobe:nvidia,nvidia-uvm:nv_[a-z]*",
            ("kprobe", "", ("nvidia", "nvidia_uvm"), "nv_[a-z]*", "kernel"),
        ),
        ("tracepoint:sched:sched_*", ("tracepoint", "", (), "sched:sched_*", "kernel")),
    ],
)
def test_targets_of_the_command_line(text: str, expected: tuple[object, ...]) -> None:
    hook = hook_of(text)
    assert (hook.target, hook.library, hook.modules, hook.pattern, hook.layer) == expected


def test_a_layer_of_its_own(tmp_path: Path) -> None:
    text = SET.replace('layer = "scheduler"', 'layer = "my pool"')
    hooks = load_set(written(tmp_path, text)).hooks
    assert [(hook.layer, hook.layer_name) for hook in hooks] == [
        *[("hook", "")] * 2,
        ("hook", "my pool"),
    ]


def test_positions_count_machine_words() -> None:
    hook = hook_of("uprobe:l.so:f(function: ptr, grid: dim3, _, block.x: u32, stream)")
    assert hook.signature.arguments == (
        Argument("function", 0, "ptr"),
        Argument("grid", 1, "dim3"),
        Argument("block.x", 4, "u32"),
        Argument("stream", 5, "u64"),
    )


@pytest.mark.parametrize(
    ("by_value", "places"),
    [
        ("stack", [("out", 0, "ptr"), ("id", 6, "hash128"), ("rank", 1, "i32"), ("last", 22, "u64")]),
        ("pointer", [("out", 0, "ptr"), ("id", 1, "hash128*"), ("rank", 2, "i32"), ("last", 7, "u64")]),
    ],
)
def test_a_structure_by_value_takes_no_register_of_x86(
    monkeypatch: pytest.MonkeyPatch, by_value: str, places: list[tuple[str, int, str]]
) -> None:
    monkeypatch.setattr(signature, "_BY_VALUE", by_value)
    monkeypatch.setattr(signature, "WORDS", 32)
    hook = hook_of("uprobe:l.so:f(out: ptr, id: hash128, rank: i32, _, _, _, _, last)")
    assert [(one.name, one.position, one.kind) for one in hook.signature.arguments] == places


def test_eight_words_can_be_recorded() -> None:
    fitting = "a: dim3, b: dim3, c: u32, d: i32, e: u32, out f, g: str, h, i"
    assert len(hook_of(f"uprobe:l.so:f({fitting})").signature.arguments) == 9
    assert "take 9 words" in refused(f"uprobe:l.so:f({fitting}, j)").message


def test_kinds_of_a_tracepoints_fields_are_left_to_it() -> None:
    hook = hook_of("tracepoint:irq:irq_handler_entry(irq, vector: u32) if irq == nvidia")
    irq = Argument("irq", 0, "")
    assert hook.signature.arguments == (irq, Argument("vector", 1, "u32"))
    assert hook.condition == NamedCondition(irq, "==", 0, "nvidia")
    assert not hook.returns


@pytest.mark.parametrize(
    ("condition", "value"),
    [("a == -1", -1), ("a < 0x7f", 127), ("a&3", 3), ("on == true", 1), ("on != false", 0)],
)
def test_values_of_conditions(condition: str, value: int) -> None:
    found = hook_of(f"uprobe:l.so:f(a: i8, on: bool) if {condition}").condition
    assert found is not None
    assert found.value == value


def test_a_condition_on_a_named_value(tmp_path: Path) -> None:
    text = SET.replace("odd_isr(_, irq: i32)", "odd_isr(state: oddResult) if state == ODD_BUSY")
    condition = load_set(written(tmp_path, text)).hooks[2].condition
    assert condition is not None
    assert condition.value == 16
    with pytest.raises(InputError, match="oddResult has no value ODD_BUZY") as caught:
        load_set(written(tmp_path, text.replace("== ODD_BUSY", "== ODD_BUZY")))
    assert "ODD_BUSY" in caught.value.hint


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("uprobe:l.so:f(size: u46)", "argument size: no kind u46", "Did you mean u64"),
        ("uprobe:l.so:f -> i23", "result: no kind i23", "i32"),
        ("uprobe:l.so:f(a) -> dim3", "result: dim3 cannot", "u64"),
        ("uprobe:l.so:f(a: str, b: str)", "argument b: 2 str", "_"),
        ("uprobe:l.so:f(out a, out b)", "argument b: 2 out", "_"),
        ("uprobe:l.so:f(out a: str)", "argument a: str cannot", ""),
        ("uprobe:l.so:f(a, a)", "argument a: there are two", ""),
        ("uprobe:l.so:f(a, b, c, d, e, f, g, h, i)", "take 9 words of 64 bits; 8", "u32"),
        (f"uprobe:l.so:f({'_, ' * 16}a)", "argument a: it is word 17", ""),
        ("uprobe:l.so:f(a: hash128, b: hash128)", "2 hash128 arguments; one can be recorded", ""),
        ("uprobe:l.so:f(out a: hash128)", "hash128 cannot be recorded here", "Use one of bool,"),
        ("uprobe:l.so:f(a: hash128) if a == 1", "a is a hash128", "Compare a number"),
        ("kprobe:f(a: hash128*)", "hash128* is of libraries' functions", ""),
        (f"uprobe:l.so:f({'_, ' * 15}a: dim3)", "argument a: it is word 17", ""),
        ("uprobe:l.so:f(a b)", "cannot read 'a b'", ""),
        ("uprobe:l.so:f(a,)", "cannot read ''", ""),
        ("uprobe:l.so:f(a", "not a signature", "NAME"),
        ("uprobe:l.so:f(a) if b > 1", "condition: b is not recorded", "a"),
        ("uprobe:l.so:f(a) if a = 1", "condition: no operator =", "=="),
        ("uprobe:l.so:f(a) if a", "condition: cannot be read", ""),
        ("uprobe:l.so:f(a) if a == x", "condition: x is no number", "0x1000"),
        ("uprobe:l.so:f(a: u8) if a == 256", "condition: 256 is no u8", "0 to 255"),
        ("uprobe:l.so:f(a: i8) if a == 128", "condition: 128 is no i8", "-128 to 127"),
        ("uprobe:l.so:f(out a) if a == 1", "a is known only when the call returns", ""),
        ("uprobe:l.so:f(a: str) if a == 1", "a is a str", ""),
        ("uprobe:f", "no library or no function", "uprobe::"),
        ("uprobe:l.so:f,g", "not a signature", "write a|b"),
        ("dma_fence:*", "no target dma_fence", "tracepipe hooks list 'dma_fence:*'"),
        ("uprobe:l.so:f(a, kprobe: u32),uprobe:l.so:g(a) if b > 1", "b is not recorded", ""),
        ("uretprobe:l.so:f", "no target uretprobe", "uprobe: a hook records entry and return"),
        ("kretprobe:f", "no target kretprobe", "kprobe: a hook records entry and return"),
        ("kporbe:f", "no target kporbe", "kprobe"),
        ("kprobe:a.b:f", "a.b is no module's name", ""),
        ("tracepoint:sched_switch", "does not fit", "group:name"),
        ("tracepoint:sched:sched_switch(prev_comm: dim3)", "only numbers and texts", ""),
        ("tracepoint:sched:sched_switch(_)", "cannot read '_'", ""),
        ("tracepoint:sched:sched_switch(a, b, c, d, e)", "at most 4", ""),
        ("tracepoint:sched:sched_switch -> i32", "a tracepoint has no result", ""),
        ("tracepoint:irq:e(irq) if irq > nvidia", "irq > nvidia", "=="),
        ("nothing.toml", "nothing.toml: cannot be read: No such file", ""),
        ("cuda-drver", "no set of hooks cuda-drver", "FILE.toml"),
    ],
)
def test_mistakes_on_the_command_line(text: str, message: str, hint: str) -> None:
    error = refused(text)
    assert message in error.message
    assert hint in error.hint


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ('variants = ["_v2"]', 'varients = ["_v2"]', "varients: there is no such field", "variants"),
        ('variants = ["_v2"]', 'variants = "_v2"', "variants: not an array", "_v2"),
        ('variants = ["_v2"]', "variants = [2]", "variants: 2 is no text", ""),
        ('effect = "alloc"', 'efect = "alloc"', "hook 1, efect: there is no such field", "effect"),
        ('effect = "alloc"', 'effect = "aloc"', "no effect aloc", "alloc"),
        ('effect = "alloc"', 'effect = "name"', "name needs the argument handle", "handle"),
        ("returns = false", 'returns = "no"', "hook 2, returns: not true or false", "'no'"),
        ('layer = "scheduler"', 'layer = "kernal"', "layer: no layer kernal", "kernel"),
        ('layer = "scheduler"', 'layer = "memory"', "hooks cannot make events of memory", "or a new name"),
        ('layer = "scheduler"', 'layer = "a\\nb"', "layer: 'a\\nb' is no name", "1 to 64"),
        (
            '"odd_isr(_, irq: i32)"',
            '"odd_isr(_, irq: i32) -> i32"',
            "returns = false has no return",
            "-> i32",
        ),
        ('"odd_isr(_, irq: i32)"', '"odd_isr(irq: int)"', "hook 2, odd_isr(irq: int), argument irq", "int"),
        ('target = "uprobe:libodd.so.1"', "", "hook 1, target: there is none", "uprobe:LIBRARY"),
        ("uprobe:libodd.so.1", "uprobe", "a uprobe needs a library", "uprobe:"),
        ("uprobe:libodd.so.1", "tracepoint:sched", "a tracepoint has no sched", "group:name"),
        ("size_bytes >= 64", "bytes >= 64", "condition: bytes is not recorded", "size_bytes"),
        ("[values.oddResult]", "[values.u32]", "values.u32: cannot be a kind's name", ""),
        ('0 = "ODD_SUCCESS"', 'zero = "ODD_SUCCESS"', "values.oddResult, zero: not a number", ""),
        ('0 = "ODD_SUCCESS"', "0 = 0", "values.oddResult, 0: its name is no text", ""),
        ("[[hook]]", "[hook]", "not TOML", ""),
        ('source = "this file"', "source = this file", "odd.toml:3: not TOML", ""),
    ],
)
def test_mistakes_in_a_file(tmp_path: Path, old: str, new: str, message: str, hint: str) -> None:
    assert old in SET
    path = written(tmp_path, SET.replace(old, new))
    with pytest.raises(InputError) as caught:
        load_set(path)
    assert caught.value.message.startswith(path)
    assert message in caught.value.message
    assert hint in caught.value.hint


def test_files_that_are_not_sets(tmp_path: Path) -> None:
    for content, message in (
        (b"\xff\xfe", "not a text in UTF-8"),
        (b'about = "nothing"', "there is no hook"),
        (b"hook = [1]", "hook 1: not a table"),
        (b'[[hook]]\ntarget = "kprobe"', "hook 1, functions: there are none"),
        (b"a = " + b"[" * 5000, "TOML|nested"),
    ):
        path = tmp_path / "some.toml"
        path.write_bytes(content)
        with pytest.raises(InputError, match=message):
            load_set(str(path))


def test_a_hook_of_the_users_may_use_a_shipped_sets_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, SET)
    monkeypatch.setattr(sets, "_FOLDER", tmp_path)
    sets._shipped_values.cache_clear()
    try:
        assert list(shipped_sets()) == ["odd"]
        (found,) = read_hooks(["uprobe:libodd.so.1:oddInit -> oddResult"])
        assert found.values["oddResult"][0] == "ODD_SUCCESS"
        (shipped,) = read_hooks(["odd"])
        assert shipped.is_shipped
        assert "Did you mean odd?" in refused("ood").hint
    finally:
        sets._shipped_values.cache_clear()


def test_every_shipped_set_can_be_read() -> None:
    for name in shipped_sets():
        found = load_set(name)
        assert found.is_shipped
        assert found.about
        assert found.source


def test_near_names() -> None:
    known = ["nvidia_unlocked_ioctl", "nvidia_ioctl", "nvidia_mmap", "NV_IOCTL", "ext4_ioctl"]
    assert near_names("nvidia_unlocked_ioct", known)[:2] == ["nvidia_unlocked_ioctl", "nvidia_ioctl"]
    assert near_names("nv_ioctl", known)[0] == "NV_IOCTL"
    assert near_names("*unlocked_ioctl_v2*", known)[0] == "nvidia_unlocked_ioctl"
    assert near_names("zzz", known) == []
    many = [f"function_{number}" for number in range(5000)]
    assert near_names("function_4999x", many)[0] == "function_4999"
    assert near_names("functoin_4999", [*many, "functoin_499"])[0] == "functoin_499"
