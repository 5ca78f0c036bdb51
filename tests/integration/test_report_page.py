"""The page of `tracepipe report` in headless Chromium without a network: it loads, shows figures, prints."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.devtools import Page, find_chromium
from tests.support.recordings import HEADER, span

pytestmark = pytest.mark.browser

_FIXTURES = Path(__file__).parents[2] / "fixtures"
_EVIL = "</style><script>alert('$x^')</script><img src=http://127.0.0.1/ onerror=alert(1)>"
_FIGURES = """[...document.querySelectorAll('figure svg')].map(svg => {
  const box = svg.getBoundingClientRect(), drawn = svg.querySelector('g').getBBox();
  const beyond = [...svg.querySelectorAll('text')].map(text => text.getBoundingClientRect())
    .filter(text => text.left < box.left - 1 || text.right > box.right + 1
                 || text.top < box.top - 1 || text.bottom > box.bottom + 1);
  return {width: box.width, height: box.height, drawn: drawn.width * drawn.height,
          paths: svg.querySelectorAll('path').length, beyond: beyond.length};
})"""
_IMAGES = """Promise.all([...document.querySelectorAll('figure svg image')].map(image => new Promise(done => {
  const loaded = new Image();
  loaded.onload = loaded.onerror = () => done(loaded.naturalWidth);
  loaded.src = image.getAttribute('xlink:href');
})))"""


@pytest.fixture
def page() -> Iterator[Page]:
    chromium = find_chromium()
    assert chromium
    with Page(chromium, 1200, 900) as page:
        page.watch()
        yield page


def _written(recording: Path, html: Path) -> Path:
    command = [sys.executable, "-m", "tracepipe", "report", str(recording), "-o", str(html)]
    subprocess.run(command, check=True, capture_output=True)
    return html


def _open(page: Page, html: Path) -> None:
    page.navigate(html.as_uri())
    page.wait_until("document.readyState == 'complete' && document.querySelector('main')", 30)


def _colour(page: Page, element: str, of: str) -> list[int]:
    text = page.run(f"getComputedStyle(document.querySelector({json.dumps(element)})).{of}")
    return [int(value) for value in text[text.index("(") + 1 : -1].split(",")[:3]]


@pytest.mark.parametrize("width", [1400, 400])
def test_a_page_shows_its_figures_offline(
    page: Page, tmp_path: Path, picture: Callable[[str], Path], width: int
) -> None:
    html = _written(_FIXTURES / "gpu-h200" / "input.jsonl", tmp_path / "report.html")
    page.resize(width, 900)
    _open(page, html)
    assert [url for url in page.requests if not url.startswith("data:")] == [html.as_uri()]
    assert page.exceptions + page.complaints == []
    assert page.run("[...document.querySelectorAll('h2')].map(one => one.innerText)") == [
        "Summary", "When GPUs are idle", "Steps", "Idle GPUs and what the CPU did", "Warps and findings",
        "Memory", "All tables", "Warps on the SMs over time", "When the warps of a kernel exit",
        "How long calls take", "Recording, losses and clocks",
    ]  # fmt: skip
    figures = page.run(_FIGURES)
    assert len(figures) == 8
    for figure in figures:
        assert figure["width"] > 0.9 * min(width, 1200) - 100 and figure["height"] > 60
        assert figure["drawn"] > 10_000 and figure["paths"] >= 5
        assert figure["beyond"] == 0, "a label is cut off"
    sizes = page.run(_IMAGES)
    assert len(sizes) >= 5 and all(size > 0 for size in sizes)
    assert page.run("document.documentElement.scrollWidth") <= width, "the page is wider than the window"
    page.resize(width, page.run("document.documentElement.scrollHeight"))
    picture(f"report-{width}").write_bytes(page.screenshot())


def test_a_page_follows_light_and_dark_and_prints(page: Page, tmp_path: Path) -> None:
    html = _written(_FIXTURES / "gpu-h200" / "input.jsonl", tmp_path / "report.html")
    for scheme, is_dark in (("dark", True), ("light", False)):
        page.prefer(scheme)
        _open(page, html)
        paper, ink = _colour(page, "html", "backgroundColor"), _colour(page, "figure svg text", "fill")
        assert (sum(paper) < 200, sum(ink) > 500) == (is_dark, is_dark)
    pdf = base64.b64decode(page.call("Page.printToPDF", printBackground=True)["data"])
    assert pdf.startswith(b"%PDF") and len(pdf) > 50_000


def test_a_page_of_a_hostile_recording_runs_nothing(page: Page, tmp_path: Path) -> None:
    warps = {
        "ts_ns": 2_000, "type": "gpu_warp", "name": "<script>", "gpu": 0, "launch": 1, "grid": [2, 1, 1],
        "block": [32, 1, 1], "warp": [0, 1], "sm": [0, 1], "entry_ns": [0, 0], "exit_ns": [50, 80],
    }  # fmt: skip
    lines = [
        HEADER | {"command": [_EVIL]},
        warps,
        span(1_100, 1_200, _EVIL),
        span(2_000, 2_100, "<script>", "gpu_kernel"),
    ]
    recording = tmp_path / "run.jsonl"
    recording.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _open(page, _written(recording, tmp_path / "report.html"))
    assert page.exceptions + page.complaints == []
    assert len(page.requests) == 1 + sum(url.startswith("data:") for url in page.requests)
    assert page.run("document.querySelectorAll('script, img, figure svg script').length") == 1
    tables = "document.querySelectorAll('#all-tables table.sorts')"
    first_rows = f"[...{tables}].map(table => table.rows[1].innerText)"
    before = page.run(first_rows)
    click = f"{tables}.forEach(table => table.querySelector('th button').click())"
    page.run(click), page.run(click)
    assert page.run(first_rows) != before
    assert page.run("document.querySelector('#heatmap h3').innerText") == (
        "GPU 0: <script>, launch 1: 2 warps on 2 SMs in 80 ns, at most 1 at a time on one SM"
    )
