"""The Pythons of this machine whose frames can be read."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

VERSIONS = ("3.10", "3.11", "3.12", "3.13", "3.14", "3.15")
_ASKED = "import sys; print('%d.%d' % sys.version_info[:2])"


def interpreter(version: str) -> str | None:
    """A Python of that version on this machine, pyenv's too."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = [
        sys.executable,
        shutil.which(f"python{version}"),
        *pyenv.glob(f"versions/{version}.*/bin/python"),
    ]
    for python in filter(None, found):
        answer = subprocess.run([python, "-c", _ASKED], capture_output=True, text=True, check=False)
        if answer.stdout.strip() == version:
            return str(python)
    return None
