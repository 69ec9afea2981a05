"""What benchmarks share: a geometry, the machine, medians, bytes by the clock, fio, one table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

from orbitkv import Geometry, Role, Slot

HEADS, HEAD_DIM = 8, 128


def parser(description: str) -> argparse.ArgumentParser:
    """Arguments that all benchmarks take."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--json", action="store_true", help="print one JSON object")
    return made


def packed_geometry(segment_nbytes: int, layers: int) -> Geometry:
    """Packed bfloat16 KV of 8 heads of 128 in each layer; as many tokens as fill a segment."""
    slots = tuple(
        Slot(
            name=f"layers.{layer}",
            layer=layer,
            role=Role.KV,
            dtype="bfloat16",
            heads=HEADS,
            head_dim=HEAD_DIM,
        )
        for layer in range(layers)
    )
    return Geometry(segment_nbytes // (HEADS * 2 * HEAD_DIM * 2), slots)


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


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes that were moved, the time it took, and the CPU time of whoever moved them."""

    nbytes: int
    took_s: float
    cpu_s: float

    @property
    def gb_per_s(self) -> float:
        """Bytes a second, in powers of ten."""
        return self.nbytes / self.took_s / 1e9

    @property
    def cpu_s_per_gib(self) -> float:
        """CPU seconds for 2**30 bytes."""
        return self.cpu_s / self.nbytes * 2**30


class Started:
    """A start of both clocks: the wall's, and the CPU's of all threads, the kernel's too."""

    def __init__(self) -> None:
        self._cpu_s, self._wall_s = _cpu_s(), time.perf_counter()

    def moved(self, nbytes: int) -> Moved:
        """What was done since."""
        return Moved(nbytes, time.perf_counter() - self._wall_s, _cpu_s() - self._cpu_s)


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def fio(
    paths: Sequence[Path],
    direction: Literal["write", "read"],
    *,
    block_nbytes: int,
    depth: int,
    file_nbytes: int,
    registered: bool = False,
) -> Moved:
    """Move ``file_nbytes`` of all files together by fio's io_uring, O_DIRECT; by its own clock.

    Args:
        registered: With buffers that are registered with the kernel.
    """
    command = ["fio", "--name=bench", f"--filename={':'.join(map(str, paths))}"]
    command += [f"--size={file_nbytes // block_nbytes * block_nbytes}", f"--bs={block_nbytes}"]
    command += [f"--iodepth={depth}", f"--rw={direction}", "--ioengine=io_uring", "--direct=1"]
    command += ["--output-format=json", *(["--fixedbufs=1"] if registered else [])]
    told = subprocess.run(command, check=True, capture_output=True, text=True)
    job = json.loads(told.stdout)["jobs"][0]
    moved = job[direction]
    took_s = moved["runtime"] / 1000
    return Moved(moved["io_bytes"], took_s, (job["usr_cpu"] + job["sys_cpu"]) / 100 * took_s)


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
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for name, fact in (facts or {}).items():
        console.print(f"{name}: {fact:.2f}" if isinstance(fact, float) else f"{name}: {fact}")
