"""G, registered GPU staging: where encoded bytes wait for cuFile, or land from it."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.config import Config
from orbitkv.errors import Unavailable
from orbitkv.graph import Lanes, Port, Ports
from orbitkv.probe import cuda_unavailable, kvikio_unavailable
from orbitkv.stages.base import Batch, Outputs, StageContext
from orbitkv.stages.batch import LandedBatch, SealedBatch, StagedBatch, UploadedBatch


class DirectRoute:
    """What S and G share: the route between GPU memory and SSD that leaves out the host.

    This release does not have the route, so it is never available; its ports are checked all the
    same, and the reason is told wherever the graph is shown.
    """

    lanes: ClassVar[Lanes] = frozenset({"stream", "file"})

    @staticmethod
    def unavailable(config: Config) -> str | None:
        """The first thing that is missing here."""
        del config
        missing = cuda_unavailable() or kvikio_unavailable()
        return missing or "this release has no direct route yet; D and U serve instead"

    async def run(self, batch: Batch, ctx: StageContext) -> Outputs:
        """Refuse: a runtime that asked first never gets here."""
        del batch
        raise Unavailable(self.unavailable(ctx.config) or "")


class StageForWrite(DirectRoute):
    """Gather the encoded bytes of one object in a registered slot, padding zeroed.

    In:  ``SealedBatch``, device.
    Out: ``StagedBatch``, device.
    """

    inputs: ClassVar[Ports] = {"in": Port(SealedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(StagedBatch)}


class LandRead(DirectRoute):
    """Hand objects that cuFile read over to the decoder, where they landed.

    In:  ``LandedBatch``, device.
    Out: ``UploadedBatch``, device.
    """

    inputs: ClassVar[Ports] = {"in": Port(LandedBatch)}
    outputs: ClassVar[Ports] = {"out": Port(UploadedBatch)}
