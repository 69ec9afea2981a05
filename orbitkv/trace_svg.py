"""The chart of a trace's pipelines as an SVG: bytes, GB/s and wait on every arrow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from xml.sax.saxutils import escape

from orbitkv.config import format_nbytes
from orbitkv.runtime.recording import Recording
from orbitkv.runtime.trace_file import TracedPipeline
from orbitkv.trace_views import summarise

_BOX, _BOX_HEIGHT = 210, 64
_COLUMN, _ROW = 440, 120
_MARGIN, _TITLE, _LINE = 24, 44, 15
_STYLE = (
    "text{font:12px sans-serif;fill:#222}"
    ".title{font-weight:bold;font-size:14px}.small{font-size:11px;fill:#555}"
    ".box{fill:#eef3fa;stroke:#4a6fa5}.off{fill:#f3f3f3;stroke:#aaa;stroke-dasharray:4}"
    ".arrow{fill:none;stroke:#4a6fa5;marker-end:url(#head)}.idle{stroke:#bbb}"
    ".label{font-size:11px;paint-order:stroke;stroke:#fff;stroke-width:4px}"
)

Row = Mapping[str, Any]


def draw_svg(recording: Recording) -> str:
    """Draw every pipeline of a trace below the one before; the same trace gives the same text."""
    summary = summarise(recording, slowest=0)
    body: list[str] = []
    top, width = _MARGIN, 0
    for pipeline in recording.pipelines.values():
        nodes = {n["node"]: n for n in summary["nodes"] if n["pipeline"] == pipeline.direction}
        arrows = [a for a in summary["arrows"] if a["pipeline"] == pipeline.direction]
        places = _places(pipeline, top + _TITLE)
        title = f"{pipeline.name}, sha256 {pipeline.sha256[:16]}"
        body.append(_text(_MARGIN, top + 16, title, "title"))
        labels: set[tuple[int, int]] = set()
        for arrow in arrows:
            body += _arrow(arrow, places, labels)
        entries = {arrow["dst"]: arrow for arrow in arrows if arrow["src"] is None}
        for node, place in places.items():
            body += _box(pipeline, nodes[node], place, entries.get(node))
        top = max(y for _, y in places.values()) + _ROW
        width = max(width, *(x + _BOX + _MARGIN for x, _ in places.values()))
    seconds = f"{summary['seconds']:.3f} s"
    note = f"{seconds}; GB/s: while the arrow's batches were in the node that it ends at"
    if recording.cut or recording.lost:
        note += f"; {recording.lost} records lost; {recording.cut or 'whole'}"
    body.append(_text(_MARGIN, top, note, "small"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{top + _MARGIN}">',
            f"<style>{_STYLE}</style>",
            '<defs><marker id="head" refX="8" refY="4" markerWidth="8" markerHeight="8"',
            'orient="auto"><path d="M0 0 8 4 0 8z" fill="#4a6fa5"/></marker></defs>',
            '<rect width="100%" height="100%" fill="#fff"/>',
            *body,
            "</svg>\n",
        ]
    )


def _places(pipeline: TracedPipeline, top: int) -> dict[str, tuple[int, int]]:
    """Where each box is: in the column after all that lead to it."""
    column = dict.fromkeys(pipeline.lanes, 0)
    for _ in pipeline.lanes:  # a graph has no longer way than it has nodes
        for edge in pipeline.edges:
            column[edge.dst] = max(column[edge.dst], column[edge.src] + 1)
    filled: Counter[int] = Counter()
    places = {}
    for node in sorted(column, key=lambda node: column[node]):
        x, y = _MARGIN + column[node] * _COLUMN, top + filled[column[node]] * _ROW
        places[node] = (x, y)
        filled[column[node]] += 1
    return places


def _box(
    pipeline: TracedPipeline, node: Row, place: tuple[int, int], entry: Row | None
) -> Iterator[str]:
    x, y = place
    kind = "off" if node["node"] in pipeline.unavailable else "box"
    yield f'<rect class="{kind}" x="{x}" y="{y}" width="{_BOX}" height="{_BOX_HEIGHT}" rx="6"/>'
    lines = [f"{node['node']}: {pipeline.labels[node['node']]}", node["lane"]]
    if kind == "off":
        lines.append("off")
    else:
        lines.append(f"{node['batches']} batches, {_ms(node['service_s'])} service")
    for position, line in enumerate(lines):
        yield _text(x + 8, y + 18 + 17 * position, line, "small" if position else "")
    if entry:
        yield _text(x, y + _BOX_HEIGHT + 14, f"entry: {_figures(entry)}", "label")


def _arrow(
    arrow: Row, places: Mapping[str, tuple[int, int]], labels: set[tuple[int, int]]
) -> Sequence[str]:
    """Draw an arrow, and its label where none of ``labels`` is."""
    if arrow["src"] is None:
        return ()
    (x0, y0), (x1, y1) = places[arrow["src"]], places[arrow["dst"]]
    x0, y0, y1 = x0 + _BOX, y0 + _BOX_HEIGHT // 2, y1 + _BOX_HEIGHT // 2
    bend = (x1 - x0) // 2
    kind = "arrow" if arrow["batches"] else "arrow idle"
    path = f"M{x0} {y0}C{x0 + bend} {y0} {x1 - bend} {y1} {x1} {y1}"
    at_x, at_y = x0 + 10, y0 + (y1 - y0) // 3 - 6
    while any(x == at_x and abs(y - at_y) < _LINE for x, y in labels):
        at_y += _LINE
    labels.add((at_x, at_y))
    return (
        f'<path class="{kind}" d="{path}"><title>{escape(arrow["arrow"])}</title></path>',
        _text(at_x, at_y, f"{arrow['src']} > {arrow['dst']}: {_figures(arrow)}", "label"),
    )


def _figures(arrow: Row) -> str:
    figures = f"{format_nbytes(arrow['nbytes'])}, {arrow['gb_s']:.2f} GB/s"
    dropped = f", {arrow['dropped']} dropped" if arrow["dropped"] else ""
    return f"{figures}, {_ms(arrow['wait_s'] + arrow['blocked_s'])} wait{dropped}"


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _text(x: int, y: int, text: str, kind: str) -> str:
    shown = f' class="{kind}"' if kind else ""
    return f'<text x="{x}" y="{y}"{shown}>{escape(text)}</text>'
