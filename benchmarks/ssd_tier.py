"""What benchmarks of the SSD tier share: a manager, an engine's pages, ways to move them all."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from measure import Moved, Started, packed_geometry

from orbitkv import Config, Geometry, Manager, ModelIdentity, Restored, Saved, Ticket
from orbitkv.cache.catalogue import Tier
from orbitkv.config import KIB, MIB, parse_nbytes
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.pipeline import PACKAGED
from orbitkv.runtime.instance import Instance
from orbitkv.stages.base import Outputs, StageContext
from orbitkv.stages.batch import ResidentBatch

STEP_NBYTES = 256 * MIB  # of pages, published or restored by one call
STEPS_A_FLUSH = 3  # which the pool has to hold
DIRECT_PAGES = 6  # two batches of raw pages of 9 MiB, which an arena of 64 MiB holds at once


class Arrive:
    """In place of R: a restore ends where its objects stand in DRAM."""

    inputs: ClassVar[Ports] = {"in": Port(ResidentBatch)}
    outputs: ClassVar[Ports] = {}
    lanes: ClassVar[Lanes] = frozenset({"host"})

    async def run(self, batch: ResidentBatch, ctx: StageContext) -> Outputs:
        """Settle."""
        del ctx
        batch.settle()
        return {}


TO_DRAM = """
name = "to DRAM"
edges = [
  { from = "U", to = "D.loaded", items = 4, bytes = "64 MiB" },
  { from = "D", to = "A", items = 4, bytes = "64 MiB" },
]
[nodes.U]
label = "SSD via io_uring"
stages = ["read"]
lane = "ring:read"
depth = 8
entry = { items = 2, bytes = "32 MiB" }
[nodes.D]
label = "Encoded pinned DRAM"
stages = ["serve"]
lane = "stream:restore"
entry = { items = 2, bytes = "64 MiB" }
[nodes.A]
label = "Arrived"
stages = ["ssd_tier:Arrive"]
lane = "host:end"
"""


def without_writeback() -> str:
    """The packaged save, but for the edge to U, which then writes on a flush only."""
    lines = (PACKAGED / "save.toml").read_text().splitlines(keepends=True)
    kept = [line for line in lines if 'from = "D.write"' not in line]
    assert len(kept) == len(lines) - 1
    return "".join(kept)


def geometry(device: str) -> Geometry:
    """Packed KV of 8 heads of 128: 32 layers of 64 KiB, or as bench_gpu.py on a GPU."""
    layers, segment_nbytes = (36, 256 * KIB) if device == "cuda" else (32, 64 * KIB)
    return packed_geometry(segment_nbytes, layers)


def tensors(made: Geometry, pages: int, device: str, *, filled: bool) -> dict[str, torch.Tensor]:
    """Normal numbers, or zeros that are there."""
    fill: Callable[..., torch.Tensor] = torch.randn if filled else torch.zeros
    return {
        slot.name: fill(made.shape(slot, pages), dtype=torch.float32).to(torch.bfloat16).to(device)
        for slot in made.slots
    }


def page_hash(page: int) -> bytes:
    """Of a page of the working set, or of one beyond it."""
    return page.to_bytes(32, "little")


@dataclass
class Bench:
    """A manager over an SSD tier, an engine to save from, and one to restore into."""

    manager: Manager
    pages: int
    step: int
    source: Instance
    target: Instance
    sent: Mapping[str, torch.Tensor]
    landed: Mapping[str, torch.Tensor]
    generation: int = 0

    @property
    def stored_nbytes(self) -> int:
        """Of one object on SSD."""
        return self.manager.core.catalogue.copies(Tier.SSD)[0].nbytes

    def save_all(self, *, flushes_only: bool) -> Moved:
        """Save the working set anew, flush after flush; bytes as stored.

        Args:
            flushes_only: Time D > U alone: what a flush writes, nothing else being under way.
        """
        self.generation += 1
        taken = []
        for first in range(0, self.pages, self.step * STEPS_A_FLUSH):
            end = min(first + self.step * STEPS_A_FLUSH, self.pages)
            before, started = self.written_nbytes, Started()
            for start in range(first, end, self.step):
                pages = self.hashes(range(start, min(start + self.step, end)))
                saved = self.manager.publish(
                    self.source, ((page, index) for index, page in enumerate(pages))
                ).result()
                assert isinstance(saved, Saved), saved
            if flushes_only:
                assert self.written_nbytes == before
                started = Started()
            assert self.manager.flush().unwritten == 0
            taken.append(started.moved(self.written_nbytes - before))
        return summed(taken)

    def save_directly(self) -> Moved:
        """Save the working set anew, as many pages at a time as the direct route has room for."""
        self.generation += 1
        before, started = self.written_nbytes, Started()
        for first in range(0, self.pages, DIRECT_PAGES):
            pages = self.hashes(range(first, min(first + DIRECT_PAGES, self.pages)))
            saved = self.manager.publish(
                self.source,
                ((page, (first + index) % self.step) for index, page in enumerate(pages)),
            ).result()
            assert isinstance(saved, Saved), saved
        moved = started.moved(self.written_nbytes - before)
        assert self.manager.flush().unwritten == 0
        return moved

    def restore_all(self) -> Moved:
        """Restore the working set from SSD, two calls at a time; bytes as stored."""
        self.manager.flush(evict_dram=True)
        before, started = self.read_nbytes, Started()
        under_way: list[Ticket] = []
        for number, first in enumerate(range(0, self.pages, self.step)):
            pages = self.hashes(range(first, min(first + self.step, self.pages)))
            lease = self.manager.query(self.target, pages)
            assert lease.tiers()[Tier.SSD] == len(pages), lease.tiers()
            base = number % 2 * self.step
            under_way.append(
                self.manager.restore(
                    lease, {page: base + index for index, page in enumerate(pages)}
                )
            )
            if len(under_way) == 2:
                check(under_way.pop(0))
        for ticket in under_way:
            check(ticket)
        return started.moved(self.read_nbytes - before)

    def check_bytes(self) -> None:
        """What the last two calls placed is what was saved, byte for byte."""
        for name, tensor in self.landed.items():
            for base in (0, self.step):
                assert torch.equal(tensor[base : base + self.step], self.sent[name]), name

    def hashes(self, pages: range) -> list[bytes]:
        """Of pages of the working set as it was saved last."""
        return [page_hash(self.generation << 32 | page) for page in pages]

    @property
    def written_nbytes(self) -> int:
        """To SSD, by either route."""
        return self.counter("ssd_written_nbytes") + self.counter("direct_written_nbytes")

    @property
    def read_nbytes(self) -> int:
        """From SSD, by either route."""
        return self.counter("ssd_read_nbytes") + self.counter("direct_read_nbytes")

    def counter(self, name: str) -> int:
        """One of the manager's."""
        return self.manager.statistics().counters.get(name, 0)


