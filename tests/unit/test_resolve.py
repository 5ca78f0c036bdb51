"""From hooks to probes, on libraries built here, a kernel's symbols and a tracefs written here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.hooks import hook_of
from tracepipe.errors import InputError
from tracepipe.hooks.hook import Condition, FilePlace, KernelPlace, Selection, TracepointPlace
from tracepipe.hooks.names import HookIndex, base_names
from tracepipe.hooks.sets import HookSet, load_set, read_hooks
from tracepipe.tracer.bpf.maps import text_field
from tracepipe.tracer.find import kernel as find_kernel
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.kernel import interrupts_of
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.find.resolve import resolve

needs_gcc = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

LIBRARY = """
int oddAlloc_v2(int a) { return a; }
int oddAlloc_v2_ptsz(int a) __attribute__((alias("oddAlloc_v2")));
int oddFree(int a) { return a + 1; }
int oddInit(int a) { return a + 2; }
int other(int a) { return a + 3; }
__attribute__((visibility("hidden"))) int oddHidden(int a) { return a + 4; }
int call(int a) { return oddHidden(a); }
"""
MAIN = (
    "int oddInit(int); int oddOwn(int a) { return a; } int main(void) { return oddInit(0) - 2 + oddOwn(0); }"
)
SET = """
target = "uprobe:libodd.so"
variants = ["_ptsz", "_v2"]
[[hook]]
functions = ["oddAlloc(size: u32)", "odd[A-Z]*"]
"""
SYMBOLS = """\
ffffffff81000000 T vfs_read
ffffffff81000100 T vfs_write
ffffffff81000200 D vfs_table
ffffffff81000300 W vfs_weak
ffffffffc0a00000 t odd_unlocked_ioctl\t[odd]
ffffffffc0a00100 t odd_mem_alloc\t[odd]
ffffffffc0a00200 t odd_mem_alloc.cold\t[odd]
ffffffffc0a00300 d odd_mem_table\t[odd]
ffffffffc0a00400 t odd_mem_alloc\t[odd_drm]
ffffffffc0a00500 t odd_mem_alloc\t[else]
ffffffffc0a00700 t odd_unlocked_ioctl\t[odd]
ffffffffc0b00000 t bpf_prog_odd_mem\t[bpf]
"""
FORMAT = """\
name: odd_entry
ID: 7
format:
	field:unsigned short common_type;	offset:0;	size:2;	signed:0;
	field:int common_pid;	offset:4;	size:4;	signed:1;

	field:int irq;	offset:8;	size:4;	signed:1;
	field:__data_loc char[] name;	offset:12;	size:4;	signed:0;
	field:char comm[16];	offset:16;	size:16;	signed:0;
	field:u64 seqno;	offset:32;	size:8;	signed:0;
	field:bool late;	offset:40;	size:1;	signed:0;
	field:__rel_loc char[] after;	offset:44;	size:4;	signed:0;
	field:unsigned char bytes[8];	offset:48;	size:8;	signed:0;
"""
INTERRUPTS = """\
            CPU0       CPU1
  9:          0          0   IO-APIC   9-fasteoi   acpi
 43:          1          0   PCI-MSI 524288-edge   odd, snd_hda
 44:          0         20   PCI-MSI 524289-edge   odd1
