"""Opens a trace in the real Perfetto UI in headless Chromium, offline: what it saw, and a picture.

python -m tests.support.browser TRACE OUT.png --width 1600 --select 12    from the repository's root
"""

from __future__ import annotations

import argparse
import dataclasses
import fnmatch
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.devtools import BrowserError, Page, find_chromium
from tests.support.trace_processor import PROBLEMS_SQL
from tracepipe.ui.serve import UI_ORIGIN, TraceServer, find_ui

_HEIGHT_LIMIT = 8000  # px; Chromium's software compositor refuses textures above 16384
_MODAL = "document.querySelector('.pf-modal-dialog')"

# The rows of a query as JSON: integers beyond 2^53 as text, since JSON's numbers are doubles in the page.
_ROWS_JS = """
const rows = async sql => {
  const result = await app.trace.engine.query(sql), names = result.columns(), out = [];
  const plain = v => typeof v !== 'bigint' ? v : Number.isSafeInteger(Number(v)) ? Number(v) : String(v);
  for (const it = result.iter({}); it.valid(); it.next())
    out.push(Object.fromEntries(names.map(name => [name, plain(it.get(name))])));
  return out;
};"""

# A track whose drawing threw carries a warning button; its text is the error.
_REPORT_JS = """(async () => { ROWS
  const info = app.trace.traceInfo;
  return {
    title: info.traceTitle, start_ns: String(info.start), end_ns: String(info.end),
    tracks: app.trace.workspace.flatTracksOrdered.map(node => node.fullPath.join(' / ')),
    pinned: app.trace.workspace.pinnedTracks.map(node => node.name),
    in_sight_ns: (span => [Number(span.start), Number(span.end)])(
      app.trace.timeline.visibleWindow.toTimeSpan()),
    import_errors: Number(info.importErrors),
    broken_tracks: [...document.querySelectorAll('.pf-track__shell')]
      .filter(shell => shell.querySelector('.pf-track__buttons')?.innerText.includes('warning'))
      .map(shell => shell.innerText),
    modal: MODAL?.innerText ?? null,
    problems: await rows(PROBLEMS),
    rows: QUERY ? await rows(QUERY) : [],
  };
})()"""


@dataclass(frozen=True, slots=True)
class View:
    """What the picture shows. Sizes in CSS pixels, times in trace ns; globs match a track's name or path."""

    width: int = 1600
    height: int = 900
    start_ns: int | None = None
    end_ns: int | None = None
    select: int | None = None  # id of a slice: its flow arrows show …
    details: bool = True  # … and the drawer with its details
    expand: tuple[str, ...] = ("*",)  # groups that are open …
    collapse: tuple[str, ...] = ()  # … except these
    fit: bool = True  # grow the window until no track is below the fold
    sql: str = ""  # run in the page's engine, for `Seen.rows`
    timeout_s: float = 120


@dataclass(frozen=True, slots=True)
class Seen:
    """What the UI made of the trace. `tracks` are paths, "process / thread / track", in drawing order."""

    title: str = ""
    start_ns: int = 0
    end_ns: int = 0
    tracks: list[str] = field(default_factory=list)
    pinned: list[str] = field(default_factory=list)
    in_sight_ns: list[int] = field(default_factory=list)
    import_errors: int = 0  # the number on the UI's badge
    broken_tracks: list[str] = field(default_factory=list)
    modal: str | None = None  # text of a dialog; with one and no tracks, the trace was refused
    problems: list[dict[str, Any]] = field(default_factory=list)
    exceptions: list[str] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)

    @property
    def complaints(self) -> list[str]:
        """Everything that a user would see go wrong, in words; empty if nothing did."""
        found = [f"dialog: {self.modal}"] if self.modal else []
        found += [f"{self.import_errors} import errors on the badge"] if self.import_errors else []
        found += [f"problem: {row['name']} = {row['value']}" for row in self.problems]
        found += [f"track drawn with an error: {text}" for text in self.broken_tracks]
        return found + [f"exception: {text}" for text in self.exceptions]


def show(trace: Path, png: Path, view: View | None = None) -> Seen:
    """Opens `trace` in the UI of `find_ui`, writes the picture `png` and returns what the UI saw.

    Raises BrowserError without Chromium, or if the UI neither shows nor refuses the trace in time.
    """
    with TraceServer(trace, ui=find_ui(), port=0) as server:
        # testing=1 stops the UI's animations; the sidebar is not part of the trace.
        link = server.link.replace("/#!/?", "/?testing=1#!/viewer?") + "&hideSidebar=true"
        return show_link(link, png, view)


