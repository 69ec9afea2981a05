"""P, other hosts by way of Mooncake: offer what D admitted, fetch what only they have."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.config import Config
from orbitkv.errors import Unavailable
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.probe import mooncake_unavailable
from orbitkv.stages.base import Batch, Outputs, StageContext
from orbitkv.stages.batch import LoadedBatch, PeerBatch, PeerReadBatch


class PeerRoute:
    """What both directions share. This release has no peer client yet, and says so."""

    lanes: ClassVar[Lanes] = frozenset({"peer"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """The first thing that is missing here."""
        del config
        return mooncake_unavailable() or "this release has no peer client yet"

    async def run(self, batch: Batch, ctx: StageContext) -> Outputs:
        """Refuse: a runtime that asked first never gets here."""
        del batch
        raise Unavailable(self.unavailable(ctx.config) or "")


class OfferPeer(PeerRoute):
    """Offer objects to other hosts.

    In:  ``PeerBatch``: weak references to copies in DRAM.
    Out: nothing.
    """

    inputs: ClassVar[Ports] = {"in": Port(PeerBatch)}
    outputs: ClassVar[Ports] = {}


class FetchPeer(PeerRoute):
    """Fetch objects from other hosts into pool memory.

    In:  ``PeerReadBatch``.
    Out: ``LoadedBatch``: copies in DRAM that nothing has checked.
    """

    inputs: ClassVar[Ports] = {"in": Port(PeerReadBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(LoadedBatch)}
