"""Functions that a libcuda hands out and does not export: what it answers, and what else may happen."""

from __future__ import annotations

import fcntl
import json
import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tracepipe.hooks.hook import FilePlace
from tracepipe.hooks.sets import load_set
from tracepipe.tracer.find import functions
from tracepipe.tracer.find.elf import Elf
from tracepipe.tracer.find.functions import handed_out
from tracepipe.tracer.find.library import LibrarySearch
from tracepipe.tracer.find.resolve import resolve

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not installed")

EACH = "for (int file = 3; file < 30; file++) write(file, text, sizeof text);"
LIBRARY = """
#include <stdio.h>
#include <string.h>
#define API __attribute__((visibility("default")))
static int newer(int a) { return a + 1; }
static int per_thread(int a) { return a + 2; }
static int secret(int a) { return a + 3; }
API int cuInit(int a) { return a; }
API int cuMemAlloc_v2(int a) { return a + 4; }
API int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
API int cuGetProcAddress_v2(const char *name, void **function, int version, unsigned long long flags,
                            int *status)
{
    puts("this is not the answer");
    if (version > 12040)
        return 1;
    if (!strcmp(name, "cuInit"))
        *function = flags == 2 ? per_thread : (void *)cuInit;
    else if (!strcmp(name, "cuMemAlloc"))
        *function = version >= 12030 ? newer : (void *)cuMemAlloc_v2;
    else if (!strcmp(name, "cuSecret"))
        *function = secret;
    else
        *function = strcmp(name, "cuElsewhere") ? NULL : (void *)strcmp;
    *status = 0;
    return 0;
}
"""
SET = """
target = "uprobe:libcuda.so.1"
variants = ["_ptsz", "_v2"]
[[hook]]
functions = ["cuMemAlloc(address: ptr)", "cuSecret", "cuElsewhere", "cu[A-Z]*"]
"""


def build(folder: Path, text: str = LIBRARY) -> str:
    (folder / "library.c").write_text(text)
    command = ["gcc", "-shared", "-fPIC", "-fvisibility=hidden", "-Wl,-soname,libcuda.so.1"]
    subprocess.run([*command, "-o", "libcuda.so.1", "library.c"], check=True, cwd=folder)
    return str(folder / "libcuda.so.1")


def test_functions_that_are_not_exported(tmp_path: Path) -> None:
    path = build(tmp_path)
    (tmp_path / "mini.toml").write_text(SET)
    notes: list[str] = []
    hooks = load_set(str(tmp_path / "mini.toml"))
    selection = resolve([hooks], LibrarySearch(given=(path,)), notify=notes.append)
    assert notes == []
    with Elf(path) as elf:
        offsets = {name: elf.file_offset(address) for name, address in elf.functions(local=True)}
    found = {probe.symbol: probe for probe in selection.probes}
    assert {name: found[name].place for name in ("cuMemAlloc", "cuInit_ptsz", "cuSecret")} == {
        "cuMemAlloc": FilePlace(path, offsets["newer"]),
        "cuInit_ptsz": FilePlace(path, offsets["per_thread"]),
        "cuSecret": FilePlace(path, offsets["secret"]),
    }
    assert found["cuMemAlloc"].signature == found["cuMemAlloc_v2"].signature
    assert found["cuMemAlloc"].signature.arguments
    assert "cuElsewhere" not in found  # of another library
    assert len(selection.probes) == 7


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("abort();", "ended with -6"),
        ("for (;;) pause();", "no answer in time"),
        ("_exit(0);", "Expecting value"),
        ("exit(3);", "ended with 3"),
        # One of these descriptors is that of the answer.
        (f"memset(text, '[', sizeof text); for (;;) {EACH}", "no answer in time"),
        (f"memset(text, '[', sizeof text); {EACH} _exit(0);", "while decoding a JSON array"),
    ],
)
def test_a_library_that_cannot_be_asked_is_a_note(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, reason: str
) -> None:
    monkeypatch.setattr(functions, "_TIMEOUT_S", 0.5)
    start = f"static char text[1 << 16]; __attribute__((constructor)) static void start(void) {{ {body} }}"
    path = build(
        tmp_path, f"#include <stdlib.h>\n#include <string.h>\n#include <unistd.h>\n{start}\n{LIBRARY}"
    )
    notes: list[str] = []
    assert handed_out(path, ["cuInit"], notes.append) == []
    (note,) = notes
    assert note.startswith(f"{path} could not be searched for functions that it does not export: ")
    assert reason in note


@pytest.mark.slow
def test_what_a_library_starts_ends_with_the_search(tmp_path: Path) -> None:
    held = tmp_path / "held"
    takes = f'if (!fork()) flock(open("{held}", O_CREAT | O_WRONLY, 0600), LOCK_EX);'
    start = f"__attribute__((constructor)) static void start(void) {{ {takes} for (;;) pause(); }}"
    path = build(
        tmp_path, f"#include <fcntl.h>\n#include <sys/file.h>\n#include <unistd.h>\n{start}\n{LIBRARY}"
    )
    notes: list[str] = []
    assert handed_out(path, ["cuInit"], notes.append) == []
    assert "no answer in time" in notes[0]
    with held.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # comes back when no process holds it


def test_a_file_that_is_not_a_library_is_noted(tmp_path: Path) -> None:
    notes: list[str] = []
    for text in ("no library", None):
        path = tmp_path / "libcuda.so.1"
        path.unlink(missing_ok=True)
        if text:
            path.write_text(text)
        assert handed_out(str(path), ["cuInit"], notes.append) == []
    assert len(notes) == 2
    assert handed_out("/proc/1/root/lib/libcuda.so.1", ["cuInit"], notes.append) == []
    assert "in another container" in notes[2]


@pytest.mark.parametrize(
    "answer",
    [
        None,
        {"cuInit": 1},
        [None, 3, [], ["cuInit"], ["cuInit", 0], ["cuInit", 0, "4"], [["cuInit"], 0, 4], ["cuInit", True, 4]],
        [["cuInit", 0, 0], ["cuInit", 0, -5], ["cuInit", 0, 1 << 60], ["system", 0, 4]],
    ],
)
def test_answers_that_make_no_sense_are_left_out(
    answer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, notes = tmp_path / "libcuda.so.1", list[str]()
    path.write_bytes(bytes(4096))
    for given, found in ((answer, []), ([["cuInit", 0, 64]], [("cuInit", 64)])):
        monkeypatch.setattr(functions, "_answer", lambda *_, given=given, **__: json.dumps(given).encode())
        assert handed_out(str(path), {"cuInit"}, notes.append) == found
    assert not notes


def test_the_user_as_which_the_library_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = os.stat(build(tmp_path))
    monkeypatch.setattr(functions.os, "geteuid", lambda: 0)
    monkeypatch.setenv("SUDO_UID", "65534")
    roots = os.stat("/proc/version")
    assert functions._user(roots)["user"] == 65534
    stranger = pwd.getpwnam("daemon").pw_uid
    strangers = os.stat_result((0o100755, 1, 1, 1, stranger, stranger, 4096, 0, 0, 0))
    assert functions._user(strangers)["user"] == stranger, "nobody else runs that user's code"
    monkeypatch.setenv("SUDO_UID", "0")
    assert functions._user(roots) == {}
    for mode, group in ((0o100666, 0), (0o100664, 5)):
        with pytest.raises(ValueError, match="other users can write it"):
            functions._user(os.stat_result((mode, 1, 1, 1, 0, group, 4096, 0, 0, 0)))
    monkeypatch.setattr(functions.os, "geteuid", lambda: 1000)
    assert functions._user(own) == {}
