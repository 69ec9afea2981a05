"""Wire: the messages between a client and the daemon.

A frame is its length (u32, little-endian) and one message in msgpack. File descriptors of shared
memory travel beside the frame that names them.
"""

from __future__ import annotations

import struct
from typing import Any

import msgspec

from orbitkv import errors
from orbitkv.errors import GeometryError, OrbitError, ProtocolError
from orbitkv.runtime.core import Flushed, ManagerStatistics
from orbitkv.runtime.trace import TraceTotals
from orbitkv.segment import Geometry, ModelIdentity
from orbitkv.stages.ticket import Failed, Miss, Outcome, Restored, Saved, Warmed

VERSION = 1
MAX_MESSAGE_NBYTES = 4 * 2**20
MAX_DESCRIPTORS = 64
MAX_HASHES = 16_384
_MAGIC = "orbitkv"
LENGTH = struct.Struct("<I")

Hashes = tuple[bytes, ...]


class Memory(msgspec.Struct, frozen=True, array_like=True):
    """Memory of an engine that the daemon is to map.

    Attributes:
        kind: ``shared``: the next descriptor, a sealed memfd. ``cuda``: an allocation on a GPU.
        handle: Of ``cuda``: the ``cudaIpcMemHandle_t`` of the allocation's base, 64 bytes.
        bus_id: Of ``cuda``: the GPU's PCI bus id, as ordinals differ between processes.
    """

    kind: str
    nbytes: int
    handle: bytes = b""
    bus_id: str = ""


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """One slot's tensor: a strided view into a memory. Several may lie in one.

    Attributes:
        memory: Index into the memories of its registration.
        offset, strides: Bytes.
    """

    slot: str
    memory: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class Fault(msgspec.Struct, frozen=True, array_like=True):
    """An ``OrbitError``: the name of its class, its message, and a ``GeometryError``'s faults."""

    kind: str
    message: str
    faults: tuple[str, ...] = ()


class Request(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What a client sends. ``number`` is its own, and comes back in the reply."""

    number: int


class Hello(Request, frozen=True, tag="hello"):
    """The first message of a session, answered by ``Welcome``."""

    version: int
    magic: str = _MAGIC


class Ping(Request, frozen=True, tag="ping"):
    """Answered by ``Done``, whatever else is under way."""


class Register(Request, frozen=True, tag="register"):
    """One rank's part of an instance; answered by ``Registered``.

    Attributes:
        rank, ranks: Of the instance; a page counts only if every rank has it.
    """

    geometry: Geometry
    model: ModelIdentity
    memories: tuple[Memory, ...]
    tensors: tuple[Tensor, ...]
    rank: int = 0
    ranks: int = 1


class Unregister(Request, frozen=True, tag="unregister"):
    """Answered by ``Done`` once everything of the instance has ended and been freed."""

    instance: int


class Publish(Request, frozen=True, tag="publish"):
    """Save pages; answered by ``Ended`` when the save has.

    Attributes:
        ready: The ``cudaIpcEventHandle_t`` to wait for; empty: the pages stand.
    """

    instance: int
    hashes: Hashes
    indices: tuple[int, ...]
    ready: bytes = b""


class Query(Request, frozen=True, tag="query"):
    """Answered by ``Leased``."""

    instance: int
    hashes: Hashes


class Prepare(Request, frozen=True, tag="prepare"):
    """A query that is no demand; answered by ``Leased``, and by ``Ended`` once all is in DRAM.

    Attributes:
        ticket: The number that ``Ended`` comes back with.
    """

    instance: int
    hashes: Hashes
    ticket: int


class Warm(Request, frozen=True, tag="warm"):
    """Bring pages to DRAM that SSD alone has; answered by ``Ended`` when it has ended."""

    instance: int
    hashes: Hashes


class Release(Request, frozen=True, tag="release"):
    """Has no answer."""

    lease: int


class Restore(Request, frozen=True, tag="restore"):
    """Restore pages of a lease, which is spent; answered by ``Ended`` when the restore has."""

    lease: int
    hashes: Hashes
    indices: tuple[int, ...]
    ready: bytes = b""


class Cancel(Request, frozen=True, tag="cancel"):
    """Let go what request ``number`` has not submitted. Has no answer of its own."""


class Flush(Request, frozen=True, tag="flush"):
    """Answered by ``FlushEnded``."""

    evict_dram: bool


class GetStatus(Request, frozen=True, tag="status"):
    """Answered by ``Status``."""


class GetLeaks(Request, frozen=True, tag="leaks"):
    """Answered by ``Leaks``."""


class BeginTrace(Request, frozen=True, tag="begin_trace"):
    """Record to the next descriptor, a regular file; answered by ``Done``. Ends with the session.

    Attributes:
        digests, payloads: Hash what each stage gives; record the pages that saves read.
    """

    digests: bool
    payloads: bool


class EndTrace(Request, frozen=True, tag="end_trace"):
    """Answered by ``TraceEnded`` once all is in the file."""


class Reply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What the daemon sends, to the request of this number. 0: to none, as the session ends."""

    number: int


class Welcome(Reply, frozen=True, tag="welcome"):
    """A session has begun.

    Attributes:
        incarnation: Of this start of the daemon; no handle of another one is taken.
        max_in_flight: Saves, restores and warmings that may be under way at once, and of other
            requests those that have no answer yet. More are refused.
        max_hashes: Page hashes that one request may name; more are refused.
        lease_ttl_s: How long a lease stands that is not restored.
    """

    version: int
    incarnation: int
    pid: int
    max_in_flight: int
    max_hashes: int
    lease_ttl_s: float


class Done(Reply, frozen=True, tag="done"):
    """The request was carried out."""


class Refused(Reply, frozen=True, tag="refused"):
    """The request was not carried out, or failed."""

    fault: Fault


class Registered(Reply, frozen=True, tag="registered"):
    """The daemon's handle of an instance."""

    instance: int
    namespace: str


class Leased(Reply, frozen=True, tag="leased"):
    """A lease on the first ``pages`` of the hashes asked for. Of none there is no lease: 0.

    Attributes:
        tiers: Objects by tier.
    """

    lease: int
    pages: int
    tiers: dict[str, int]


class Ended(Reply, frozen=True, tag="ended"):
    """A save or restore has ended.

    Attributes:
        kind: ``saved``, ``restored``, ``miss`` or ``warmed``.
        done, resident, not_done: Hashes; ``Saved`` alone has resident ones.
    """

    kind: str
    done: Hashes
    resident: Hashes
    not_done: Hashes


class FlushEnded(Reply, frozen=True, tag="flushed"):
    """What a flush did."""

    flushed: Flushed


class TraceEnded(Reply, frozen=True, tag="trace_ended"):
    """What a recording came to."""

    totals: TraceTotals


class DaemonStatus(msgspec.Struct, frozen=True):
    """A snapshot of the daemon.

    Attributes:
        counters: Of what clients asked: queries, pages asked for and found, objects by tier.
    """

    pid: int
    incarnation: int
    up_s: float
    sessions: int
    instances: int
    leases: int
    tickets: int
    ended_sessions: int
    refused_sessions: int
    counters: dict[str, int]
    statistics: ManagerStatistics


class Status(Reply, frozen=True, tag="status"):
    """A snapshot of the daemon."""

    status: DaemonStatus


class Leaks(Reply, frozen=True, tag="leaks"):
    """What is not as it must be at rest."""

    found: tuple[str, ...]


AnyRequest = (
    Hello
    | Ping
    | Register
    | Unregister
    | Publish
    | Query
    | Prepare
    | Warm
    | Release
    | Restore
    | Cancel
    | Flush
    | GetStatus
    | GetLeaks
    | BeginTrace
    | EndTrace
)
AnyReply = (
    Welcome
    | Done
    | Refused
    | Registered
    | Leased
    | Ended
    | FlushEnded
    | TraceEnded
    | Status
    | Leaks
)
_ENCODER = msgspec.msgpack.Encoder()
REQUESTS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyRequest)
REPLIES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(AnyReply)


