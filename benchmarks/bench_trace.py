"""What does a trace cost, off and on: of throughput, and by the span?

The same manager does the same work with and without a trace, in turn, and the two change places
every time; a second run without one tells how far two equal things differ here. Large pages show
what a trace takes of throughput; single small ones, where a batch does next to nothing, what a span
costs. What being off costs is what a batch runs through to find that nobody wants to know, timed
by itself and set against the batch.
"""

from __future__ import annotations

import gc
import sys
import tempfile
import time
import timeit
from pathlib import Path
from statistics import median

import numpy as np
import uvloop
from bench_host_arm import geometry, per_layer_tensors
from measure import parser, report

from orbitkv import Config, Geometry, ModelIdentity, Restored, Role, Saved, Slot
from orbitkv.config import GIB
from orbitkv.runtime.core import Core
from orbitkv.runtime.recording import read_recording

LARGE_PAGES, SMALL_REQUESTS = 256, 100
ROUNDS = 25
LOOKS = 1_000_000
LOOKS_A_BATCH = 3  # of the queue as it enters, of the queue as it leaves, of the node
MOST_US, MOST_PERCENT = 20.0, 2.0

Tensors = dict[str, np.ndarray]


class Load:
    """A manager in this process, and one round of work for it."""

    def __init__(self, made: Geometry, tensors: Tensors, requests: int, pages: int) -> None:
        self.core = Core(Config(pool_nbytes=GIB, lock_memory=False))
        self._made, self._tensors = made, tensors
        self._requests, self._pages = requests, pages
        self._round = 0

    @property
    def nbytes(self) -> int:
        """Bytes that a round moves."""
        return 2 * self._requests * self._pages * self._made.page_nbytes

    async def register(self) -> None:
        """Before the first round."""
        model = ModelIdentity("bench")
        self.instance = await self.core.register(self._made, self._tensors, model)

    async def run(self) -> tuple[float, float]:
        """Seconds of a round by the wall's clock, and by the CPU's of all threads.

        Request after request saves and restores its pages.
        """
        self._round += 1
        gc.collect()
        started_s, cpu_s = time.perf_counter(), time.process_time()
        for request in range(self._requests):
            name = self._round.to_bytes(8) + request.to_bytes(8)
            pages = {name + index.to_bytes(16): index for index in range(self._pages)}
            saved = await (await self.core.publish(self.instance, tuple(pages.items()), None))
            lease = await self.core.query(self.instance, tuple(pages))
            restored = await (await self.core.restore(lease, pages))
            assert isinstance(saved, Saved)
            assert isinstance(restored, Restored)
        taken_s = time.perf_counter() - started_s, time.process_time() - cpu_s
        await self.core.flush(evict_dram=True)
        return taken_s

    async def traced(self, path: Path, *, digests: bool) -> tuple[tuple[float, float], int, int]:
        """The same with a trace, and with what its writer does last; its spans, and its losses."""
        await self.core.begin_trace(path.open("wb"), digests=digests)
        wall_s, cpu_s = await self.run()
        started_s = time.process_time()
        totals = await self.core.end_trace()
        cpu_s += time.process_time() - started_s
        return (wall_s, cpu_s), len(read_recording(path).spans), totals.lost

    async def batches(self) -> int:
        """Batches that all nodes have worked on."""
        nodes = (await self.core.statistics()).nodes.values()
        return sum(node.batches for by_id in nodes for node in by_id.values())


class Looker:
    """Something with a place for a trace that is empty."""

    def __init__(self) -> None:
        self.trace = None


def look_ns() -> float:
    """Nanoseconds of one look whether there is a trace, the loop around it included."""
    looks = timeit.repeat("looker.trace is not None", globals={"looker": Looker()}, number=LOOKS)
    return min(looks) / LOOKS * 1e9


async def measure(load: Load, directory: Path) -> dict[str, float]:
    """Medians of all rounds."""
    async with load.core:
        await load.register()
        for _ in range(3):
            await load.run()
        taken: dict[str, list[tuple[float, float]]] = {"off": [], "again": [], "on": []}
        spans = lost = 0
        before = await load.batches()
        for turn in range(ROUNDS):
            for how in list(taken)[turn % 3 :] + list(taken)[: turn % 3]:
                if how == "on":
                    taken_s, spans, missing = await load.traced(directory / "t", digests=False)
                    lost += missing
                else:
                    taken_s = await load.run()
                taken[how].append(taken_s)
        batches = (await load.batches() - before) / ROUNDS / len(taken)
        digests_s = [(await load.traced(directory / "t", digests=True))[0][0] for _ in range(3)]
    off_s, again_s, on_s = (median(wall for wall, _ in runs) for runs in taken.values())
    cpu_off_s, cpu_again_s, cpu_on_s = (median(cpu for _, cpu in runs) for runs in taken.values())
    cpu_s = min(cpu_off_s, cpu_again_s)
    return {
        "off, GB/s": load.nbytes / off_s / 1e9,
        "on, GB/s": load.nbytes / on_s / 1e9,
        "off a second time: slower by, %": 100 * (again_s / off_s - 1),
        "on: slower by, %": 100 * (on_s / off_s - 1),
        "on: more of the CPU, %": 100 * (cpu_on_s / cpu_s - 1),
        "on: a span by the clock, us": (on_s - off_s) / spans * 1e6,
        "on: a span of CPU, us": (cpu_on_s - cpu_s) / spans * 1e6,
        "digests, GB/s": load.nbytes / median(digests_s) / 1e9,
        "spans": float(spans),
        "lost": float(lost),
        "off: looks, % of a batch": LOOKS_A_BATCH * look_ns() / (off_s * 1e9 / batches) * 100,
    }


def small() -> tuple[Geometry, Tensors]:
    """One layer in segments of 4 KiB."""
    slot = Slot(name="kv", layer=0, role=Role.KV, dtype="float16", heads=1, head_dim=128)
    made = Geometry(16, (slot,))
    return made, {"kv": np.ones(made.shape(slot, 4), np.float16)}


def main() -> None:
    """Measure both loads, and print one table."""
    args = parser(__doc__ or "").parse_args()
    large = geometry()
    loads = {
        "large": Load(large, per_layer_tensors(large), 1, LARGE_PAGES),
        "small": Load(*small(), SMALL_REQUESTS, 1),
    }
    with tempfile.TemporaryDirectory() as directory:
        found = {name: uvloop.run(measure(load, Path(directory))) for name, load in loads.items()}
    report(
        "A trace's cost: 1 x 256 pages of 1 MiB, and 100 x 1 page of 4 KiB, saved and restored",
        ("", *found),
        [(name, *(of[name] for of in found.values())) for name in found["large"]],
        as_json=args.json,
        facts={"most, us a span": MOST_US, "most, % of throughput": MOST_PERCENT},
    )


if __name__ == "__main__":
    sys.exit(main())