NMI:          0          0   Non-maskable interrupts of odd things
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with libodd.so.1, and a program that needs it, has it linked in, or has it and is stripped."""
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    folder = tmp_path_factory.mktemp("built")
    (folder / "odd.c").write_text(LIBRARY)
    (folder / "main.c").write_text(MAIN)

    def gcc(*arguments: str) -> None:
        subprocess.run(["gcc", *arguments], check=True, cwd=folder)

    gcc("-shared", "-fPIC", "-Wl,-soname,libodd.so.1", "-o", "libodd.so.1", "odd.c")
    gcc("-o", "shared", "main.c", "./libodd.so.1", "-Wl,-rpath,$ORIGIN")
    gcc("-o", "static", "main.c", "odd.c")
    gcc("-s", "-o", "stripped", "main.c", "odd.c")
    return folder


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A kernel with kprobes, the modules odd and odd_drm, a tracepoint and interrupts."""
    (tmp_path / "type").write_text("8\n")
    (tmp_path / "kallsyms").write_text(SYMBOLS)
    (tmp_path / "interrupts").write_text(INTERRUPTS)
    for module in ("odd", "odd_drm"):
        (tmp_path / "module" / module).mkdir(parents=True)
    for point in ("odd/odd_entry", "odd/odd_exit", "sched/sched_switch"):
        (tmp_path / "events" / point).mkdir(parents=True)
        (tmp_path / "events" / point / "format").write_text(FORMAT)
    (tmp_path / "events" / "odd" / "enable").write_text("0")
    monkeypatch.setattr(find_kernel, "KPROBE_PMU", tmp_path / "type")
    monkeypatch.setattr(find_kernel, "SYMBOLS", tmp_path / "kallsyms")
    monkeypatch.setattr(find_kernel, "_SYSTEM_MODULES", tmp_path / "module")
    monkeypatch.setattr(find_kernel, "_INTERRUPTS", tmp_path / "interrupts")
    monkeypatch.setattr(find_kernel, "tracing_folder", lambda: tmp_path)
    return tmp_path


def odd_set(folder: Path, text: str = SET) -> HookSet:
    path = folder / "odd.toml"
    path.write_text(text)
    return load_set(str(path))


def names(selection: Selection) -> list[str]:
    return sorted(probe.name for probe in selection.probes)


def of(*hooks: str, command: list[str] | None = None) -> Selection:
    return resolve(read_hooks(list(hooks)), LibrarySearch(command))


@needs_gcc
def test_exported_functions_each_place_once(built: Path, tmp_path: Path) -> None:
    hooks = odd_set(tmp_path)
    selection = resolve([hooks], LibrarySearch([str(built / "shared")]))
    assert names(selection) == ["oddAlloc_v2", "oddFree", "oddInit"]
    assert selection.unresolved == {}
    alloc = next(probe for probe in selection.probes if probe.symbol == "oddAlloc_v2")
    assert [argument.name for argument in alloc.signature.arguments] == ["size"]  # fits without its variant
    with Elf(str(built / "libodd.so.1")) as elf:
        addresses = dict(elf.functions())
        assert alloc.place == FilePlace(str(built / "libodd.so.1"), elf.file_offset(addresses["oddAlloc_v2"]))
    again = resolve(
        [hooks, hooks, *read_hooks(["uprobe:libodd.so.1:*"])], LibrarySearch([str(built / "shared")])
    )
    added = [probe for probe in again.probes if probe.hook.pattern == "*"]
    assert {"other", "call"} <= {probe.name for probe in added}
    assert not {"oddFree", "oddInit"} & {probe.name for probe in added}
    assert len({probe.place for probe in again.probes}) == len(again.probes)


@needs_gcc
def test_the_library_linked_into_the_program(built: Path, tmp_path: Path) -> None:
    hooks = odd_set(tmp_path)
    selection = resolve([hooks], LibrarySearch([str(built / "static")]))
    places = {probe.symbol: probe.place for probe in selection.probes}
    assert set(places) == {"oddAlloc_v2", "oddFree", "oddInit", "oddHidden", "oddOwn"}
    with Elf(str(built / "static")) as elf:
        offset = elf.file_offset(dict(elf.functions(local=True))["oddFree"])
    assert places["oddFree"] == FilePlace(str(built / "static"), offset)
    # A program that needs the library has functions of its own that only seem to be the library's.
    of_library = resolve([hooks], LibrarySearch([str(built / "shared")]))
    assert "oddOwn" not in names(of_library)
    stripped = resolve([hooks], LibrarySearch([str(built / "stripped")]))
    assert stripped.probes == []
    assert "no libodd.so found: not where the dynamic linker of stripped" in "".join(
        stripped.unresolved.values()
    )


@needs_gcc
def test_a_program_whose_own_functions_only_look_alike(built: Path, tmp_path: Path) -> None:
    text = SET.replace("oddAlloc(size: u32)", "oddNowhere")
    assert resolve([odd_set(tmp_path, text)], LibrarySearch([str(built / "static")])).probes == []


