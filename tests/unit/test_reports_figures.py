"""Figures: what they reckon, what they say, and that they draw little however much there is."""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.recordings import Load, event, loader, span
from tracepipe.errors import TracepipeError
from tracepipe.event.intervals import Stretches
from tracepipe.libraries import figure, matplotlib
from tracepipe.present.figures import FIGURES, exit_skew, gpu_idle, latency, occupancy
from tracepipe.present.figures.occupancy import DrawnWarps
from tracepipe.present.figures.panel import Scope, moment_text, scope_of, short
from tracepipe.present.figures.picture import inline_svg, write_picture
from tracepipe.reports import plot
from tracepipe.store.run import load_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return loader(tmp_path)


def scope(run: Any, **asked: str) -> Scope:
    return scope_of(run, asked.get("start", ""), asked.get("end", ""), asked.get("kernel", ""))


def batch(ts_ns: int, entry_ns: list[int], exit_ns: list[int], **fields: Any) -> dict[str, Any]:
    """A launch whose warps stay on SM 0, 1, 0, 1, …"""
    count = len(entry_ns)
    return {
        "ts_ns": ts_ns, "type": "gpu_warp", "name": "k", "gpu": 0, "launch": 1, "grid": [count, 1, 1],
        "block": [32, 1, 1], "warp": list(range(count)), "sm": [at % 2 for at in range(count)],
        "entry_ns": entry_ns, "exit_ns": exit_ns,
    } | fields  # fmt: skip


def drawn(sm: Sequence[int], entry_ns: list[int], end_ns: list[int]) -> DrawnWarps:
    """Warps of one kernel on a GPU."""
    none = np.zeros(len(sm), np.int64)
    columns = (np.array(column, np.int64) for column in (sm, entry_ns, end_ns))
    return DrawnWarps(*columns, gpu=none, launch=none, has_launch=none > 0, name=none, names=["k"])


warps = st.lists(
    st.tuples(st.integers(0, 3), st.integers(-20, 120), st.integers(0, 80)), min_size=1, max_size=30
)


@settings(max_examples=60)
@given(warps)
def test_a_cell_is_the_mean_number_of_warps(stays: list[tuple[int, int, int]]) -> None:
    ends_ns = [entry + length for _, entry, length in stays]
    some = drawn([sm for sm, _, _ in stays], [entry for _, entry, _ in stays], ends_ns)
    grid = occupancy.grid_of(some, 0, 100, None)
    # Second by second: a cell is one ns.
    counted = {sm: np.zeros(100) for sm, _, _ in stays}
    for sm, entry, length in stays:
        counted[sm][max(0, entry) : max(0, min(100, entry + length))] += 1
    assert grid.cell_ns == 1 and grid.sms.tolist() == sorted(counted)
    assert np.allclose(grid.level, [counted[sm] for sm in sorted(counted)])


@settings(max_examples=60)
@given(warps)
def test_the_most_at_once_is_what_counting_gives(stays: list[tuple[int, int, int]]) -> None:
    entries, ends = [entry for _, entry, _ in stays], [entry + length for _, entry, length in stays]
    some = drawn([sm for sm, _, _ in stays], entries, ends)
    most = max(
        sum(entry <= at < entry + length for sm, entry, length in stays if sm == of)
        for of in range(4)
        for at in range(-20, 200)
    )
    assert occupancy.fullest_sm(some)[0] == most


def test_cells_are_means_where_they_are_long() -> None:
    frame = drawn([0, 0], [0, 2_400], [4_800, 2_410])
    grid = occupancy.grid_of(frame, 0, 4_800, None)
    assert grid.level.shape == (1, 480) and grid.cell_ns == 10
    assert (grid.level[0, 240], grid.level[0, 239], grid.level.sum()) == (2, 1, 481)


