"""Output formats. A new one is a file here and a line in `CONVERTERS`."""

from __future__ import annotations

from tracepipe.converters import chrome, perfetto, text
from tracepipe.converters.writer import OutputFormat

__all__ = ["CONVERTERS", "OutputFormat"]

CONVERTERS: dict[str, OutputFormat] = {
    output.name: output for output in (perfetto.FORMAT, chrome.FORMAT, text.FORMAT)
}