@needs_gcc
def test_functions_by_path_and_of_the_program(built: Path) -> None:
    library, program = built / "libodd.so.1", [str(built / "shared")]
    assert names(of(f"uprobe:{library}:oddHidden")) == ["oddHidden"]
    assert names(of("uprobe::main", "uprobe:shared:oddOwn", command=program)) == ["main", "oddOwn"]
    assert names(of("uprobe:libodd.so.1:oddHidden", command=program)) == ["oddHidden"]  # a second look
    behind = of("uprobe::main", command=["env", "A=1", str(built / "static")])
    assert str(built / "static") in {
        probe.place.path for probe in behind.probes if isinstance(probe.place, FilePlace)
    }


@needs_gcc
def test_what_the_user_wants_and_does_not(built: Path, tmp_path: Path) -> None:
    hooks, libraries = odd_set(tmp_path), LibrarySearch([str(built / "shared")])

    def found(only: tuple[str, ...] = (), exclude: tuple[str, ...] = ()) -> list[str]:
        selection = resolve([hooks], libraries, only=only, exclude=exclude)
        assert selection.unresolved == {}
        return names(selection)

    assert found(exclude=("odd*e",)) == ["oddAlloc_v2", "oddInit"]
    assert found(exclude=("oddAlloc",)) == ["oddFree", "oddInit"]
    assert found(exclude=("oddAlloc_v2_ptsz",)) == ["oddFree", "oddInit"]  # another name of that place
    assert found(only=("oddAlloc",)) == ["oddAlloc_v2"]
    assert found(only=("odd*",), exclude=("*Init", "*Free")) == ["oddAlloc_v2"]


@needs_gcc
def test_a_library_that_the_user_gives(built: Path, tmp_path: Path) -> None:
    other = tmp_path / "renamed"
    shutil.copy(built / "libodd.so.1", other)
    selection = resolve([odd_set(tmp_path)], LibrarySearch(given=(str(other),)))  # by its soname
    assert {probe.place.path for probe in selection.probes if isinstance(probe.place, FilePlace)} == {
        str(other)
    }
    with pytest.raises(InputError, match="no hook names its file name or its soname") as caught:
        resolve(read_hooks(["uprobe:libeven.so:*"]), LibrarySearch(given=(str(other),)))
    assert "libeven.so" in caught.value.hint
    with pytest.raises(InputError, match=r"nowhere\.so: cannot be read"):
        LibrarySearch(given=("nowhere.so",))


@needs_gcc
def test_why_functions_are_not_found(built: Path, tmp_path: Path) -> None:
    program = [str(built / "shared")]
    assert of("uprobe:libodd.so.1:oddAloc", command=program).unresolved == {
        "uprobe:libodd.so.1:oddAloc": f"no such function in {built}/libodd.so.1; "
        "near: oddAlloc_v2, oddAlloc_v2_ptsz"
    }
    assert of("uprobe:/nowhere.so:f").unresolved == {
        "uprobe:/nowhere.so:f": "no /nowhere.so found: there is no such file"
    }
    (reason,) = of("uprobe:libeven.so:f", command=program).unresolved.values()
    assert reason == "no libeven.so found: not where the dynamic linker of shared looks"
    text = SET.replace('"odd[A-Z]*"', '"oddOne", "oddTwo"')
    text = text.replace("[[hook]]", '[[hook]]\nfunctions = ["oddThree"]\n[[hook]]')
    several = resolve([odd_set(tmp_path, text)], LibrarySearch(program))
    assert names(several) == ["oddAlloc_v2"]
    assert list(several.unresolved) == ["odd, uprobe:libodd.so:oddThree"]
    assert [message.partition(": no such")[0] for message in several.skipped] == [
        "odd, uprobe:libodd.so:oddOne",
        "odd, uprobe:libodd.so:oddTwo",
    ]
    missing = resolve([odd_set(tmp_path, text.replace("libodd", "libeven"))], LibrarySearch(program))
    assert list(missing.unresolved) == ["odd, uprobe:libeven.so:oddThree and 3 more"]