def encode(message: Request | Reply) -> bytearray:
    """Make the frame of a message.

    Raises:
        ProtocolError: it is longer than a message may be.
    """
    frame = bytearray(LENGTH.size)
    _ENCODER.encode_into(message, frame, LENGTH.size)
    nbytes = len(frame) - LENGTH.size
    if nbytes > MAX_MESSAGE_NBYTES:
        raise ProtocolError(f"a message of {nbytes} bytes; accepted: {MAX_MESSAGE_NBYTES}")
    LENGTH.pack_into(frame, 0, nbytes)
    return frame


def fault_of(error: OrbitError) -> Fault:
    """Describe an error for the other side."""
    faults = error.faults if isinstance(error, GeometryError) else ()
    return Fault(type(error).__name__, str(error), faults)


def error_of(fault: Fault) -> OrbitError:
    """The error that the other side described."""
    kind = getattr(errors, fault.kind, OrbitError)
    if kind is GeometryError and fault.faults:
        return GeometryError(fault.faults)
    if not (isinstance(kind, type) and issubclass(kind, OrbitError)):
        kind = OrbitError
    made: OrbitError = kind.__new__(kind, fault.message)  # what it was made from stayed there
    return made


def ended_of(number: int, outcome: Outcome) -> Ended | Refused:
    """Describe how a ticket ended."""
    if isinstance(outcome, Saved):
        return Ended(number, "saved", outcome.stored, outcome.resident, outcome.dropped)
    if isinstance(outcome, Restored):
        return Ended(number, "restored", outcome.restored, (), outcome.missed)
    if isinstance(outcome, Miss):
        return Ended(number, "miss", (), (), outcome.missed)
    if isinstance(outcome, Warmed):
        return Ended(number, "warmed", outcome.warm, (), outcome.missed)
    return Refused(number, fault_of(outcome.error))


def outcome_of(ended: Ended, ready: object | None) -> Outcome:
    """The outcome that the other side described; ``ready`` is of a restore into a GPU."""
    if ended.kind == "saved":
        return Saved(ended.done, ended.resident, ended.not_done)
    if ended.kind == "restored":
        return Restored(ended.done, ended.not_done, ready)
    if ended.kind == "miss":
        return Miss(ended.not_done)
    if ended.kind == "warmed":
        return Warmed(ended.done, ended.not_done)
    accepted = "saved, restored, miss, warmed"
    return Failed(ProtocolError(f"an outcome {ended.kind!r}; accepted: {accepted}"))
