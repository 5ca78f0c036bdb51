"""Which functions of the NVIDIA driver are probed, by the symbols that a kernel lists."""

from __future__ import annotations

from pathlib import Path

import pytest

from tracepipe.capture import driver
from tracepipe.capture.driver import Declaration, declarations, driver_functions, layers_here, select
from tracepipe.capture.engine import ALL_LAYERS, DEFAULT_LAYERS, DriverFunction

SYMBOLS = """\
ffffffff81000000 T nvidia_unlocked_ioctl
ffffffffc0a00000 t nvidia_unlocked_ioctl\t[nvidia]
ffffffffc0a00100 t nv_mem_alloc\t[nvidia]
ffffffffc0a00200 t nv_mem_alloc.cold\t[nvidia]
ffffffffc0a00300 d nv_mem_table\t[nvidia]
ffffffffc0a00400 t nv_mem_alloc\t[nvidia_uvm]
ffffffffc0a00500 t nv_mem_alloc\t[nouveau]
ffffffffc0a00600 t rm_secret\t[nvidia]
ffffffffc0a00700 t nvidia_unlocked_ioctl\t[nvidia]
"""
TABLE = [Declaration("nvidia_unlocked_ioctl", ("_", "cmd"), True), Declaration("nv_mem_*", (), False)]


def machine(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, kprobes: bool, modules: str, symbols: str
) -> None:
    pmu = folder / "type"
    if kprobes:
        pmu.write_text("8\n")
    (folder / "kallsyms").write_text(symbols)
    for module in modules.split():
        (folder / "module" / module).mkdir(parents=True)
    monkeypatch.setattr(driver, "KPROBE_PMU", pmu)
    monkeypatch.setattr(driver, "_SYMBOLS", folder / "kallsyms")
    monkeypatch.setattr(driver, "_SYSTEM_MODULES", folder / "module")


def test_functions_of_the_drivers_modules_and_no_others() -> None:
    assert list(select(SYMBOLS.splitlines(), TABLE)) == [
        DriverFunction("nvidia_unlocked_ioctl", "nvidia", 0xFFFFFFFFC0A00000, ("_", "cmd"), True),
        DriverFunction("nv_mem_alloc", "nvidia", 0xFFFFFFFFC0A00100),
        DriverFunction("nv_mem_alloc", "nvidia_uvm", 0xFFFFFFFFC0A00400),
    ]


def test_without_addresses_a_name_is_probed_once() -> None:
    hidden = [f"{'0' * 16}{line[16:]}" for line in SYMBOLS.splitlines()]
    names = [(function.module, function.name) for function in select(hidden, TABLE)]
    assert names == [("nvidia", "nvidia_unlocked_ioctl"), ("nvidia", "nv_mem_alloc")]


@pytest.mark.parametrize(
    "name",
    [
        *("nvidia_ioctl", "nvidia_unlocked_ioctl", "nv_ioctl", "uvm_unlocked_ioctl_entry"),
        *("nv_mem_alloc", "os_alloc_mem", "nv_schedule_work", "nv_kthread_q_schedule_q_item"),
        *("os_execute_work_item", "nvidia_isr_kthread_bh"),
    ],
)
def test_old_and_new_names_are_known(name: str) -> None:
    (found,) = select([f"ffffffffc0a00000 t {name}\t[nvidia]\n"], declarations())
    assert found.name == name


def test_the_first_line_that_fits_holds() -> None:
    (found,) = select(["0000000000000000 t nvidia_ioctl\t[nvidia]\n"], declarations())
    assert (found.address, found.arguments, found.has_result) == (0, ("_", "_", "cmd"), True)


def test_registers_that_are_named_are_recorded_ones() -> None:
    table = declarations()
    assert len({known.pattern for known in table}) == len(table)
    assert all(len(known.arguments) <= 3 for known in table)


@pytest.mark.parametrize(
    ("kprobes", "modules", "symbols", "why"),
    [
        (False, "nvidia", SYMBOLS, "no kprobes"),
        (True, "ext4", SYMBOLS, "is not loaded"),
        (True, "nvidia nvidia_drm", "ffffffffc0a00600 t rm_secret\t[nvidia]\n", "nvidia, nvidia_drm"),
    ],
)
def test_why_there_is_nothing_to_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kprobes: bool, modules: str, symbols: str, why: str
) -> None:
    machine(monkeypatch, tmp_path, kprobes=kprobes, modules=modules, symbols=symbols)
    functions, reason = driver_functions()
    assert functions == []
    assert why in reason
    assert layers_here() == DEFAULT_LAYERS


def test_with_a_driver_all_layers_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(monkeypatch, tmp_path, kprobes=True, modules="nvidia", symbols=SYMBOLS)
    functions, reason = driver_functions()
    assert [function.name for function in functions][:2] == ["nvidia_unlocked_ioctl", "nv_mem_alloc"]
    assert reason == ""
    assert layers_here() == ALL_LAYERS