@needs_gcc
def test_one_of_several_alternatives_is_enough(built: Path, kernel: Path) -> None:
    program = [str(built / "shared")]
    for hook in (
        "uprobe:libodd.so.1:oddNew|oddInit(a: i32)",
        "uprobe:libodd.so.1:oddNew,uprobe:libodd.so.1:oddInit(a: i32)",
        "uprobe:libeven.so,libodd.so.*:oddInit(a: i32)",
        f"uprobe:{built}/*odd.so*:oddInit(a: i32)",
    ):
        selection = of(hook, command=program)
        assert (names(selection), selection.unresolved, selection.skipped) == (["oddInit"], {}, []), hook
        assert [argument.name for argument in selection.probes[0].signature.arguments] == ["a"]
    assert [probe.symbol for probe in of("kprobe:odd_ioctl|odd_unlocked_ioctl").probes] == [
        "odd_unlocked_ioctl"
    ]
    assert [probe.symbol for probe in of("kprobe:odd_ioctl,kprobe:odd:odd_unl*").probes] == [
        "odd_unlocked_ioctl"
    ]
    assert [probe.symbol for probe in of("tracepoint:odd:gone|odd_entry").probes] == ["odd_entry"]
    assert of("kprobe:vfs_raed|odd_iotcl").unresolved == {
        "kprobe:vfs_raed|odd_iotcl": "vfs_raed: no such function; "
        "near: vfs_read, vfs_write, vfs_weak; odd_iotcl: no such function"
    }


@needs_gcc
def test_hooks_are_in_a_layer_that_their_file_names(built: Path) -> None:
    program = [str(built / "shared")]
    found = of(
        "uprobe:libodd.so.1:oddInit",
        f"uprobe:{built}/*odd.so*:oddFree",
        "uprobe::main",
        "uprobe:shared:oddOwn",
        command=program,
    )
    assert [(probe.symbol, probe.layer, probe.hook.layer_name) for probe in found.probes] == [
        ("oddInit", "hook", "libodd.so.1"),
        ("oddFree", "hook", "libodd.so.1"),
        ("main", "hook", "shared"),
        ("oddOwn", "hook", "shared"),
    ]


