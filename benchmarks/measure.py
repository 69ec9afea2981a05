"""What every benchmark shares: the machine's name, medians, and one way to print a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def machine() -> str:
    """Processor, cores in use and memory, in one line."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cores = len(os.sched_getaffinity(0))
    return f"{model}, {cores} cores, {memory_gib:.0f} GiB, Python {platform.python_version()}"


def interleaved(rounds: int, measures: Mapping[str, Callable[[], float]]) -> dict[str, float]:
    """Median of each measure, taken in turn, so that a drift of the machine meets them all."""
    taken: dict[str, list[float]] = {name: [] for name in measures}
    for _ in range(rounds):
        for name, measure in measures.items():
            taken[name].append(measure())
    return {name: statistics.median(values) for name, values in taken.items()}


def report(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    as_json: bool,
    facts: Mapping[str, object] | None = None,
) -> None:
    """Print rows as a table, or as ``{"title", "machine", "rows": [{column: value}]}``.

    Args:
        facts: What else is to be told: a line each below the table, or beside ``rows``.
    """
    if as_json:
        described = [dict(zip(columns, row, strict=True)) for row in rows]
        whole = {"title": title, "machine": machine(), "rows": described, **(facts or {})}
        json.dump(whole, sys.stdout, indent=2)
        print()
        return
    table = Table(*columns, title=title, caption=machine(), title_justify="left")
    for row in rows:
        table.add_row(*(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row))
    console = Console()
    console.print(table)
    for name, fact in (facts or {}).items():
        console.print(f"{name}: {fact:.2f}" if isinstance(fact, float) else f"{name}: {fact}")
