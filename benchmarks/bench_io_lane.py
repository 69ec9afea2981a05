"""Do the I/O lanes reach what the disk gives, at what CPU? Side by side with fio's io_uring.

    python benchmarks/bench_io_lane.py [--dir DIR] [--nbytes 1gib] [--rounds 5] [--json]

One preallocated file, O_DIRECT, written and read in full by every variant in every round. The
order rotates from round to round and every run is preceded by the same rest, because a VM's disk
drifts and remembers bursts. All variants move as many buffers as they have operations in flight,
as fio does: the host copies from a small working set faster than from a large one.

``hold`` is how long a turn of ours kept the loop: the median and 95th percentile of a submit, and
of a reap together with the submit and the wake-ups that follow from it. ``of fio`` is the median of
the ratios round by round.
"""

from __future__ import annotations

import asyncio
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measure import Moved, Started, fio, parser, report

from orbitkv.config import parse_nbytes
from orbitkv.runtime.liburing import probe_io_uring
from orbitkv.runtime.preadv import PreadLane, Transfer
from orbitkv.runtime.uring import RingLane

CASES = ((4 << 20, 8), (64 << 10, 16))  # operation nbytes, operations in flight
BATCH_NBYTES = 64 << 20  # what a stage hands over in one call
BATCHES_AT_ONCE = 2


@dataclass(slots=True)
class Row:
    """All runs of one variant in one case."""

    direction: str
    operation_nbytes: int
    depth: int
    variant: str
    runs: list[Moved] = field(default_factory=list)
    submit_us: list[float] = field(default_factory=list)
    reap_us: list[float] = field(default_factory=list)

    @property
    def gb_per_s(self) -> float:
        """Median over the rounds."""
        return statistics.median(run.gb_per_s for run in self.runs)

    @property
    def cpu_s_per_gib(self) -> float:
        """Median over the rounds."""
        return statistics.median(run.cpu_s_per_gib for run in self.runs)


class TimedRingLane(RingLane):
    """Notes how long each submit and each reap holds the loop."""

    def __init__(self, name: str, *, depth: int) -> None:
        super().__init__(name, depth=depth)
        self.submit_us: list[float] = []
        self.reap_us: list[float] = []

    def _submit(self) -> None:
        started = time.perf_counter_ns()
        super()._submit()
        self.submit_us.append((time.perf_counter_ns() - started) / 1000)

    def _reap(self) -> None:
        started = time.perf_counter_ns()
        super()._reap()
        self.reap_us.append((time.perf_counter_ns() - started) / 1000)


def page_aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    """Make uint8[nbytes] of random bytes at a page boundary."""
    region = np.frombuffer(mmap.mmap(-1, nbytes), np.uint8)
    region[:] = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    return region


