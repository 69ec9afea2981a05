"""One module a flowchart box; here, the names that a definition gives their stages."""

from __future__ import annotations

from collections.abc import Mapping

from orbitkv.graph import StageType
from orbitkv.stages.cufile import ReadCuFile, WriteCuFile
from orbitkv.stages.decode import Decode, Upload, Validate
from orbitkv.stages.dram import ServeDram, StoreDram
from orbitkv.stages.encode import Crc32, Encode
from orbitkv.stages.engine import GatherPages, PlacePages
from orbitkv.stages.io_uring import ReadExtents, WriteExtents
from orbitkv.stages.peer import FetchPeer, OfferPeer
from orbitkv.stages.staging import LandRead, StageForWrite

STAGES: Mapping[str, type[StageType]] = {
    "gather": GatherPages,
    "encode": Encode,
    "crc32": Crc32,
    "store": StoreDram,
    "stage": StageForWrite,
    "write_cufile": WriteCuFile,
    "write": WriteExtents,
    "offer": OfferPeer,
    "read": ReadExtents,
    "read_cufile": ReadCuFile,
    "land": LandRead,
    "fetch": FetchPeer,
    "serve": ServeDram,
    "upload": Upload,
    "validate": Validate,
    "decode": Decode,
    "place": PlacePages,
}
