"""What does the SSD tier reach as the manager runs it, beside fio's io_uring in the same run?

    python benchmarks/bench_ssd.py [--only u|codecs|storm|cufile] [--path DIR ...] [--device cuda]

``u``: objects of 2 MiB, O_DIRECT, depth 8. D > U writes what stands in DRAM, U > D reads it; with
the engine's ends E > C > D > U and U > D > R > E, as the packaged definitions run. Beside them fio,
with the same blocks over a file as large, in turn; "of fio" is the median of the ratios by window.
``codecs``: logical bytes restored from SSD a second, by what is stored.
``storm``: restores of one page from DRAM: with the disk idle, saturated by writeback, and saturated
by a fio of its own process, which tells what of the delay is the machine's.
``cufile``: the direct route, from and to a GPU, beside KvikIO's own write and read of as many
bytes: as it comes, and with as many threads and as small pieces as ours.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from measure import Moved, Started, fio, parser, report
from ssd_tier import (
    STEP_NBYTES,
    STEPS_A_FLUSH,
    TO_DRAM,
    bench,
    check,
    geometry,
    without_writeback,
)

from orbitkv import Manager, Saved
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB, parse_nbytes
from orbitkv.objects import crc32

DEPTH = 8
CODECS = {"none": 1.0, "fp8": 1.9, "turboquant-4": 3.3, "ans": 1.35}
STORM_TARGET = 1.25


@dataclass
class Window:
    """Moves of one kind, ours and fio's in turn."""

    name: str
    ours: list[Moved] = field(default_factory=list)
    theirs: list[Moved] = field(default_factory=list)

    def row(self) -> tuple[object, ...]:
        """Medians, and the median of the ratios."""
        speeds = sorted(move.gb_per_s for move in self.ours)
        cpu, fio_cpu = (
            statistics.median(move.cpu_s_per_gib for move in moves) if moves else float("nan")
            for moves in (self.ours, self.theirs)
        )
        beside = [
            ours.gb_per_s / theirs.gb_per_s
            for ours, theirs in zip(self.ours, self.theirs, strict=False)
        ]
        return (
            self.name,
            statistics.median(move.gb_per_s for move in self.theirs) if self.theirs else "",
            statistics.median(speeds),
            f"{speeds[0]:.2f} to {speeds[-1]:.2f}",
            f"{statistics.median(beside):.0%}" if beside else "",
            f"{fio_cpu:.3f}",
            f"{cpu:.3f}",
            f"{cpu / fio_cpu:.1f}",
        )


def crc_cpu_s_per_gib() -> float:
    """What the check at D's door cannot do without."""
    memory = torch.zeros(STEP_NBYTES, dtype=torch.uint8).numpy()
    memory[:] = 1
    started = Started()
    for at in range(0, STEP_NBYTES, 2 * MIB):
        crc32(memory[at : at + 2 * MIB])
    return started.moved(STEP_NBYTES).cpu_s_per_gib