@needs_gcc
def test_cudas_functions_in_a_program_are_cudas(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(
        "int cudaMalloc(void) { return 0; } int main(void) { return cudaMalloc(); }"
    )
    subprocess.run(["gcc", "-o", str(tmp_path / "app"), str(tmp_path / "main.c")], check=True)
    found = of("uprobe::cudaMalloc|main", "uprobe::main", command=[str(tmp_path / "app")])
    assert sorted((probe.symbol, probe.layer, probe.hook.layer_name) for probe in found.probes) == [
        ("cudaMalloc", "userspace", ""),
        ("main", "hook", "app"),
    ]


@needs_gcc
def test_a_path_that_is_not_there_names_the_library_that_is(built: Path) -> None:
    (reason,) = of("uprobe:/lib/*/libodd.so:f", command=[str(built / "shared")]).unresolved.values()
    assert reason.startswith("no /lib/*/libodd.so found: there is no such file")
    assert reason.endswith(f"; {built}/libodd.so.1 was found: write libodd.so alone")


@needs_gcc
def test_a_function_has_the_variants_that_a_shipped_set_gives_it(
    built: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = [str(built / "shared")]
    (reason,) = of("uprobe:libodd.so.1:oddAlloc", command=program).unresolved.values()
    assert reason.endswith("near: oddAlloc_v2, oddAlloc_v2_ptsz")
    monkeypatch.setattr("tracepipe.hooks.sets._shipped_variants", lambda: {"libodd": ("_ptsz", "_v2")})
    assert names(of("uprobe:libodd.so.1:oddAlloc", command=program)) == ["oddAlloc_v2"]
    assert names(of("uprobe:libodd.so.1:oddAlloc_v2_ptsz", command=program)) == ["oddAlloc_v2_ptsz"]


def test_a_file_that_is_not_a_library_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "text.so"
    path.write_text("not ELF")
    notes: list[str] = []
    selection = resolve(read_hooks([f"uprobe:{path}:f"]), LibrarySearch(), notify=notes.append)
    assert selection.probes == []
    assert notes == [f"{path}: not an ELF file: no function of it is recorded"]


def test_functions_of_modules(kernel: Path) -> None:
    selection = of("kprobe:odd,odd-drm:odd_*")
    assert [(probe.symbol, probe.place) for probe in selection.probes] == [
        ("odd_unlocked_ioctl", KernelPlace("odd_unlocked_ioctl", "odd", 0xFFFFFFFFC0A00000)),
        ("odd_mem_alloc", KernelPlace("odd_mem_alloc", "odd", 0xFFFFFFFFC0A00100)),
        ("odd_mem_alloc", KernelPlace("odd_mem_alloc", "odd_drm", 0xFFFFFFFFC0A00400)),
    ]
    anywhere = of("kprobe:odd_mem_all?c", "kprobe:vfs_[!w]*", "kprobe:vfs_w*")
    assert [
        (probe.symbol, probe.place.module)
        for probe in anywhere.probes
        if isinstance(probe.place, KernelPlace)
    ] == [
        *(("odd_mem_alloc", module) for module in ("odd", "odd_drm", "else")),
        *((name, "") for name in ("vfs_read", "vfs_write", "vfs_weak")),
    ]


def test_without_addresses_a_name_is_probed_once(kernel: Path) -> None:
    hidden = "".join(f"{'0' * 16}{line[16:]}\n" for line in SYMBOLS.splitlines())
    (kernel / "kallsyms").write_text(hidden)
    places = [probe.place for probe in of("kprobe:odd_*").probes]
    assert places == [KernelPlace("odd_unlocked_ioctl", "odd", 0), KernelPlace("odd_mem_alloc", "odd", 0)]


def test_why_the_kernel_has_no_such_function(kernel: Path) -> None:
    assert of("kprobe:odd_unlocked_ioct").unresolved == {
        "kprobe:odd_unlocked_ioct": "no such function; near: odd_unlocked_ioctl"
    }
    assert of("kprobe:odd:mem_alloc").unresolved == {
        "kprobe:odd:mem_alloc": "no such function in odd; near: odd_mem_alloc"
    }
    assert of("kprobe:even:f").unresolved == {"kprobe:even:f": "not loaded on this machine: even"}
    (reason,) = of("kprobe:nvidia:f").unresolved.values()
    assert "the NVIDIA driver is not loaded" in reason
    (kernel / "kallsyms").unlink()
    (reason,) = of("kprobe:f").unresolved.values()
    assert "cannot be read: No such file" in reason
    (kernel / "type").unlink()
    (reason,) = of("kprobe:f").unresolved.values()
    assert "no kprobes" in reason


def test_hooks_that_fit_too_much_are_refused(kernel: Path) -> None:
    lines = (f"ffffffff{number:08x} T function_{number}\n" for number in range(6000))
    (kernel / "kallsyms").write_text("".join(lines))
    with pytest.raises(
        InputError, match=r"match 6000 functions, kprobe:function_\* alone 6000; at most 5000"
    ):
        of("kprobe:function_*")


def test_fields_of_a_tracepoint(kernel: Path) -> None:
    (probe,) = of("tracepoint:odd:odd_entry(seqno, irq, late: bool) if seqno > 3").probes
    assert (probe.symbol, probe.name, probe.place) == (
        "odd_entry",
        "odd_entry",
        TracepointPlace("odd/odd_entry"),
    )
    assert [(known.name, known.position, known.kind) for known in probe.signature.arguments] == [
        *(("seqno", 32, "u64"), ("irq", 8, "i32"), ("late", 40, "bool")),
    ]
    assert probe.hook.condition == Condition(probe.signature.arguments[0], ">", 3)
    assert names(of("tracepoint:odd:*")) == ["odd_entry", "odd_exit"]
    assert names(of("tracepoint:*:*_e*")) == ["odd_entry", "odd_exit"]
    assert names(resolve(read_hooks(["tracepoint:odd:*"]), LibrarySearch(), exclude=("odd:odd_entry",))) == [
        "odd_exit"
    ]


def test_texts_of_a_tracepoint(kernel: Path) -> None:
    (probe,) = of("tracepoint:odd:odd_entry(name, comm: str, after)").probes
    assert [(one.position, one.kind, one.text_form, one.size_bytes) for one in probe.signature.arguments] == [
        *((12, "str", "__data_loc", 0), (16, "str", "array", 16), (44, "str", "__rel_loc", 0)),
    ]
    assert [text_field(one) for one in probe.signature.arguments] == [
        2 << 16 | 12,
        1 << 16 | 16,
        3 << 16 | 44,
    ]


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        ("odd:odd_entry(seq)", "odd:odd_entry has no field seq. Did you mean seqno?"),
        ("odd:odd_entry(bytes)", "the field bytes is neither a number nor a text. Those that are: irq, name"),
        ("odd:odd_entry(comm: u64)", "the field comm is a text. Leave the kind out."),
        ("odd:odd_entry(irq: str)", "the field irq is a number. Leave the kind out."),
        ("odd:odd_entry(name) if name == 3", "name is a text, which no condition compares."),
        ("odd:odd_entry(irq: u64)", "the field irq has 32 bits, which u64 has not. Leave the kind out."),
        ("odd:odd_entry(late) if late == 300", "300 is no u8"),
        ("odd:odd_entri", "no such tracepoint; near: odd:odd_entry"),
        ("ood:odd_entry", "no such tracepoint; near: odd:odd_entry"),
        ("odd:odd_entry(irq) if irq == nvidia", "no device nvidia* has an interrupt"),
    ],
)
def test_why_a_tracepoint_is_not_hooked(kernel: Path, hook: str, reason: str) -> None:
    selection = of(f"tracepoint:{hook}")
    assert selection.probes == []
    assert list(selection.unresolved) == [f"tracepoint:{hook}"]
    assert reason in selection.unresolved[f"tracepoint:{hook}"]


