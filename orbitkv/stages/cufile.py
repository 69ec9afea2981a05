"""S, the SSD by way of cuFile: straight from and to registered GPU memory."""

from __future__ import annotations

from typing import ClassVar

from orbitkv.graph import Port, Ports
from orbitkv.stages.batch import DirectReadBatch, LandedBatch, StagedBatch
from orbitkv.stages.staging import DirectRoute


class WriteCuFile(DirectRoute):
    """Write one staged batch to its extents.

    In:  ``StagedBatch``, device.
    Out: nothing. The extents are visible to readers once ``run`` returns.
    """

    inputs: ClassVar[Ports] = {"in": Port(StagedBatch)}
    outputs: ClassVar[Ports] = {}


class ReadCuFile(DirectRoute):
    """Read extents into registered slots.

    In:  ``DirectReadBatch``: copies on SSD, pinned.
    Out: ``LandedBatch``, device.
    """

    inputs: ClassVar[Ports] = {"in": Port(DirectReadBatch, entry=True)}
    outputs: ClassVar[Ports] = {"out": Port(LandedBatch)}
