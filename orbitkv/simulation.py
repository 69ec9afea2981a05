"""orbitkv simulate: what settings of the cache would have done to a trace of requests."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import itertools
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from orbitkv.commands import files_of, unwritable
from orbitkv.config import format_nbytes
from orbitkv.errors import ConfigError
from orbitkv.runtime.flags import Setting, add_flags, build, settings_of
from orbitkv.runtime.simulate import Pages, Simulated, Simulation, cut, load, simulate
from orbitkv.runtime.traces import RequestTrace, read_trace

REPORT_FILE, HITS_FILE, WRITES_FILE = "simulate.json", "hit_rate.png", "ssd_writes.png"
MOST_POINTS = 10_000

Axes = Any  # matplotlib.axes.Axes

_CAPACITIES = ("pool_nbytes", "ssd_cache_capacity_nbytes")
_PIPE_WIDTH = 160  # nobody reads a pipe in 80 columns
_NOTHING = ("0.00%", "0 bytes", "0.00")  # what no point has is no column
_SETTINGS = {setting.flag.removeprefix("--"): setting for setting in settings_of(Simulation)}


@dataclass(frozen=True, slots=True)
class Point:
    """One simulation of a sweep.

    Attributes:
        swept: Text of each swept setting, by its name.
    """

    swept: Mapping[str, str]
    settings: Simulation
    found: Simulated


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE.jsonl", help="requests, one JSON object a line"
    )
    add_flags(parser.add_argument_group("what is simulated"), tuple(_SETTINGS.values()))
    parser.add_argument(
        "--sweep",
        action="append",
        default=[],
        metavar="KEY=V1,V2,...",
        help="simulate every value of a setting, such as pool-size=1gb,4gb; several make a grid",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help=f"write {REPORT_FILE}, {HITS_FILE} and {WRITES_FILE} there; needs matplotlib",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")


def run(args: argparse.Namespace) -> int:
    """Simulate every point; 0 once all is told.

    Raises:
        ConfigError: before anything is simulated.
        TraceError: the trace cannot be read.
    """
    grid = _grid(args)
    if args.out and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(
            "--out: the plots need matplotlib, which is not installed; accepted: without --out, "
            "or after pip install 'orbitkv[transformers]', or matplotlib alone"
        )
    console = Console(file=sys.stderr)
    started_s = time.perf_counter()
    trace = _read(args.trace, console)
    read_s = time.perf_counter() - started_s
    points, simulated_s = _simulate_all(trace, grid, console)
    report = _report(args.trace, points)
    if args.out:
        _write_files(args.out, report, points)
    if args.json:
        sys.stdout.write(json.dumps(report) + "\n")
        return 0
    _print(args.trace, points)
    events = sum(point.found.blocks for point in points)
    files = f"; {REPORT_FILE}, {HITS_FILE}, {WRITES_FILE} in {args.out}" if args.out else ""
    console.print(
        escape(
            f"read in {read_s:.2f} s; {events:,} blocks simulated in {simulated_s:.2f} s{files}"
        ),
        soft_wrap=True,
    )
    return 0


def _grid(args: argparse.Namespace) -> list[tuple[dict[str, str], Simulation]]:
    """Settings of every point, checked."""
    given = {
        setting.field: setting.parse(getattr(args, setting.field))
        for setting in _SETTINGS.values()
        if hasattr(args, setting.field)
    }
    axes: dict[str, list[tuple[str, Any]]] = {}
    for text in args.sweep:
        key, is_there, listed = text.partition("=")
        if not is_there or key not in _SETTINGS:
            raise ConfigError(
                f"--sweep: {text!r}; accepted: KEY=V1,V2,... where KEY is {', '.join(_SETTINGS)}"
            )
        setting = _SETTINGS[key]
        if key in axes or setting.field in given:
            raise ConfigError(f"--sweep: {key} for the second time; accepted: once")
        axes[key] = [(value, _parse(setting, value)) for value in listed.split(",")]
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST_POINTS:
        raise ConfigError(f"--sweep: {count} points; accepted: up to {MOST_POINTS}")
    settings = tuple(_SETTINGS.values())
    grid = []
    for chosen in itertools.product(*axes.values()):
        swept = dict(zip(axes, (text for text, _ in chosen), strict=True))
        parsed = {_SETTINGS[key].field: value for key, (_, value) in zip(axes, chosen, strict=True)}
        grid.append((swept, build(Simulation, settings, given | parsed)))
    return grid


def _parse(setting: Setting, text: str) -> Any:  # noqa: ANN401 - any field's
    if setting.accepted is bool and text in ("true", "false"):
        return text == "true"
    try:
        return setting.parse(text)
    except ConfigError as error:
        raise ConfigError(f"--sweep: {error}") from error


def _read(path: Path, console: Console) -> RequestTrace:
    try:
        with _progress(console) as progress:
            task = progress.add_task("read, MiB", total=path.stat().st_size / 2**20)
            return read_trace(
                path, on_read=lambda nbytes: progress.update(task, completed=nbytes / 2**20)
            )
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; accepted: a file of requests") from error


def _simulate_all(
    trace: RequestTrace, grid: Sequence[tuple[dict[str, str], Simulation]], console: Console
) -> tuple[list[Point], float]:
    """Simulate one point after the other; return how long that took, too, without the compiler."""
    pages: dict[int, Pages] = {}
    points, simulated_s = [], 0.0
    with console.status("compile the policies, once"):
        load()
    with _progress(console) as progress:
        for swept, settings in progress.track(grid, description="simulate"):
            if settings.page_tokens not in pages:
                pages = {settings.page_tokens: cut(trace, settings.page_tokens)}
            started_s = time.perf_counter()
            found = simulate(pages[settings.page_tokens], settings)
            simulated_s += time.perf_counter() - started_s
            points.append(Point(swept, settings, found))
    return points, simulated_s


def _progress(console: Console) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    idle = not console.is_terminal
    return Progress(*columns, TimeElapsedColumn(), console=console, transient=True, disable=idle)


def _report(path: Path, points: Sequence[Point]) -> dict[str, Any]:
    """One object: of the one simulation, or with all of a sweep under ``points``."""
    described = [
        {"settings": dataclasses.asdict(point.settings), **dataclasses.asdict(point.found)}
        for point in points
    ]
    if len(points) == 1 and not points[0].swept:
        return {"trace": path.name, **described[0]}
    swept = list(points[0].swept)
    return {"trace": path.name, "swept": swept, "points": described}


# The table -------------------------------------------------------------------------------------


def _print(path: Path, points: Sequence[Point]) -> None:
    """Draw the points as a table, for people: one below the other, or one alone with all of it."""
    console = Console()
    if not console.is_terminal:
        console.width = _PIPE_WIDTH
    first = points[0].found
    title = escape(f"{path.name}: {first.requests:,} requests")
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    if points[0].swept:
        for key in points[0].swept:
            table.add_column(key)
        rows = [dict(_columns(point.found)) for point in points]
        shown = [name for name in rows[0] if any(row[name] not in _NOTHING for row in rows)]
        for name in shown:  # in a narrow terminal headings wrap, and no figure is cut
            table.add_column(name, justify="right", min_width=max(len(row[name]) for row in rows))
        for point, row in zip(points, rows, strict=True):
            table.add_row(*map(escape, point.swept.values()), *(row[name] for name in shown))
    else:
        table.add_column("what")
        table.add_column("", justify="right")
        for heading, text in (*_of_trace(first), *_columns(first), *_details(first)):
            table.add_row(heading, text)
    console.print(table)


def _of_trace(found: Simulated) -> Iterator[tuple[str, str]]:
    yield "blocks", f"{found.blocks:,}"
    yield "unique", f"{found.unique_blocks:,}"
    yield "bytes of a block", _both(found.block_bytes, found.block_raw_bytes)
    yield "unique bytes", _both(found.unique_bytes, found.unique_raw_bytes)
    yield "blocks that fit in DRAM", f"{found.pool_blocks:,}"
    yield "blocks that fit on SSD", f"{found.ssd_blocks:,}"


def _columns(found: Simulated) -> Iterator[tuple[str, str]]:
    yield "bound", f"{found.unlimited_prefix_hit_rate:.2%}"
    yield "hits", f"{found.prefix_hit_rate:.2%}"
    for tier, hits in (
        ("GPU", found.gpu_hit_blocks),
        ("DRAM", found.dram_hit_blocks),
        ("SSD", found.ssd_hit_blocks),
    ):
        yield tier, f"{hits / max(found.blocks, 1):.2%}"
    yield "recomputed", f"{found.recomputed_tokens / max(found.input_tokens, 1):.2%}"
    yield "SSD read", format_nbytes(found.ssd_read_bytes)
    yield "SSD written", format_nbytes(found.ssd_write_bytes)
    yield "amplification", f"{found.write_amplification:.2f}"


def _details(found: Simulated) -> Iterator[tuple[str, str]]:
    yield "recomputed tokens", f"{found.recomputed_tokens:,} of {found.input_tokens:,}"
    yield "SSD blocks read", f"{found.ssd_read_blocks:,}"
    yield "SSD blocks written", f"{found.ssd_write_blocks:,}"
    yield "SSD read, without codec", format_nbytes(found.ssd_read_raw_bytes)
    yield "SSD written, without codec", format_nbytes(found.ssd_write_raw_bytes)
    yield "SSD blocks overwritten", f"{found.ssd_overwritten_blocks:,}"
    yield "not written: SSD had it", f"{found.skipped_resident:,}"
    yield "not written: cold", f"{found.skipped_cold:,}"
    yield "saved to DRAM", f"{found.saved_blocks:,}"
    yield "not admitted (LFU)", f"{found.lfu_rejected:,}"
    yield "evicted: reclaimable", f"{found.evicted_reclaimable:,}"
    yield "evicted: probationary", f"{found.evicted_probationary:,}"
    yield "evicted: protected", f"{found.evicted_protected:,}"
    yield "evicted: from the GPU", f"{found.evicted_gpu:,}"
    yield "promoted, demoted", f"{found.promotions:,}, {found.demotions:,}"


def _both(stored_nbytes: int, raw_nbytes: int) -> str:
    if stored_nbytes == raw_nbytes:
        return format_nbytes(stored_nbytes)
    return f"{format_nbytes(stored_nbytes)} ({format_nbytes(raw_nbytes)} without codec)"


# The files -------------------------------------------------------------------------------------


def _write_files(out: Path, report: Mapping[str, Any], points: Sequence[Point]) -> None:
    """Write the report and its two drawings, all or none."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - draws without a display, and late

    with files_of(out) as staging:
        try:
            text = json.dumps(report, indent=1) + "\n"
            (staging / REPORT_FILE).write_text(text, encoding="utf-8")
            for name, draw in ((HITS_FILE, _draw_hits), (WRITES_FILE, _draw_writes)):
                figure = Figure(figsize=(7.2, 4.6), layout="constrained")
                draw(figure.subplots(), points)
                figure.savefig(staging / name, dpi=110, metadata={"Software": None})
        except OSError as error:
            raise unwritable(out, error) from error


