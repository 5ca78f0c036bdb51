"""The page of a recording: what it gathers, and that nothing of a recording becomes markup."""

from __future__ import annotations

import io
import json
import re
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.support.recordings import HEADER, PAIR, event, loader, span
from tracepipe.printable import printable
from tracepipe.reports import REPORTS, plot
from tracepipe.reports.report import Result
from tracepipe.store.run import Run, load_run

ROOT = Path(__file__).parents[2]
NAMING = ("href", "src", "xlink:href", "action", "data")
EVIL = "</style></title><script>alert('$x^')</script>"
ALLOWED_URLS = ("http://www.w3.org/", "data:image/png;base64,", "#")


class Seen(HTMLParser):
    """The tags of a page, its attributes that name other things, its headings and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.names: list[str] = []
        self.handlers: list[str] = []
        self.headings: list[str] = []
        self.text: list[str] = []
        self._in = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self._in = tag
        self.names += [value or "" for key, value in attrs if key in NAMING]
        self.handlers += [key for key, _ in attrs if key.startswith("on")]

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._in in ("h1", "h2", "h3") and data.strip():
            self.headings.append(data.strip())

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


def page_of(result: Result) -> str:
    out = io.BytesIO()
    result.files[".html"](out)
    return out.getvalue().decode()


def report(run: Run, **options: Any) -> str:
    """The page of `tracepipe report`."""
    return page_of(REPORTS["report"].run(run, REPORTS["report"].options(**options)))


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A recording whose names are all markup."""
    return named(EVIL, tmp_path_factory.mktemp("evil"))


