"""Remote: what a client holds of what the daemon has, and has to move itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from orbitkv.cache.catalogue import Tier
from orbitkv.errors import ImpossibleRequest
from orbitkv.runtime import wire
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.ipc import EventExporter
from orbitkv.runtime.lanes import HostLane
from orbitkv.runtime.leases import PrefixLease
from orbitkv.runtime.tensors import Exported, Mirror


@dataclass(eq=False)
class RemoteInstance(Instance):
    """A registration that the daemon holds; its tensors are this process's own.

    Attributes:
        number: The daemon's handle.
        exported: What it was told of the tensors.
    """

    number: int = 0
    exported: Exported | None = None
    events: EventExporter | None = None

    @property
    def mirror(self) -> Mirror | None:
        """Where the daemon sees host pages that cannot be shared; None where all can."""
        return self.exported.mirror if self.exported else None

    def close(self) -> None:
        """Give back what the registration took in this process."""
        if self.exported:
            self.exported.close()
        if self.events:
            self.events.close()


class RemoteLease(PrefixLease):
    """A lease that the daemon holds; one of nothing it does not."""

    def __init__(
        self,
        instance: Instance,
        hashes: tuple[bytes, ...],
        leased: wire.Leased,
        release: Callable[[PrefixLease], None],
    ) -> None:
        super().__init__(instance, hashes, (), release, spent=not hashes)
        self.number = leased.lease
        self._tiers = leased.tiers

    def tiers(self) -> dict[Tier, int]:
        """How many objects come from each tier."""
        return {tier: self._tiers.get(tier, 0) for tier in Tier}


@dataclass(frozen=True, slots=True)
class Move:
    """What a save or a restore has to do on this side of the socket.

    Attributes:
        pages: As asked for; a save may name a hash twice.
        request: Makes the message from its number and the handle of a shared event.
    """

    instance: RemoteInstance
    pages: tuple[tuple[bytes, int], ...]
    lane: HostLane
    saves: bool
    request: Callable[[int, bytes], wire.Request]


def check_count(hashes: Sequence[bytes], accepted: int) -> None:
    """Refuse a request that names more pages than the daemon takes in one."""
    if len(hashes) > accepted:
        raise ImpossibleRequest(
            f"{len(hashes)} page hashes in one request; the daemon accepts: {accepted}"
        )