def _series(points: Sequence[Point]) -> tuple[str, dict[str, list[tuple[int, Simulated]]]]:
    """Name of the capacity that is swept, DRAM's if none is; points of each policy by it."""
    swept = [_SETTINGS[key].field for key in points[0].swept]
    field = next((each for each in _CAPACITIES if each in swept), _CAPACITIES[0])
    found: dict[str, list[tuple[int, Simulated]]] = {}
    for point in points:
        others = [
            f"{key} {value}" for key, value in point.swept.items() if _SETTINGS[key].field != field
        ]
        capacity_nbytes = getattr(point.settings, field)
        if capacity_nbytes:  # zero has no place on a logarithmic axis
            found.setdefault(", ".join(others), []).append((capacity_nbytes, point.found))
    for line in found.values():
        line.sort(key=lambda pair: pair[0])
    return {_CAPACITIES[0]: "DRAM", _CAPACITIES[1]: "SSD"}[field], found


def _draw_hits(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the hit rate of each policy against capacity, below what no capacity exceeds."""
    for bound in sorted({point.found.unlimited_prefix_hit_rate for point in points}):
        axes.axhline(100 * bound, color="0.6", ls="--", lw=1)
    _draw(axes, points, lambda found: 100 * found.prefix_hit_rate)
    axes.set_ylabel("blocks found as a prefix, %")
    axes.set_title("Hit rate; dashed: of an unlimited cache")


def _draw_writes(axes: Axes, points: Sequence[Point]) -> None:
    """Draw the bytes that each policy wrote to SSD against capacity."""
    _draw(axes, points, lambda found: found.ssd_write_bytes / 2**30)
    axes.set_ylabel("written to SSD, GiB")
    axes.set_title("SSD writes")


def _draw(axes: Axes, points: Sequence[Point], value_of: Any) -> None:  # noqa: ANN401 - a lambda
    tier, series = _series(points)
    for name, line in series.items():
        capacities = [capacity_nbytes for capacity_nbytes, _ in line]
        axes.plot(capacities, [value_of(found) for _, found in line], "o-", ms=4, label=name)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda nbytes, _: format_nbytes(round(nbytes)))
    axes.set_xlabel(f"{tier} capacity")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if any(series):
        axes.legend()
