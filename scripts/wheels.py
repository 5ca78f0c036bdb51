"""Builds the distributions of a release, checks them, and tries them where nothing else is installed.

    python scripts/wheels.py [--out dist] [--any-tree]

It builds the last commit from a separate copy: a source distribution, and from that three wheels, with the
native core for x86_64 and for aarch64, and without it. All have the commit's time, so a commit gives the same
files again with the same compilers. The tools are installed into .venv-release, which is kept. Nothing is
written to `--out` unless everything passed.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TOOLS = ROOT / ".venv-release"
TOOL_PACKAGES = (
    "build==1.6.1",
    "check-wheel-contents==0.6.3",
    "pyelftools==0.33",
    "setuptools==84.2.1",
    "twine==7.0.0",
)
BUILD = (TOOLS / "bin" / "python", "-m", "build", "-q", "--no-isolation")
GLIBC = (2, 28)
"""The oldest C library that the wheels promise to run with: that of Debian 10 and RHEL 8."""
MACHINES = {
    "x86_64": ("x86_64-linux-gnu-gcc", "EM_X86_64", "apt install gcc libc6-dev"),
    "aarch64": (
        "aarch64-linux-gnu-gcc",
        "EM_AARCH64",
        "apt install gcc-aarch64-linux-gnu libc6-dev-arm64-cross",
    ),
}
CORE = "tracepipe/native/core.so"
SIGNATURES = "tracepipe/native/signatures.py"
SAMPLE = "fixtures/capture-h200/input.jsonl"
INSTALLED_MB_MAX = 210
REPORTS = ("summary", "gaps", "layers", "memory", "timeline", "lines", "annotations", "stalls")
# In a source distribution besides the package.
EXPECTED = {
    "CHANGELOG.md",
    "LICENSE",
    "Makefile",
    "SECURITY.md",
    "docs/format.md",
    "docs/images/warps.png",
    "fixtures/capture-h200/input.jsonl",
    "schemas/event.schema.json",
    "scripts/wheels.py",
    "tests/conftest.py",
    "tracepipe/native/build.py",
}


class Unfit(Exception):
    """The reason why there is no release."""


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def run(command: Sequence[str | Path], folder: Path = ROOT, environment: dict[str, str] | None = None) -> str:
    """Run a command and return what it prints. Raises Unfit if it fails."""
    done = subprocess.run(
        list(map(str, command)), cwd=folder, env=environment, text=True, capture_output=True, check=False
    )
    if done.returncode:
        shown = " ".join(map(str, command))
        raise Unfit(f"{shown}: exit code {done.returncode}\n{done.stdout}{done.stderr}".rstrip())
    return done.stdout


def tool(name: str) -> Path:
    return TOOLS / "bin" / name


def install_tools() -> None:
    marker = TOOLS / "packages"
    wanted = "\n".join(TOOL_PACKAGES)
    if marker.is_file() and marker.read_text() == wanted:
        return
    venv.create(TOOLS, with_pip=True, clear=True)
    run([tool("python"), "-m", "pip", "install", "-q", *TOOL_PACKAGES])
    marker.write_text(wanted)


def compiler(machine: str) -> str:
    """The command that compiles for a machine. Raises Unfit."""
    name, _, install = MACHINES[machine]
    for one in (name, "gcc" if machine == platform.machine() else name):
        if shutil.which(one):
            return one
    raise Unfit(f"no {name}, which compiles the core for {machine}: {install}")


def committed(folder: Path, any_tree: bool) -> int:
    """Copy the last commit into a folder, and return its time."""
    if not any_tree and run(["git", "status", "--porcelain", "--untracked-files=no"]):
        raise Unfit("there are changes that no commit has: commit them, or give --any-tree")
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, check=True, capture_output=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder)
    return int(run(["git", "log", "-1", "--format=%ct"]))


def build_source(tree: Path, out: Path, when: int, environment: dict[str, str]) -> Path:
    """Build the source distribution: its members are in order, without owner, with one time."""
    run([*BUILD, "--sdist", "-o", out, tree], tree, environment)
    (path,) = out.glob("*.tar.gz")
    plain = io.BytesIO()
    with tarfile.open(path) as given, tarfile.open(fileobj=plain, mode="w") as made:
        for member in sorted(given.getmembers(), key=lambda one: one.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = when, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
        names = {member.name.partition("/")[2] for member in given.getmembers()}
    if missing := EXPECTED - names:
        raise Unfit(f"{path.name} lacks {', '.join(sorted(missing))}")
    if CORE in names:
        raise Unfit(f"{path.name} has {CORE}, which belongs to one machine")
    with path.open("wb") as file, gzip.GzipFile(fileobj=file, mode="wb", filename="", mtime=when) as packed:
        packed.write(plain.getvalue())
    return path


def build_wheel(source: Path, machine: str, out: Path, environment: dict[str, str]) -> Path:
    """Build the wheel of a source distribution, with the core for a machine, or without it if that is ""."""
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(source) as archive:
            archive.extractall(folder)
        (tree,) = Path(folder).iterdir()
        command: list[str | Path] = [*BUILD, "--wheel", "-o", out]
        how = {"TRACEPIPE_PURE": "1"}
        tag = "any"
        if machine:
            how = {"CC": compiler(machine)}
            tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
            command.append(f"--config-setting=--build-option=--plat-name={tag}")
        run([*command, tree], tree, environment | how)
    found = list(out.glob(f"*-py3-none-{tag}.whl"))
    if not found:
        raise Unfit(f"no wheel py3-none-{tag}; there is {', '.join(path.name for path in out.glob('*.whl'))}")
    return found[0]


def check_core(wheel: Path, machine: str) -> str:
    """Check what the core of a wheel needs. Raises Unfit if it is more than the wheel's name promises."""
    with zipfile.ZipFile(wheel) as archive:
        if not machine:
            if CORE in archive.namelist():
                raise Unfit(f"{wheel.name} has a core")
            return "no core"
        content = archive.read(CORE)
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(content)
        file.flush()
        lines = run([tool("python"), "-c", NEEDS, file.name]).split("\n")
    built_for, needed, versions = lines[0], lines[1].split(), lines[2].split()
    if built_for != MACHINES[machine][1]:
        raise Unfit(f"the core of {wheel.name} is for {built_for}")
    if strange := set(needed) - {"libc.so.6", "libm.so.6", *LOADERS}:
        raise Unfit(f"the core of {wheel.name} needs {', '.join(sorted(strange))}")
    newest = max((tuple(map(int, re.findall(r"\d+", one))) for one in versions), default=(0,))
    if newest > GLIBC or not all(one.startswith("GLIBC_") for one in versions):
        raise Unfit(f"the core of {wheel.name} needs {' '.join(versions)}")
    return f"core for {machine}, needs {' '.join(needed)} up to GLIBC_{'.'.join(map(str, newest))}"