def bench_u(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """D > U and U > D, without and with the engine's ends, beside fio."""
    made = geometry("cpu")
    pages = parse_nbytes(arguments.working_set, setting="--working-set") // made.page_nbytes
    alone, whole = folders[0] / "save.toml", folders[0] / "restore.toml"
    alone.write_text(without_writeback())
    whole.write_text(TO_DRAM)
    block_nbytes = 0

    def windows(
        name: str, direction: Literal["write", "read"], ours: Callable[[], Moved]
    ) -> Window:
        window = Window(name)
        for _ in range(arguments.rounds):
            if shutil.which("fio"):
                time.sleep(arguments.rest_s)
                window.theirs.append(
                    fio(
                        [folder / "fio" for folder in folders],
                        direction,
                        block_nbytes=block_nbytes,
                        depth=DEPTH,
                        file_nbytes=pages * block_nbytes,
                    )
                )
            time.sleep(arguments.rest_s)
            window.ours.append(ours())
        return window

    taken = []
    kept: dict[str, object] = {"ssd_persist": True}
    with bench(arguments, made, pages, folders, save_pipeline=alone, **kept) as one:
        one.save_all(flushes_only=True)  # extents that were never written cost more, once
        block_nbytes = one.stored_nbytes
        taken.append(windows("D > U", "write", lambda: one.save_all(flushes_only=True)))
    with bench(arguments, made, pages, folders, **kept) as one:
        taken.append(windows("E > C > D > U", "write", lambda: one.save_all(flushes_only=False)))
        generation = one.generation
    with bench(arguments, made, pages, folders, restore_pipeline=whole, **kept) as one:
        one.generation = generation
        taken.append(windows("U > D", "read", one.restore_all))
    with bench(arguments, made, pages, folders, **kept) as one:
        one.generation = generation
        taken.append(windows("U > D > R > E", "read", one.restore_all))
        one.check_bytes()
    columns = ("what", "fio GB/s", "GB/s", "least to most", "of fio")
    columns += ("fio CPU s/GiB", "CPU s/GiB", "times fio's")
    report(
        f"U beside fio: {pages} objects of {block_nbytes} bytes, depth {DEPTH}",
        columns,
        [window.row() for window in taken],
        as_json=arguments.json,
        facts={
            "targets": "90 % of fio, 2 times its CPU, for D > U and U > D",
            "of the CPU s/GiB of U > D, one CRC of the bytes": f"{crc_cpu_s_per_gib():.3f}",
        },
    )


def bench_codecs(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """Logical bytes restored a second, of each codec in turn."""
    made = geometry(arguments.device)
    working_nbytes = parse_nbytes(arguments.working_set, setting="--working-set")
    pages = working_nbytes // made.page_nbytes
    names = [name for name in CODECS if name != "ans" or arguments.device == "cuda"]
    with ExitStack() as opened:
        benches = {}
        for name in names:
            beside = [folder / name for folder in folders]
            for folder in beside:
                folder.mkdir()
            benches[name] = opened.enter_context(
                bench(arguments, made, pages, beside, storage_codec=name)
            )
            benches[name].save_all(flushes_only=False)
        taken: dict[str, list[float]] = {name: [] for name in names}
        for _ in range(arguments.rounds):
            for name, one in benches.items():
                time.sleep(arguments.rest_s)
                moved = one.restore_all()
                taken[name].append(pages * made.page_nbytes / moved.took_s / 1e9)
        rows = []
        for name, one in benches.items():
            over_none = [
                ours / plain for ours, plain in zip(taken[name], taken["none"], strict=True)
            ]
            rows.append(
                (
                    name,
                    made.page_nbytes / one.stored_nbytes,
                    statistics.median(taken[name]),
                    f"{min(taken[name]):.2f} to {max(taken[name]):.2f}",
                    statistics.median(over_none),
                    CODECS[name],
                )
            )
    columns = ("codec", "smaller", "logical GB/s", "least to most", "over none", "target")
    report(f"Restores from SSD to {arguments.device}", columns, rows, as_json=arguments.json)


@contextmanager
def fio_writes(path: Path, *, block_nbytes: int) -> Iterator[None]:
    """Let fio saturate the disk meanwhile; it has had a second to begin."""
    command = ["fio", "--name=storm", f"--filename={path}", "--size=1g", f"--bs={block_nbytes}"]
    command += [f"--iodepth={DEPTH}", "--rw=write", "--ioengine=io_uring", "--direct=1"]
    command += ["--time_based", "--runtime=600"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as storm:
        time.sleep(1)
        yield
        storm.terminate()


@contextmanager
def writeback(manager: Manager) -> Iterator[None]:
    """Let flush follow flush meanwhile."""
    ending = threading.Event()

    def write_on() -> None:
        while not ending.is_set():
            manager.flush()

    storm = threading.Thread(target=write_on)
    storm.start()
    yield
    ending.set()
    storm.join()


def bench_storm(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """p99 of restores from DRAM while the disk is idle, and while it is written without an end.

    DRAM holds six times as much as the SSD tier, so every flush has something to write.
    """
    made = geometry("cpu")
    kept_nbytes = STEP_NBYTES * STEPS_A_FLUSH // 6
    idle, saturated, control = "disk idle", "writeback", "fio"
    windows: dict[str, list[list[float]]] = {idle: [], saturated: [], control: []}
    rates: list[float] = []
    with bench(arguments, made, 0, folders, ssd_cache_capacity_nbytes=kept_nbytes) as one:
        for first in range(0, one.step * STEPS_A_FLUSH, one.step):
            hashes = one.hashes(range(first, first + one.step))
            saved = one.manager.publish(
                one.source, ((page, index) for index, page in enumerate(hashes))
            ).result()
            assert isinstance(saved, Saved)

        def restores() -> list[float]:
            taken_ms = []
            for number in range(arguments.restores):
                page = hashes[number % len(hashes)]
                started_s = time.perf_counter()
                lease = one.manager.query(one.target, [page])
                assert lease.tiers()[Tier.DRAM] == 1
                check(one.manager.restore(lease, {page: number % len(hashes)}))
                taken_ms.append((time.perf_counter() - started_s) * 1e3)
            return taken_ms

        restores()
        for _ in range(arguments.rounds):
            one.manager.flush()
            time.sleep(arguments.rest_s)
            windows[idle].append(restores())
            with writeback(one.manager):
                before, started = one.counter("ssd_written_nbytes"), Started()
                windows[saturated].append(restores())
                rates.append(started.moved(one.counter("ssd_written_nbytes") - before).gb_per_s)
            if shutil.which("fio"):
                with fio_writes(folders[0] / "fio", block_nbytes=one.stored_nbytes):
                    windows[control].append(restores())
    cuts = {
        name: [statistics.quantiles(window, n=100) for window in taken]
        for name, taken in windows.items()
        if taken
    }
    rows = [
        (
            name,
            statistics.median(cut[49] for cut in found),
            statistics.median(cut[98] for cut in found),
            f"{min(cut[98] for cut in found):.2f} to {max(cut[98] for cut in found):.2f}",
        )
        for name, found in cuts.items()
    ]
    raised = {
        f"p99 raised by {name} by a factor of": statistics.median(
            stormy[98] / calm[98] for calm, stormy in zip(cuts[idle], found, strict=True)
        )
        for name, found in cuts.items()
        if name != idle
    }
    report(
        f"Restores of one page of {made.page_nbytes // MIB} MiB from DRAM",
        ("disk", "p50 ms", "p99 ms", "p99, least to most"),
        rows,
        as_json=arguments.json,
        facts={
            **raised,
            "target": STORM_TARGET,
            "writeback GB/s": statistics.median(rates),
        },
    )


def kvikio_windows(path: Path, nbytes: int, *, as_ours: bool) -> tuple[Moved, Moved]:
    """KvikIO's own write and read of GPU memory, 256 MiB a call."""
    import cupy  # noqa: PLC0415 - only where there is a GPU
    import kvikio  # noqa: PLC0415 - as above
    import kvikio.defaults  # noqa: PLC0415 - as above

    settings = {"num_threads": 4, "task_size": MIB} if as_ours else {}
    buffer = cupy.random.randint(0, 256, STEP_NBYTES, cupy.uint8)
    offsets = range(0, nbytes // STEP_NBYTES * STEP_NBYTES, STEP_NBYTES)
    with kvikio.defaults.set(settings), kvikio.CuFile(path, "w+") as file:
        started = Started()
        for offset in offsets:
            assert file.write(buffer, file_offset=offset) == STEP_NBYTES
        written = started.moved(len(offsets) * STEP_NBYTES)
        started = Started()
        for offset in offsets:
            assert file.read(buffer, file_offset=offset) == STEP_NBYTES
        return written, started.moved(len(offsets) * STEP_NBYTES)


def bench_cufile(arguments: argparse.Namespace, folders: Sequence[Path]) -> None:
    """E > C > G > S and S > G > V > E, beside KvikIO alone, in turn."""
    if arguments.device != "cuda":
        print("cufile: not measured without --device cuda", file=sys.stderr)
        return
    made = geometry("cuda")
    working_nbytes = parse_nbytes(arguments.working_set, setting="--working-set")
    pages = working_nbytes // made.page_nbytes
    taken: dict[str, list[float]] = {}

    def note(name: str, moved: Moved) -> None:
        taken.setdefault(name, []).append(moved.gb_per_s)

    with bench(arguments, made, pages, folders, ssd_backend="cufile") as one:
        for _ in range(arguments.rounds):
            time.sleep(arguments.rest_s)
            note("write, ours", one.save_directly())
            note("read, ours", one.restore_all())
            for as_ours in (False, True):
                time.sleep(arguments.rest_s)
                kind = "KvikIO, 4 threads, 1 MiB" if as_ours else "KvikIO"
                moves = kvikio_windows(folders[0] / "kvikio", working_nbytes, as_ours=as_ours)
                for verb, moved in zip(("write", "read"), moves, strict=True):
                    note(f"{verb}, {kind}", moved)
        refused, faults = one.counter("direct_refused"), one.counter("direct_faults")
        one.check_bytes()
    rows = [
        (name, statistics.median(speeds), f"{min(speeds):.2f} to {max(speeds):.2f}")
        for name, speeds in sorted(taken.items(), reverse=True)
    ]
    report(
        "The direct route beside KvikIO, in cuFile's compat mode unless doctor says native",
        ("what", "GB/s", "least to most"),
        rows,
        as_json=arguments.json,
        facts={"objects left to U": refused, "faults": faults},
    )


PARTS: dict[str, Callable[[argparse.Namespace, Sequence[Path]], None]] = {
    "u": bench_u,
    "codecs": bench_codecs,
    "storm": bench_storm,
    "cufile": bench_cufile,
}


def main() -> int:
    """Measure each part in new folders, which are removed."""
    known = parser((__doc__ or "").splitlines()[0])
    known.add_argument("--only", choices=PARTS, help="one part; without it, all of them")
    known.add_argument("--path", type=Path, action="append", metavar="DIR", help="for the files")
    known.add_argument("--working-set", default="8gib", help="bytes of pages")
    known.add_argument("--pool", default="1gib", help="bytes of DRAM")
    known.add_argument("--rounds", type=int, default=5, help="windows of each kind")
    known.add_argument("--rest-s", type=float, default=1.0, help="before every window")
    known.add_argument("--restores", type=int, default=1000, help="of one page, each window")
    known.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="of pages of codecs and cufile"
    )
    arguments = known.parse_args()
    if parse_nbytes(arguments.working_set, setting="--working-set") < 2 * STEP_NBYTES:
        known.error(f"--working-set {arguments.working_set}; accepted: 512mib or more")
    if not shutil.which("fio"):
        print("fio is missing: nothing is measured beside ours", file=sys.stderr)
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            with ExitStack() as folders:
                made = [
                    Path(folders.enter_context(tempfile.TemporaryDirectory(dir=path)))
                    for path in arguments.path or [Path("/tmp")]
                ]
                part(arguments, made)
    return 0


if __name__ == "__main__":
    sys.exit(main())