@pytest.fixture(scope="module")
def evil_page(evil: Run) -> str:
    """Its page."""
    return report(evil)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The page of a recording with a plain name."""
    return Seen(report(named("plain", tmp_path_factory.mktemp("plain"))))


def named(name: str, tmp_path: Path) -> Run:
    """A recording in which everything has that name."""
    header = HEADER | {"command": [name, "--x=<img src=x onerror=alert(1)>"], "host": name, "engine": name}
    header["gpus"] = [{"index": 0, "name": name, "sms": 2}]
    warps = {
        "ts_ns": 2_000, "type": "gpu_warp", "name": name, "gpu": 0, "launch": 1, "grid": [2, 1, 1],
        "block": [32, 1, 1], "warp": [0, 1], "sm": [0, 1], "entry_ns": [0, 0], "exit_ns": [50, 80],
    }  # fmt: skip
    lines = [
        header, warps, span(1_100, 1_200, name, comm=name), span(1_100, 1_150, name, "syscall"),
        span(1_100, 1_120, name, "kernel"),
        event("I", 1_300, name, "memory", args={"size": 5, "address": name}),
        span(2_000, 2_100, name, "gpu_kernel", gpu=0), {"type": "loss", "layer": "userspace", "count": 7},
        event("B", 1_400, name, clock=name), {"type": "loss", "layer": name, "count": 3}, {"type": name},
    ]  # fmt: skip
    path = tmp_path / "<b>.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines) + "{<script>\n")
    return load_run(str(path))


@pytest.mark.slow
def test_nothing_of_a_recording_is_markup(evil: Run, evil_page: str) -> None:
    for page in (evil_page, page_of(plot.run(evil, plot.Options()))):
        seen = Seen(page)
        assert not seen.tags & {"img", "iframe", "object", "link", "b", "form", "base"}
        assert page.count("<script") == page.count("</script>") == ("table.sorts" in page)
        assert seen.handlers == []
        assert all(name.startswith(ALLOWED_URLS) for name in seen.names)
        assert page.count("<style>") == 1 and page.count("</title>") == 1
        assert page.count("&lt;script&gt;alert(") > 5
        assert "default-src 'none'" in page
        assert "url(http" not in page and "@import" not in page


# Each takes a second, in which all pictures are drawn.
NAMES = [
    "--><img src=x onerror=alert(1)><!--", "\x00\x1b[2J\x9b<b>",
    "<b>" * 20_000, "\" onmouseover=\"alert(1)",
    "</script><script>alert(1)</script>", "]]></svg><script>", "</pre></td></figure><script>",
    "\u2028\u2029\x85\u202e", "x" * 100_000, "&lt;script&gt;&#60;", "' onclick='alert(1)",
    "{{ 7 * 7 }}{% raw %}", "javascript:alert(1)", "&#x0;", "\\u003cscript\\u003e",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES, ids=lambda name: ascii(name[:20]))
def test_a_name_is_text_whatever_it_is(name: str, plain: Seen, tmp_path: Path) -> None:
    page = report(named(name, tmp_path))
    seen = Seen(page)
    assert (seen.tags, seen.handlers) == (plain.tags, [])
    assert all(value.startswith(ALLOWED_URLS) for value in seen.names)
    assert {letter for letter in page if not letter.isprintable()} == {"\n"}
    assert (
        "<!--" not in page and page.count("default-src 'none'; style-src 'unsafe-inline'; img-src data:") == 1
    )
    assert printable(name) in "".join(seen.text)


@pytest.mark.slow
def test_the_page_gathers_reports_and_pictures() -> None:
    run = load_run(str(ROOT / "fixtures" / "gpu-h200" / "input.jsonl"))
    page = report(run)
    seen = Seen(page)
    headings = [heading for heading in seen.headings if not heading.startswith("GPU 0")]
    in_order = (
        "Report: record", "Summary", "When GPUs are idle", "Steps", "Idle GPUs and what the CPU did",
        "Warps and findings", "Findings", "Memory", "All tables", "Warps on the SMs over time",
        "How long calls take", "Recording, losses and clocks",
    )  # fmt: skip
    assert [heading for heading in headings if heading in in_order] == [*in_order]
    assert [name for name in seen.names if name.startswith("#") and f'id="{name[1:]}"' not in page] == []
    text = "".join(seen.text)
    assert "In 768 of 768 warps the lanes exit at different times" in text
    assert "clock globaltimer:0: 5 pairs, drift +2.792 ppm, within 1000 ns of monotonic" in text
    assert "no events are known to be lost" in text
    assert page.count("<figure>") == page.count("<svg") == 8
    assert f'title="{run.kernels.sum("dur_ns").fetchall()[0][0]:,} ns"' in page


def test_losses_stand_at_the_top(evil_page: str) -> None:
    page = evil_page
    lost = page.index("lost: 7 userspace events happened and were not recorded")
    heading = page.index("Recording, losses and clocks</h2>")
    assert heading < lost < page.index("Contents</summary>")
    assert "no events are known to be lost" not in page
    assert page.index("all times are on one clock, monotonic") < page.index("Contents</summary>")


def test_what_was_not_recorded_has_no_section(tmp_path: Path) -> None:
    page = report(loader(tmp_path)(PAIR, span(1_100, 1_200, "cuInit")))
    seen = Seen(page)
    assert page.count("<figure>") == 1
    assert "Warps and findings" not in seen.headings and "Warps on the SMs over time" not in seen.headings
    text = "".join(seen.text)
    assert "No warps" not in text and "cuInit" in text


def test_advice_for_the_terminal_is_not_on_the_page(tmp_path: Path) -> None:
    calls = [span(1_000 + at, 1_000 + at + 1, f"cuCall{at}") for at in range(0, 40, 2)]
    text = "".join(Seen(report(loader(tmp_path)(*calls), top=3)).text)
    assert "are not listed" in text and "--top" not in text


def test_only_the_script_of_the_page_may_run(evil_page: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", evil_page, re.DOTALL)
    stated = b64encode(sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{stated}'\"" in evil_page


@pytest.mark.slow
def test_the_pictures_of_a_kernel_are_chosen() -> None:
    run = load_run(str(ROOT / "fixtures" / "gpu-h200" / "input.jsonl"))
    page = report(run, kernel="^vector")
    assert page.count("<figure>") == 5
    assert "vectorAdd, launch 3" in page and "threeReturns, launch" not in page
