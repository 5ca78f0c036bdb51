"""Compiles the native core on installation, and makes the text for a package index of the README; everything
else is in pyproject.toml.

The core is no extension module: it does not know of Python, and one object is for all versions of it. A wheel
with it is py3-none-<platform>; one without, where C cannot be compiled, is py3-none-any and runs as well.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path
from types import ModuleType

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("tracepipe", "native")


def load(path: Path) -> ModuleType:
    """A module by its path: the package cannot be imported where what it needs is not installed."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def index_page(readme: str) -> str:
    """Return the README for an index page: links to files become their names, pictures are left out."""
    local = r"\((?![a-z]+:|#)([^)\s]+)\)"
    without_pictures = re.sub(rf"^!\[[^]]*\]{local}\n+", "", readme, flags=re.MULTILINE)

    def named(link: re.Match[str]) -> str:
        text, target = link.groups()
        return f"`{target}`" if text == target else f"{text} (`{target}`)"

    return re.sub(rf"\[([^]]+)\]{local}", named, without_pictures)


native = load(Path(__file__).parent / NATIVE / "build.py")


class BuildWithCore(build_py):
    """Also compiles the core: in place for an editable installation, else beside the copied sources."""

    core: Path | None = None

    def run(self) -> None:
        folder = NATIVE if self.editable_mode else Path(self.build_lib) / NATIVE
        if not self.editable_mode and folder.exists():
            shutil.rmtree(folder)  # files of an earlier build, which the core's digest would count
        super().run()
        (folder / native.NAME).unlink(missing_ok=True)
        try:
            if os.environ.get("TRACEPIPE_PURE", "0") not in ("", "0"):
                raise native.NotBuilt("TRACEPIPE_PURE is set")
            self.core = native.build(folder)
        except native.NotBuilt as e:
            self.warn(f"no native core: {e}")
            self.warn("tracepipe is installed without its native core, and runs in Python alone")

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), *([str(self.core)] if self.core else [])]


class WheelOfCore(bdist_wheel):
    """Named after what was compiled."""

    def run(self) -> None:
        self.run_command("build")
        has_core = self.get_finalized_command("build_py").core is not None
        self.root_is_pure = not has_core
        self.distribution.has_ext_modules = lambda: has_core
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        tag = super().get_tag()
        return tag if self.root_is_pure else ("py3", "none", tag[2])


setup(
    cmdclass={"build_py": BuildWithCore, "bdist_wheel": WheelOfCore},
    long_description=index_page(Path(__file__).with_name("README.md").read_text(encoding="utf-8")),
    long_description_content_type="text/markdown",
)
