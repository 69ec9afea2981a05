"""orbitkv trace: record a daemon, and look at what was recorded."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orbitkv.config import format_nbytes
from orbitkv.errors import ConfigError
from orbitkv.runtime.client import Client
from orbitkv.runtime.recording import Recording, read_recording
from orbitkv.runtime.trace import open_trace
from orbitkv.trace_views import compare, summarise, to_chrome

_PIPE_WIDTH = 160  # nobody reads a pipe in 80 columns

Row = Mapping[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands = parser.add_subparsers(metavar="WHAT", required=True)

    def command(
        name: str, run: Callable[[argparse.Namespace], int], summary: str
    ) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        added.set_defaults(run_trace=run)
        return added

    record = command("record", _record, "record what the daemon does")
    record.add_argument(
        "--socket", type=Path, metavar="PATH", help="of the daemon (default: as the daemon's own)"
    )
    record.add_argument("--out", type=Path, metavar="T.okvtrace", required=True)
    record.add_argument(
        "--seconds", type=float, metavar="N", help="how long (default: until interrupted)"
    )
    record.add_argument(
        "--digests", action="store_true", help="hash what each stage gives; costs throughput"
    )
    record.add_argument(
        "--payloads",
        action="store_true",
        help="record the bytes of the pages that saves read, too; with --digests",
    )
    view = command("view", _view, "turn a trace into Chrome trace events, for Perfetto")
    view.add_argument("trace", type=Path, metavar="T.okvtrace")
    view.add_argument("--out", type=Path, metavar="T.json", required=True)
    summary = command("summary", _summary, "say where the time of a trace went")
    summary.add_argument("trace", type=Path, metavar="T.okvtrace")
    diff = command("diff", _diff, "put two traces side by side")
    diff.add_argument("one", type=Path, metavar="A.okvtrace")
    diff.add_argument("other", type=Path, metavar="B.okvtrace")
    for told in (summary, diff):
        told.add_argument("--json", action="store_true", help="print one JSON object and no table")


def run(args: argparse.Namespace) -> int:
    """Run a subcommand; 0 once it is done.

    Raises:
        TraceError: a file is no trace, or was changed.
    """
    run_trace: Callable[[argparse.Namespace], int] = args.run_trace
    return run_trace(args)


def read(path: Path) -> Recording:
    """Read a trace; tell on standard error what it lacks."""
    recording = read_recording(path)
    if recording.cut:
        sys.stderr.write(f"orbitkv: {path}: {recording.cut}; shown is what stands before that\n")
    if recording.lost:
        sys.stderr.write(f"orbitkv: {path}: {recording.lost} records were lost as they came\n")
    return recording


def _record(args: argparse.Namespace) -> int:
    if args.seconds is not None and not args.seconds > 0:
        raise ConfigError(f"--seconds: {args.seconds}; accepted: more than zero seconds")
    with Client(args.socket) as client, open_trace(args.out) as file:
        client.begin_trace(file, digests=args.digests or args.payloads, payloads=args.payloads)
        if args.seconds is None:
            sys.stderr.write("orbitkv: recording; interrupt to end\n")
        with contextlib.suppress(KeyboardInterrupt):  # which is how it is told to end
            threading.Event().wait(args.seconds)
        totals = client.end_trace()
    sys.stdout.write(f"{args.out}: {totals.records} records, {totals.lost} lost\n")
    if totals.dropped:
        sys.stderr.write(f"orbitkv: the daemon ended the recording: {totals.dropped}\n")
        return 1
    return 0


def _view(args: argparse.Namespace) -> int:
    shown = to_chrome(read(args.trace))
    args.out.write_text(json.dumps(shown, separators=(",", ":")) + "\n", encoding="utf-8")
    sys.stdout.write(
        f"{args.out}: {len(shown['traceEvents'])} events; open it at https://ui.perfetto.dev\n"
    )
    return 0


def _summary(args: argparse.Namespace) -> int:
    summary = summarise(read(args.trace))
    if args.json:
        sys.stdout.write(json.dumps(summary) + "\n")
        return 0
    console = _console()
    console.print(f"{summary['seconds']:.3f} s", highlight=False)
    console.print(_node_table(summary["nodes"]))
    console.print(_arrow_table(summary["arrows"]))
    console.print(_namespace_table(summary["namespaces"]))
    for request in summary["slowest"]:
        console.print(_path_table(request))
    return 0


def _diff(args: argparse.Namespace) -> int:
    found = compare(read(args.one), read(args.other))
    if args.json:
        sys.stdout.write(json.dumps(found) + "\n")
        return 0
    console = _console()
    one_s, other_s = found["seconds"]
    console.print(f"{one_s:.3f} s, {other_s:.3f} s", highlight=False)
    if not found["same_pipelines"]:
        console.print("the definitions differ")
    for name in ("node", "arrow"):
        rows = [row for row in found[f"{name}s"] if any(row["batches"])]
        figures = [key for key in rows[0] if key not in ("pipeline", name)] if rows else []
        table = _table(f"{name.capitalize()}s, one > other", "pipeline", name, *figures)
        for row in rows:
            pairs = (_pair(figure, *row[figure]) for figure in figures)
            table.add_row(row["pipeline"], escape(row[name]), *pairs)
        console.print(table)
    return 0


def _pair(figure: str, one: float, other: float) -> str:
    ratio = f" ({other / one:.2f}x)" if one and one != other else ""
    return f"{_shown(figure, one)} > {_shown(figure, other)}{ratio}"


def _shown(figure: str, value: float) -> str:
    if figure.endswith("nbytes"):
        return format_nbytes(int(value))
    if figure == "gb_s":
        return f"{value:.2f}"
    return f"{1000 * value:.1f} ms" if figure.endswith("_s") else str(value)


def _console() -> Console:
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    return console


def _table(title: str, *columns: str) -> Table:
    table = Table(title=escape(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position < 2 else "right")  # noqa: PLR2004
    return table


def _node_table(nodes: list[Row]) -> Table:
    columns = ("batches", "queue", "service", "in", "stored", "stages", "not ok")
    table = _table("Nodes", "pipeline", "node", *columns)
    for node in nodes:
        if not node["batches"]:
            continue
        stages = ", ".join(f"{s} {_shown('_s', v)}" for s, v in node["stages_s"].items())
        wrong = ", ".join(f"{count} {name}" for name, count in node["outcomes"].items())
        table.add_row(
            node["pipeline"],
            escape(node["node"]),
            str(node["batches"]),
            _shown("_s", node["queue_s"]),
            _shown("_s", node["service_s"]),
            format_nbytes(node["in_nbytes"]),
            format_nbytes(node["stored_nbytes"]),
            escape(stages) + (" (enqueued)" if node["enqueued"] else ""),
            escape(wrong),
        )
    return table


def _arrow_table(arrows: list[Row]) -> Table:
    columns = ("batches", "bytes", "in queue", "blocked", "longest", "service", "GB/s")
    table = _table("Arrows", "pipeline", "arrow", *columns, "queue holds", "dropped")
    for arrow in arrows:
        if not arrow["batches"] and not arrow["dropped"]:
            continue
        limit = arrow["max_nbytes"]
        table.add_row(
            arrow["pipeline"],
            escape(arrow["arrow"]),
            str(arrow["batches"]),
            format_nbytes(arrow["nbytes"]),
            _shown("_s", arrow["wait_s"]),
            _shown("_s", arrow["blocked_s"]),
            _shown("_s", arrow["longest_wait_s"]),
            _shown("_s", arrow["service_s"]),
            f"{arrow['gb_s']:.2f}",
            f"{arrow['max_items']}, {format_nbytes(limit)}" if limit else "-",
            str(arrow["dropped"]),
        )
    return table


def _namespace_table(namespaces: list[Row]) -> Table:
    table = _table("Namespaces", "namespace", "requests", "ended", "pages", "missed", "bytes")
    for space in namespaces:
        told = [
            ", ".join(f"{count} {name}" for name, count in space[key].items())
            for key in ("requests", "outcomes")
        ]
        counts = (str(space["pages"]), str(space["missed"]), format_nbytes(space["nbytes"]))
        table.add_row(space["namespace"][:27], *map(escape, told), *counts)
    return table


def _path_table(request: Row) -> Table:
    title = (
        f"{request['kind']} {request['ticket']}: {_shown('_s', request['seconds'])}, "
        f"{request['outcome']}, {request['pages']} pages"
    )
    table = _table(title, "by", "node", "blocked", "in queue", "service")
    for step in request["path"]:
        times = (_shown("_s", step[f"{part}_s"]) for part in ("blocked", "wait", "service"))
        table.add_row(escape(step["edge"]), escape(step["node"]), *times)
    table.add_row("elsewhere", "", "", "", _shown("_s", request["elsewhere_s"]))
    return table