def show_link(link: str, png: Path, view: View | None = None) -> Seen:
    """As `show`, for a `link` that makes a UI load a trace from this machine.

    A link to ui.perfetto.dev gets the UI of `find_ui` under that origin.
    """
    view = view or View()
    chromium = find_chromium()
    if chromium is None:
        raise BrowserError("no Chromium: apt install chromium")
    with Page(chromium, view.width, view.height) as page:
        if link.startswith(UI_ORIGIN):
            page.play_site(UI_ORIGIN, find_ui().root)
        page.navigate(link)
        try:
            page.wait_until(f"(app.trace && !app.isLoadingTrace) || {_MODAL}", view.timeout_s)
        except BrowserError as error:
            raise BrowserError(f"{error}; the page: {page.run('document.body.innerText')[:500]}") from error
        if not page.run("!!window.app?.trace"):
            seen = Seen(modal=page.run(_MODAL + ".innerText"), exceptions=page.exceptions)
        else:
            _arrange(page, view)
            seen = _report(page, view)
        png.write_bytes(page.screenshot())
    return seen


def _arrange(page: Page, view: View) -> None:
    _settle(page, view)
    _open_groups(page, view)
    if view.start_ns is not None and view.end_ns is not None:
        page.run(f"app.trace.timeline.setViewportTime({view.start_ns}n, {view.end_ns}n)")
    if view.select is not None:
        scroll = json.dumps(view.start_ns is None)  # a viewport that was asked for stays
        page.run(
            f"app.trace.selection.selectSqlEvent('slice', {view.select},"
            f" {{scrollToSelection: {scroll}, switchToCurrentSelectionTab: true}})"
        )
        if not view.details:
            _settle(page, view)  # the drawer opens with the selection; toggling before that would open it
            page.run("app.commands.runCommand('dev.perfetto.ToggleDrawer')")
    _settle(page, view)
    if view.fit:
        _fit(page, view)


def _settle(page: Page, view: View) -> None:
    """Waits until the UI has no task, query or redraw left for 300 ms."""
    page.run("waitForPerfettoIdle(300)", view.timeout_s)


def _open_groups(page: Page, view: View) -> None:
    paths = page.run("app.trace.workspace.flatTracksOrdered.map(node => node.fullPath)")

    def matches(path: list[str], globs: tuple[str, ...]) -> bool:
        return any(fnmatch.fnmatchcase(text, glob) for text in (path[-1], " / ".join(path)) for glob in globs)

    is_open = [matches(path, view.expand) and not matches(path, view.collapse) for path in paths]
    page.run(
        f"(open => app.trace.workspace.flatTracksOrdered.forEach((node, i) =>"
        f" open[i] ? node.expand() : node.collapse()))({json.dumps(is_open)})"
    )
    page.run("app.raf?.scheduleFullRedraw?.()")


def _fit(page: Page, view: View) -> None:
    """Grows the window until the tracks fit. Tracks not drawn yet count as lower than they are: repeat."""
    height = view.height
    while height < _HEIGHT_LIMIT:
        hidden = page.run(
            "(tree => tree ? tree.scrollHeight - tree.clientHeight : 0)"
            "(document.querySelector('.pf-viewer-page__scrolling-track-tree'))"
        )
        if hidden <= 0:
            return
        height = min(_HEIGHT_LIMIT, height + hidden)
        page.resize(view.width, height)
        _settle(page, view)


def _report(page: Page, view: View) -> Seen:
    script = _REPORT_JS.replace("ROWS", _ROWS_JS).replace("MODAL", _MODAL)
    script = script.replace("PROBLEMS", json.dumps(PROBLEMS_SQL)).replace("QUERY", json.dumps(view.sql))
    answer = page.run(script, view.timeout_s)
    answer["start_ns"], answer["end_ns"] = int(answer["start_ns"]), int(answer["end_ns"])
    return Seen(**answer, exceptions=page.exceptions)


def main() -> int:
    """The command: prints what the UI saw as JSON; status 1 if it complained of anything."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.browser", description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("png", type=Path)
    parser.add_argument("--width", type=int, default=1600, help="px")
    parser.add_argument("--height", type=int, default=900, help="px; grows unless --no-fit")
    parser.add_argument("--start", type=int, help="left edge, trace ns")
    parser.add_argument("--end", type=int, help="right edge, trace ns")
    parser.add_argument("--select", type=int, metavar="SLICE_ID", help="show its details and flow arrows")
    parser.add_argument("--no-details", dest="details", action="store_false", help="arrows only")
    parser.add_argument("--expand", action="append", metavar="GLOB", help="only these groups open")
    parser.add_argument("--collapse", action="append", metavar="GLOB", default=[], help="groups closed")
    parser.add_argument("--sql", default="", help="also run this query in the page")
    parser.add_argument("--no-fit", dest="fit", action="store_false", help="keep the height")
    given = parser.parse_args()
    view = View(
        width=given.width,
        height=given.height,
        start_ns=given.start,
        end_ns=given.end,
        select=given.select,
        details=given.details,
        expand=tuple(given.expand or ("*",)),
        collapse=tuple(given.collapse),
        fit=given.fit,
        sql=given.sql,
    )
    seen = show(given.trace, given.png, view)
    print(json.dumps(dataclasses.asdict(seen), indent=1))
    for complaint in seen.complaints:
        print(complaint, file=sys.stderr)
    return int(bool(seen.complaints))


if __name__ == "__main__":
    sys.exit(main())