def test_a_probe_for_each_interrupt_of_a_device(kernel: Path) -> None:
    assert interrupts_of("odd", INTERRUPTS) == [43, 44]
    assert interrupts_of("snd", INTERRUPTS) == [43]
    selection = of("tracepoint:odd:odd_entry(irq) if irq == odd", "tracepoint:odd:odd_entry")
    conditions = [probe.hook.condition for probe in selection.probes]
    assert [condition.value for condition in conditions if condition is not None] == [43, 44]
    assert {type(condition) for condition in conditions} == {Condition}
    assert {probe.place for probe in selection.probes} == {TracepointPlace("odd/odd_entry")}


def test_the_hook_that_holds_for_a_symbol() -> None:
    variants = ("_ptsz", "_v2")

    def first(symbol: str, *patterns: str) -> str | None:
        hooks = [hook_of(f"uprobe:l.so:{pattern}") for pattern in patterns]
        found = HookIndex(hooks, variants).find(symbol)
        return found.pattern if found else None

    assert list(base_names("oddCopy_v2_ptsz", variants)) == ["oddCopy_v2_ptsz", "oddCopy_v2", "oddCopy"]
    assert list(base_names("_v2", variants)) == ["_v2"]
    assert first("oddCopy_v2_ptsz", "oddCopy", "odd*") == "oddCopy"
    assert first("oddCopy_v2_ptsz", "odd*", "oddCopy") == "odd*"
    assert first("oddCopy_v2_ptsz", "oddCopy", "oddCopy_v2", "odd*") == "oddCopy_v2"  # more of the symbol
    assert first("oddCopy_v2_ptsz", "*y", "oddCopy_v2") == "*y"
    assert first("oddCopy_v2", "oddC?py") == "oddC?py"
    assert first("oddCopy_v3", "oddCopy") is None


def test_processes_that_run(built: Path, tmp_path: Path) -> None:
    selection = resolve(
        read_hooks(["uprobe::*", "uprobe:libc.so.6:malloc"]), LibrarySearch(pids=(os.getpid(),))
    )
    assert "malloc" in names(selection)
    gone = resolve(read_hooks(["uprobe:libeven.so:f"]), LibrarySearch(pids=(os.getpid(),)))
    (reason,) = gone.unresolved.values()
    assert f"process {os.getpid()} has not loaded it" in reason