async def move_file(lane: RingLane | PreadLane, path: Path, row: Row, file_nbytes: int) -> Moved:
    """Write or read the whole file in batches, as a stage does."""
    region = page_aligned(row.depth * row.operation_nbytes)
    buffers = np.split(region, row.depth)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    transfers = [
        Transfer(fd, buffers[i % row.depth], i * row.operation_nbytes)
        for i in range(file_nbytes // row.operation_nbytes)
    ]
    per_batch = BATCH_NBYTES // row.operation_nbytes
    batches = [transfers[i : i + per_batch] for i in range(0, len(transfers), per_batch)]
    waiting = iter(batches)

    async def feed() -> None:
        for batch in waiting:
            move = lane.write_many if row.direction == "write" else lane.read_many
            outcomes = await move(batch)
            if outcomes != [row.operation_nbytes] * len(batch):
                raise RuntimeError(f"{lane.name}: moved {set(map(str, outcomes))}")

    async with lane:
        if row.variant.endswith("registered") and not await lane.register_buffers(region):
            raise RuntimeError(f"{lane.name}: {lane.buffers_refused}")
        started = Started()
        await asyncio.gather(*(feed() for _ in range(BATCHES_AT_ONCE)))
        taken = started.moved(file_nbytes)
    os.close(fd)
    return taken


def run_lane(path: Path, row: Row, file_nbytes: int) -> Moved:
    """Make one pass with a lane of ours."""
    if row.variant == "preadv":
        return asyncio.run(move_file(PreadLane("bench", depth=row.depth), path, row, file_nbytes))
    lane = TimedRingLane("bench", depth=row.depth)
    run = asyncio.run(move_file(lane, path, row, file_nbytes))
    row.submit_us += lane.submit_us
    row.reap_us += lane.reap_us
    return run


def run_fio(path: Path, row: Row, file_nbytes: int) -> Moved:
    """Make one pass with fio; its own clock, so that its start does not count."""
    return fio(
        [path],
        "write" if row.direction == "write" else "read",
        block_nbytes=row.operation_nbytes,
        depth=row.depth,
        file_nbytes=file_nbytes,
        registered=row.variant.endswith("registered"),
    )


def measure(path: Path, file_nbytes: int, rounds: int, rest_s: float) -> list[Row]:
    """Run every variant of every case, interleaved."""
    variants: dict[str, Callable[[Path, Row, int], Moved]] = {}
    if shutil.which("fio"):
        variants |= {"fio": run_fio, "fio registered": run_fio}
    if probe_io_uring() is None:
        variants |= {"ring": run_lane, "ring registered": run_lane}
    variants["preadv"] = run_lane
    rows = []
    for operation_nbytes, depth in CASES:
        for direction in ("write", "read"):
            case = [Row(direction, operation_nbytes, depth, variant) for variant in variants]
            for turn in range(rounds):
                first = turn % len(case)
                for row in case[first:] + case[:first]:
                    time.sleep(rest_s)
                    row.runs.append(variants[row.variant](path, row, file_nbytes))
            rows += case
    return rows


def held(samples_us: list[float]) -> str:
    """Render median and 95th percentile."""
    if not samples_us:
        return ""
    cuts = statistics.quantiles(samples_us, n=20)
    return f"{cuts[9]:.0f} / {cuts[18]:.0f}"


def described(rows: list[Row]) -> list[tuple[object, ...]]:
    """Lay the rows out beside fio's."""
    described_rows: list[tuple[object, ...]] = []
    fio_runs: dict[tuple[str, int], list[Moved]] = {}
    for row in rows:
        case = (row.direction, row.operation_nbytes)
        if row.variant == "fio":
            fio_runs[case] = row.runs
        beside_fio = [
            ours.gb_per_s / theirs.gb_per_s
            for ours, theirs in zip(row.runs, fio_runs.get(case, []), strict=False)  # maybe no fio
        ]
        speeds = sorted(run.gb_per_s for run in row.runs)
        described_rows.append(
            (
                f"{row.direction} {row.operation_nbytes >> 10} KiB, depth {row.depth}",
                row.variant,
                row.gb_per_s,
                f"{statistics.median(beside_fio):.0%}" if beside_fio else "",
                f"{speeds[0]:.2f} to {speeds[-1]:.2f}",
                f"{row.cpu_s_per_gib:.3f}",
                held(row.submit_us),
                held(row.reap_us),
            )
        )
    return described_rows


def main() -> None:
    """Measure, print, and leave no file behind."""
    known = parser((__doc__ or "").splitlines()[0])
    known.add_argument("--dir", type=Path, default=Path("/tmp"), help="where the file goes")
    known.add_argument("--nbytes", default="1gib", help="of the file")
    known.add_argument("--rounds", type=int, default=5)
    known.add_argument("--rest-s", type=float, default=1.0, help="before every run")
    arguments = known.parse_args()
    file_nbytes = parse_nbytes(arguments.nbytes, setting="--nbytes")
    for missing in filter(None, (probe_io_uring(), None if shutil.which("fio") else "no fio")):
        print(f"left out: {missing}", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=arguments.dir) as directory:
        path = Path(directory) / "extents"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, file_nbytes)
        # An extent that was never written reads as zeros without the disk, so write it all first.
        run_lane(path, Row("write", *CASES[0], "preadv"), file_nbytes)
        rows = measure(path, file_nbytes, arguments.rounds, arguments.rest_s)
    columns = ("case", "variant", "GB/s", "of fio", "least to most", "CPU s/GiB")
    held_columns = ("submit hold us", "reap hold us")
    report(
        "The I/O lanes, medians", columns + held_columns, described(rows), as_json=arguments.json
    )


if __name__ == "__main__":
    main()