def check(ticket: Ticket) -> None:
    """Every page was restored."""
    outcome = ticket.result()
    assert isinstance(outcome, Restored), outcome
    assert not outcome.missed, outcome


def summed(moves: Sequence[Moved]) -> Moved:
    """All of them as one."""
    return Moved(
        sum(move.nbytes for move in moves),
        sum(move.took_s for move in moves),
        sum(move.cpu_s for move in moves),
    )


@contextmanager
def bench(
    arguments: argparse.Namespace,
    made: Geometry,
    pages: int,
    folders: Sequence[Path],
    **more: object,
) -> Iterator[Bench]:
    """Open a manager whose SSD tier has room for the working set and one step beside it."""
    step = STEP_NBYTES // made.page_nbytes
    room_nbytes = (pages + 2 * step) * (made.page_nbytes + 8 * KIB)
    config = Config(
        pool_nbytes=parse_nbytes(arguments.pool, setting="--pool"),
        ssd_cache_paths=tuple(folder / "kv" for folder in folders),
        **{"ssd_cache_capacity_nbytes": room_nbytes, **more},  # type: ignore[arg-type]
    )
    device = arguments.device
    torch.manual_seed(0)  # so that every manager saves the same bytes
    sent = tensors(made, step, device, filled=True)
    landed = tensors(made, 2 * step, device, filled=False)
    with Manager(config) as manager:
        source, target = (
            manager.register(made, kept, model=ModelIdentity("bench")) for kept in (sent, landed)
        )
        yield Bench(manager, pages, step, source, target, sent, landed)
        assert manager.leaks() == []
