"""What a child process needs to run the program that is tested."""

from __future__ import annotations

import os
from pathlib import Path

PYTHONPATH = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]))
"""The repository first, and what this process has: on some machines its packages come that way."""