@pytest.mark.slow
def test_centuries_are_drawn_too(load: Load) -> None:
    length_ns = 1 << 60
    frame = drawn([0, 0], [0, length_ns // 2], [length_ns, length_ns])
    level = occupancy.grid_of(frame, 0, length_ns, None).level[0]
    assert np.allclose(level[:240], 1) and np.allclose(level[240:], 2)
    run = load(batch(0, [0, 1 << 58], [1 << 59, 1 << 59]), span(1_000, 1 << 60, "sleep"))
    for _, panels in FIGURES.values():
        assert all(inline_svg(panel) for panel in panels(scope(run)) if panel.draw)


def test_idle_sms_are_rows_unless_most_are_idle() -> None:
    few = drawn([0, 9], [0, 0], [10, 10])
    assert occupancy.grid_of(few, 0, 10, 132).sms.tolist() == [0, 9]
    assert occupancy.grid_of(few, 0, 10, None).sms.tolist() == [0, 9]
    most = drawn([0, 2, 3], [0] * 3, [10] * 3)
    assert occupancy.grid_of(most, 0, 10, 4).sms.tolist() == [0, 1, 2, 3]


def test_sms_without_end_make_no_picture_without_end() -> None:
    frame = drawn(range(5_000), [0] * 5_000, [10] * 5_000)
    grid = occupancy.grid_of(frame, 0, 10, None)
    assert len(grid.sms) == len(grid.level) <= occupancy.ROWS_MAX
    assert np.allclose(grid.level, 1)


def test_stretches_that_are_near_are_one_picture() -> None:
    busy = Stretches(np.array([0, 150, 1_000]), np.array([100, 250, 1_010]))
    assert occupancy.bursts(busy) == [(0, 250), (1_000, 1_010)]


def test_titles_state_what_there_is(load: Load) -> None:
    run = load(
        batch(2_000, [0, 0, 10, 10], [100, 100, 90, 290]),
        span(1_100, 1_200, "cudaMalloc"),
        span(1_300, 1_310, "cudaFree"),
        span(1_000, 2_000, "k", "gpu_kernel", gpu=0),
        span(6_000, 7_000, "k", "gpu_kernel", gpu=0),
    )
    found = {name: [panel.title for panel in panels(scope(run))] for name, (_, panels) in FIGURES.items()}
    assert found == {
        "heatmap": ["GPU 0: k, launch 1: 4 warps on 2 SMs in 300 ns, at most 2 at a time on one SM"],
        "skew": ["k: 4 warps exit within 200 ns; the lanes of each exit together"],
        "latency": [
            "CUDA API calls: half of 2 take at most 10 ns, 1 in 100 100 ns or more",
            "No system calls were recorded",
            "No driver functions were recorded",
        ],
        "gaps": [
            "GPU 0: idle for 3.70 µs of the 6.00 µs from its first to its last work (61.7%); "
            "1 gap, longest 3.70 µs"
        ],
    }


def test_the_strip_of_an_idle_gpu_is_as_dark_as_it_is_busy() -> None:
    starts_ns = np.arange(960, dtype=np.int64) * 1_000
    # Each cell has 80 ns of work in its 1000, but for the last, which is busy throughout.
    stretches = Stretches(starts_ns, starts_ns + np.where(starts_ns == 959_000, 1_000, 80))
    shades = gpu_idle._shades(stretches, 0, 960_000)
    assert 0.1 < shades[0] < 0.3
    assert shades[-1] == 1
    assert gpu_idle._shades(Stretches(starts_ns[:1], starts_ns[:1] + 10), 0, 960_000)[1:].max() == 0


@pytest.mark.parametrize("layer", ["userspace", "syscall", "kernel"])
def test_calls_inside_one_that_never_returned_are_drawn(load: Load, layer: str) -> None:
    run = load(event("B", 1_100, "outer", layer), span(1_200, 1_250, "inner", layer))
    (panel,) = [one for one in latency.panels(scope(run)) if one.draw]
    assert panel.title.endswith(": the only one takes 50 ns")
    assert inline_svg(panel)
    assert [one.draw for one in latency.panels(scope(run, start="160ns", end="190ns"))] == [None] * 3


def test_lanes_that_exit_apart_are_reported(load: Load) -> None:
    run = load(batch(2_000, [0, 0], [50, 80, 60], exit_count=[2, 1], exit_mask=[1, 4294967294, 4294967295]))
    assert [panel.title for panel in exit_skew.panels(scope(run))] == [
        "k: 2 warps exit within 30 ns; in 1 of them the lanes exit up to 30 ns apart"
    ]


def test_a_stretch_and_a_kernel_are_chosen(load: Load) -> None:
    run = load(
        batch(2_000, [0, 0], [100, 100]),
        batch(9_000, [0, 0], [50, 50], name="other", launch=2),
        span(1_100, 1_200, "early"),
        span(8_000, 8_100, "late"),
    )
    late = scope(run, start="7us", end="9us")
    assert [panel.title for panel in occupancy.panels(late)] == [
        "GPU 0: other, launch 2: 2 warps on 2 SMs in 2.00 µs, at most 1 at a time on one SM"
    ]
    assert latency.panels(late)[0].title == "CUDA API calls: the only one takes 100 ns"
    assert [panel.title for panel in exit_skew.panels(late)] == [
        "other: 2 warps exit within 0 ns from 7.00 µs to 9.00 µs; the lanes of each exit together"
    ]
    assert "other" in occupancy.panels(scope(run, kernel="^oth"))[0].title
    for panels in (occupancy.panels, exit_skew.panels):
        assert [panel.draw for panel in panels(scope(run, kernel="none"))] == [None]
    assert gpu_idle.panels(scope(run, start="4us", end="5us"))[0].title.startswith("No work on a GPU")
    with pytest.raises(TracepipeError, match="regular expression"):
        scope(run, kernel="(")
    with pytest.raises(TracepipeError, match="The stretch from"):
        scope(run, start="2us", end="1us")


def test_many_stretches_and_kernels_are_left_out_in_words(load: Load) -> None:
    launches = [batch(2_000 + at * 10_000, [0], [10], name=f"k{at}", launch=at) for at in range(9)]
    run = load(*launches)
    assert occupancy.panels(scope(run))[-1].title.startswith("GPU 0: 5 more stretches")
    assert exit_skew.panels(scope(run))[-1].title == "3 more kernels, with fewer warps, are not drawn"
    gpus = [batch(2_000, [0], [10], gpu=at, launch=at) for at in range(20)]
    assert occupancy.panels(scope(load(*gpus)))[-1].title == "4 more GPUs, with less work, are not drawn"


def count_artists(panel: Any) -> int:
    whole = figure.Figure()
    panel.draw(whole)
    return len(whole.findobj())


@pytest.mark.slow
def test_pictures_of_many_warps_have_few_things_in_them(load: Load) -> None:
    count = 20_000
    rng = np.random.default_rng(0)
    stays = rng.integers(1_000, 2_000, count).tolist()
    halves = [at for stay in stays for at in (stay // 2, stay)]
    entries = rng.integers(0, 9_000, count).tolist()
    run = load(batch(2_000, entries, halves, exit_count=[2] * count), *(
        span(100_000 + at * 10, 100_001 + at * 10 + at % 7, f"f{at % 50}") for at in range(3_000)
    ))  # fmt: skip
    for name, (_, panels) in FIGURES.items():
        drawn = [panel for panel in panels(scope(run)) if panel.draw]
        assert drawn, name
        assert max(count_artists(panel) for panel in drawn) < 1_000, name


@pytest.mark.slow
def test_panels_stand_below_each_other(load: Load) -> None:
    panels = occupancy.panels(scope(load(batch(2_000, [0, 5], [100, 90]))))
    made = {}
    for count in (1, 3):
        for ending in ("png", "svg"):
            out = io.BytesIO()
            write_picture(panels * count, ending, out)
            made[ending, count] = out.getvalue()
    heights = [
        matplotlib.image.imread(io.BytesIO(made["png", count]), format="png").shape[0] for count in (1, 3)
    ]
    assert heights[1] == 3 * heights[0]
    whole = ElementTree.fromstring(made["svg", 3])
    nested = whole.findall("{http://www.w3.org/2000/svg}svg")
    at = [float(one.get("y", "")) for one in nested]
    assert at == [0, at[1], 2 * at[1]] and float(whole.get("height", "")) == pytest.approx(3 * at[1], abs=2)


ODD = "$\\frac{$ <script>alert(1)</script> \u4e2d\x00" + "x" * 300


@pytest.mark.slow
@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_names_are_drawn_as_they_are(load: Load, ending: str) -> None:
    run = load(batch(2_000, [0, 5], [100, 90], name=ODD), span(1_100, 1_200, ODD), span(1_300, 1_400, "b"))
    out = io.BytesIO()
    plot.run(run, plot.Options()).files[ending](out)
    if ending == ".png":
        assert out.getvalue().startswith(b"\x89PNG")
        return
    tree = ElementTree.fromstring(out.getvalue())
    tags = {element.tag.rpartition("}")[2] for element in tree.iter()}
    assert "script" not in tags and "path" in tags
    assert not any(
        "://" in value for element in tree.iter() for key, value in element.attrib.items() if "href" in key
    )


def test_an_empty_picture_has_a_note(load: Load) -> None:
    out = io.BytesIO()
    result = plot.run(load(), plot.Options())
    assert len(result.notes) == 6 and all(note.startswith("No ") for note in result.notes)
    result.files[".png"](out)
    assert out.getvalue().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_run_is_the_same_file(load: Load) -> None:
    panels = occupancy.panels(scope(load(batch(2_000, [0, 5], [100, 90]))))
    files = []
    for _ in range(2):
        out = io.BytesIO()
        write_picture(panels, "svg", out)
        files.append(out.getvalue())
    assert files[0] == files[1]
    svg = inline_svg(panels[0])
    assert svg.startswith("<svg") and "var(--ink)" in svg and "#1f2430" not in svg


@pytest.mark.parametrize(
    "case",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("gpu-h200", "capture-standin")),
        "warps-slots",
        "losses",
    ],
)
def test_fixtures_are_drawn(case: str) -> None:
    run = load_run(str(ROOT / "fixtures" / case / "input.jsonl"))
    for _, panels in FIGURES.values():
        for panel in panels(scope(run)):
            assert panel.title and (panel.draw is None or (panel.how.endswith(".") and panel.height_in > 0))
            if panel.draw:
                assert inline_svg(panel).count("<path") >= 3


def test_labels_fit() -> None:
    assert short("k" * 200, 20) == "k" * 13 + "…" + "k" * 6
    assert short("kernel", 20) == "kernel"
    assert [moment_text(676_963_123, 2_000), moment_text(0, 5), moment_text(5_000_000, 10**9)] == [
        "676.963 ms", "0 ns", "5 ms",
    ]  # fmt: skip