LOADERS = ("ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1")
# Prints the machine of an ELF file, the libraries that it needs, and the versions of their symbols.
NEEDS = """
import sys
from elftools.elf.elffile import ELFFile
with open(sys.argv[1], "rb") as file:
    elf = ELFFile(file)
    print(elf["e_machine"])
    print(*(tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")))
    needs = elf.get_section_by_name(".gnu.version_r").iter_versions()
    print(*(version.name for _, versions in needs for version in versions))
"""


class Trial:
    """A separate environment without a compiler on its path, in which wheels are installed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=True)
        self.bin = folder / "venv" / "bin"
        kept = ("HOME", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "http_proxy", "https_proxy", "no_proxy")
        self.environment = {name: os.environ[name] for name in kept if name in os.environ}
        self.environment |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment |= {"PATH": str(self.bin), "TMPDIR": str(folder)}
        self.before_mb = self.installed_mb()

    def pip(self, *argv: str | Path) -> None:
        run([self.bin / "python", "-m", "pip", "install", "-q", *argv], self.folder, self.environment)

    def tracepipe(self, *argv: str | Path) -> str:
        return run([self.bin / "tracepipe", *argv], self.folder, self.environment)

    def installed_mb(self) -> int:
        (packages,) = self.bin.parent.glob("lib/python*/site-packages")
        return sum(path.lstat().st_blocks for path in packages.rglob("*")) * 512 // 10**6

    def converted(self) -> bytes:
        self.tracepipe("convert", ROOT / SAMPLE, "-o", "trial.pftrace", "--force")
        return (self.folder / "trial.pftrace").read_bytes()


def try_installed(native: Path, pure: Path, folder: Path) -> None:
    """Install wheels in an empty environment, and convert and report there."""
    trial = Trial(folder)
    trial.pip("--only-binary", ":all:", native)
    version = trial.tracepipe("--version").strip()
    if "(native core, " not in version:
        raise Unfit(f"{native.name} runs without its core: {version}")
    by_core = trial.converted()
    for report in REPORTS:
        if not trial.tracepipe(report, ROOT / SAMPLE).strip():
            raise Unfit(f"tracepipe {report} prints nothing")
    trial.tracepipe("export", ROOT / SAMPLE, "-o", "tables")
    taken = trial.installed_mb() - trial.before_mb
    if taken > INSTALLED_MB_MAX:
        raise Unfit(f"{taken} MB are installed, which is more than {INSTALLED_MB_MAX}")
    say(f"installed  {native.name}: {version}; converts, reports; {taken} MB with all that it needs")
    trial.pip("--no-deps", "--force-reinstall", pure)
    version = trial.tracepipe("--version").strip()
    if "(pure Python: " not in version or trial.converted() != by_core:
        raise Unfit(f"{pure.name} does not do the same as the core: {version}")
    say(f"installed  {pure.name}: {version}; converts to the same bytes")


def try_emulated(wheel: Path, machine: str, folder: Path) -> str:
    """Load the core of another machine under QEMU, and ask it for every function that Python calls."""
    emulator = shutil.which(f"qemu-{machine}-static") or shutil.which(f"qemu-{machine}")
    if emulator is None:
        return f"not loaded: no qemu-{machine}-static (apt install qemu-user-static)"
    with zipfile.ZipFile(wheel) as archive:
        archive.extract(CORE, folder)
    program, asked = folder / "load_core", folder / "load_core.c"
    asked.write_text(LOAD_CORE)
    run([compiler(machine), "-O1", asked, "-ldl", "-o", program])
    names = re.findall(r'^    "(tp_\w+)": ', (ROOT / SIGNATURES).read_text(encoding="utf-8"), re.MULTILINE)
    if not names:
        raise Unfit(f"{SIGNATURES} names no function")
    core = folder / CORE
    made_by = run([emulator, "-L", f"/usr/{machine}-linux-gnu", program, core, *names]).strip()
    return f"loaded under QEMU: {made_by}, {len(names)} functions"


LOAD_CORE = r"""
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    void *core = dlopen(argv[1], RTLD_NOW);
    if (!core)
        return fprintf(stderr, "%s\n", dlerror()), 1;
    for (int i = 2; i < argc; i++)
        if (!dlsym(core, argv[i]))
            return fprintf(stderr, "%s\n", dlerror()), 1;
    const char *(*compiler)(void) = (const char *(*)(void))dlsym(core, "tp_compiler");
    return compiler ? puts(compiler()) < 0 : 1;
}
"""


def check_changelog() -> str:
    """The version to build. Raises Unfit if the changelog does not have it."""
    init = (ROOT / "tracepipe" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "(.+)"$', init, re.MULTILINE)
    assert found is not None
    if f"\n## [{found[1]}] - " not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise Unfit(f"CHANGELOG.md has no part for {found[1]}")
    return found[1]


def release(out: Path, any_tree: bool, folder: Path) -> None:
    version = check_changelog()
    install_tools()
    for machine in MACHINES:
        compiler(machine)
    tree, made = folder / "tree", folder / "made"
    tree.mkdir()
    made.mkdir()
    when = committed(tree, any_tree)
    clean = {name: value for name, value in os.environ.items() if name not in BUILD_VARIABLES}
    environment = clean | {"SOURCE_DATE_EPOCH": str(when), "LC_ALL": "C.UTF-8"}
    source = build_source(tree, made, when, environment)
    wheels = {machine: build_wheel(source, machine, made, environment) for machine in (*MACHINES, "")}
    for machine, wheel in wheels.items():
        say(f"built      {wheel.name}: {wheel.stat().st_size >> 10} KiB, {check_core(wheel, machine)}")
    say(f"built      {source.name}: {source.stat().st_size >> 10} KiB")
    files = sorted(made.iterdir())
    run([tool("twine"), "check", "--strict", *files])
    say(f"checked    twine check --strict: {len(files)} files")
    run([tool("check-wheel-contents"), *wheels.values()])
    say(f"checked    check-wheel-contents: {len(wheels)} wheels")
    here = platform.machine()
    for machine in MACHINES:
        if machine != here:
            say(f"tried      {wheels[machine].name}: {try_emulated(wheels[machine], machine, folder)}")
    if here in MACHINES:
        try_installed(wheels[here], wheels[""], folder)
    out.mkdir(parents=True, exist_ok=True)
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    for path in files:
        shutil.copy2(path, out)
    (out / "SHA256SUMS").write_text(sums)
    say(f"wrote      {out}: tracepipe {version}, {len(files)} files and SHA256SUMS")


# Variables that would change what is compiled.
BUILD_VARIABLES = ("CC", "CPPFLAGS", "CFLAGS", "LDFLAGS", "TRACEPIPE_PURE", "PYTHONPATH")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="the folder of the results")
    parser.add_argument("--any-tree", action="store_true", help="leave out changes that no commit has")
    given = parser.parse_args()
    os.umask(0o022)
    try:
        with tempfile.TemporaryDirectory(prefix="tracepipe-release-") as folder:
            release(given.out.resolve(), given.any_tree, Path(folder))
    except Unfit as e:
        sys.stderr.write(f"wheels: {e}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
