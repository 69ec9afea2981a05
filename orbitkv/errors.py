"""Every exception that OrbitKV raises. Imports nothing, so that anything may import it."""

from __future__ import annotations


class OrbitError(Exception):
    """A fault that ends one request, or refuses one call; never a bug in a stage."""


class GraphError(OrbitError):
    """A pipeline definition is wrong. Carries every fault found, not only the first."""

    def __init__(self, name: str, faults: tuple[str, ...]) -> None:
        self.name = name
        self.faults = faults
        count = "1 fault" if len(faults) == 1 else f"{len(faults)} faults"
        super().__init__("\n".join([f"pipeline {name!r}: {count}", *(f"  - {f}" for f in faults)]))


class ConfigError(OrbitError):
    """A setting has a value that is not accepted. One line: the setting, the value, what is."""


class Unavailable(OrbitError):
    """Something that was demanded explicitly cannot be had on this machine, and why."""


class GeometryError(OrbitError):
    """A registered tensor differs from its declaration. Carries every difference found."""

    def __init__(self, faults: tuple[str, ...]) -> None:
        self.faults = faults
        super().__init__("; ".join(faults))


class DestinationError(OrbitError):
    """A page index or hash in a request cannot be used: out of range, twice, or not leased."""


class ImpossibleRequest(OrbitError):
    """More bytes were asked for than the whole budget holds, so waiting would never end."""


class CorruptObject(OrbitError):
    """Stored bytes fail a check of the object format. Always treated as a miss."""


class Undecodable(CorruptObject):
    """Stored bytes stand, but this pipeline cannot turn them into the page that was asked for."""


class ShortRead(OrbitError):
    """Fewer bytes came back than the extent holds."""

    def __init__(self, offset: int, moved_nbytes: int, wanted_nbytes: int) -> None:
        super().__init__(f"read {moved_nbytes} of {wanted_nbytes} bytes at offset {offset}")


class ShortWrite(OrbitError):
    """Fewer bytes were written than the extent holds; nothing is published."""

    def __init__(self, offset: int, moved_nbytes: int, wanted_nbytes: int) -> None:
        super().__init__(f"wrote {moved_nbytes} of {wanted_nbytes} bytes at offset {offset}")


class StoreError(OrbitError):
    """The SSD store cannot be opened or used as configured."""


class Cancelled(OrbitError):
    """The request was cancelled; what had been submitted has run to its end."""


class Dropped(OrbitError):
    """Work that nobody waits for was let go because its queue was full. It may be asked again."""


class Closed(OrbitError):
    """The manager, instance or lease is closed, and takes no new work."""


class EngineFault(OrbitError):
    """The engine's event failed, so what its pages hold is not known; nothing is saved."""


class DeviceFault(OrbitError):
    """The GPU refused or failed; what the request had enqueued there may not have been done."""


class DirectFault(OrbitError):
    """cuFile refused or failed; nothing new takes the direct route until a restart."""


class StageFault(OrbitError):
    """A stage failed with something other than an OrbitError: a bug, which stops its pipeline."""


class ProtocolError(OrbitError):
    """The other side of a socket sent what is no message, or one that it may not send."""


class SessionLost(OrbitError):
    """The session with the daemon is over: its handles are void, and its calls are refused."""


class DeadlineMissed(OrbitError):
    """The daemon did not answer in time. What was asked may still be carried out."""


class TraceError(OrbitError):
    """A trace cannot be read. One line: where, what was seen, what is accepted."""
