"""The ``.okvtrace`` file: its records, and how they are written.

``docs/tracing.md`` gives the format.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections import deque
from typing import Any, BinaryIO, Final, get_args

import msgspec

MAGIC: Final = b"OKVTRACE"
VERSION: Final = 1
MAX_BUFFERED_PAYLOAD_NBYTES = 64 * 2**20
MAX_RECORD_NBYTES = 2 * MAX_BUFFERED_PAYLOAD_NBYTES
MAX_BUFFERED = 2**16
FILE_HEAD = struct.Struct("<8sII")  # magic, version, CRC-32 of both
HEAD = struct.Struct("<III")  # bytes of the record, its CRC-32, CRC-32 of these two
_LENGTHS = struct.Struct("<II")
_ENCODER = msgspec.msgpack.Encoder()
_TURN_S = 0.1  # between two looks of the writer at its buffer


class TracedEdge(msgspec.Struct, frozen=True):
    """One arrow of a traced pipeline; ``name`` is that of its queue."""

    name: str
    src: str
    dst: str
    max_items: int
    max_nbytes: int
    on_full: str


class TracedPipeline(msgspec.Struct, frozen=True):
    """A definition, as its file has it, and what ran of it.

    Attributes:
        direction: ``save`` or ``restore``.
        text: Of the definition's file, whose bytes ``sha256`` is of.
        labels, lanes: By node.
        stages: Names by node, in order.
        unavailable: Nodes that were off, and why.
    """

    direction: str
    name: str
    sha256: str
    text: str
    labels: dict[str, str]
    lanes: dict[str, str]
    stages: dict[str, tuple[str, ...]]
    edges: tuple[TracedEdge, ...]
    unavailable: dict[str, str]


class Record(msgspec.Struct, frozen=True, array_like=True, tag=True, gc=False):
    """What stands in a trace, all but its header as an array of fields after a tag."""


class Header(msgspec.Struct, frozen=True, tag="header"):
    """The first record, a map.

    Attributes:
        fields: Names of the fields of each other kind of record, by its tag.
        unix_ns: Time of day at ``clock_ns``, which is on the clock of all other records.
        digests, payloads: Whether spans have digests, and pages were recorded.
        config: Settings of the manager, as text.
        bounds: Records and bytes of pages that waited for the writer at most; more were lost.
    """

    fields: dict[str, tuple[str, ...]]
    unix_ns: int
    clock_ns: int
    digests: bool
    payloads: bool
    versions: dict[str, str]
    hardware: dict[str, str]
    config: dict[str, str]
    pipelines: tuple[TracedPipeline, ...]
    bounds: dict[str, int]


class Space(Record, frozen=True, tag="namespace"):
    """A namespace that had work, and the number that stands for it. 0 stands for none."""

    number: int
    namespace: str


class Arrival(Record, frozen=True, tag="arrival"):
    """A request came, or had come before the recording began.

    Attributes:
        ticket: Its number in this trace; 0 for a query, which has no ticket.
        kind: ``publish``, ``query``, ``restore``, ``warm``, ``prepare``, or ``under way``.
        indices: Of pages, where the kind has any.
    """

    ns: int
    ticket: int
    kind: str
    namespace: int
    hashes: tuple[bytes, ...]
    indices: tuple[int, ...]


class Remote(Record, frozen=True, tag="remote"):
    """A ticket is the request ``number`` of a session of another process."""

    ns: int
    ticket: int
    pid: int
    session: int
    number: int


class Ended(Record, frozen=True, tag="ended"):
    """A request ended: ``saved``, ``restored``, ``miss``, ``warmed``, or a fault's class."""

    ns: int
    ticket: int
    outcome: str
    pages: int
    missed: int


class Span(Record, frozen=True, tag="span"):
    """One stage's work on one batch.

    Attributes:
        pipeline: ``save`` or ``restore``.
        batch: Number of the batch's visit to the node, in the order in which it took them.
        parent: The visit that sent the batch; 0 where it was submitted.
        ticket: Request that it works for; 0: background work.
        edge: Queue that the batch came by; empty at every stage but a node's first.
        start_ns, end_ns: Of the stage, on the host's clock.
        wait_ns: In the queue. ``blocked_ns``: before there was room in it.
        paused_ns: Between start and end, while what it had given waited for room.
        in_nbytes: Of the batch it was given.
        stored_nbytes: Of the batches it gave; of the given one where it gave none.
        raw: Segments that stay raw, by reason.
        generations: Least and greatest, 0 where there is none.
        digest: SHA-256 of what it gave, where that was asked for and lies in host memory.
        outcome: ``ok``, ``cancelled``, a fault's class; ``corrupt`` or ``missed`` where some pages
            were, and the others went on.
        missed: Pages that became misses here.
        ended_by: ``host``: the host did it, or waited for it. ``event``: a GPU's event that the
            stage waited for. ``enqueued``: a GPU has been told, and ends later.
    """

    pipeline: str
    node: str
    stage: str
    lane: str
    batch: int
    parent: int
    ticket: int
    namespace: int
    edge: str
    start_ns: int
    end_ns: int
    wait_ns: int
    blocked_ns: int
    paused_ns: int
    in_nbytes: int
    stored_nbytes: int
    segments: int
    raw: dict[str, int]
    generations: tuple[int, int]
    digest: bytes
    outcome: str
    missed: int
    ended_by: str


class Drop(Record, frozen=True, tag="drop"):
    """A queue did not pass a batch on: full, too small for it, closed, or its sender cancelled."""

    ns: int
    pipeline: str
    edge: str
    parent: int
    ticket: int
    namespace: int
    nbytes: int
    reason: str


class Sample(Record, frozen=True, tag="sample"):
    """Values of counters at one time, by name."""

    ns: int
    values: dict[str, int]


class Payload(Record, frozen=True, tag="payload"):
    """Raw bytes of the pages of one visit, slot after slot, object after object."""

    batch: int
    keys: tuple[bytes, ...]
    pages: bytes


class Lost(Record, frozen=True, tag="lost"):
    """So many records found no room in the buffer since the one before this."""

    ns: int
    records: int
    payload_nbytes: int


class End(Record, frozen=True, tag="end"):
    """The recording was ended, and all that it had is in the file."""

    ns: int
    records: int
    lost: int


_BODIES = Space | Arrival | Remote | Ended | Span | Drop | Sample | Payload | Lost | End
FIELDS = {str(kind.__struct_config__.tag): kind.__struct_fields__ for kind in get_args(_BODIES)}
HEADERS = msgspec.msgpack.Decoder(Header)
RECORDS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_BODIES)


class TraceWriter:
    """Writes records to a file, in a thread of its own; takes them without waiting.

    Args:
        file: Open for writing, and the writer's from now on.
        header: The first record.
        max_buffered: Records that may wait; more are lost, and counted.

    Attributes:
        fault: Why nothing is written any more; None while all is well.
        records, lost: So far.
    """

    def __init__(self, file: BinaryIO, header: Header, *, max_buffered: int = MAX_BUFFERED) -> None:
        self.fault: BaseException | None = None
        self.records = 0
        self.lost = 0
        self._file = file
        self._max_buffered = max_buffered
        self._buffer: deque[Record] = deque()
        self._payload_nbytes = [0, 0]  # taken by the loop, and written by the thread
        self._lost = [0, 0]
        self._end_ns: int | None = None
        self._wake = threading.Event()
        self._thread = threading.Thread(
            target=self._run, args=(header,), name="orbitkv-trace", daemon=True
        )
        self._thread.start()

    def put(self, record: Record, ns: int, payload_nbytes: int = 0) -> bool:
        """Take a record on the loop; False where it is lost."""
        buffer = self._buffer
        full = len(buffer) >= self._max_buffered
        if payload_nbytes:
            taken, written = self._payload_nbytes
            full |= taken - written + payload_nbytes > MAX_BUFFERED_PAYLOAD_NBYTES
        if full:
            self._lost[0] += 1
            self._lost[1] += payload_nbytes
            self.lost += 1
            self._wake.set()
            return False
        if self._lost[0]:
            buffer.append(Lost(ns, *self._lost))
            self._lost = [0, 0]
        self._payload_nbytes[0] += payload_nbytes
        buffer.append(record)
        if len(buffer) * 2 > self._max_buffered:
            self._wake.set()
        return True

    def close(self, ns: int) -> None:
        """Write what is left, and how many records there were and were not; may block."""
        if self._lost[0]:
            self._buffer.append(Lost(ns, *self._lost))
        self._end_ns = ns
        self._wake.set()
        self._thread.join()

    def _run(self, header: Header) -> None:
        try:
            with self._file as file:
                file.write(file_head())
                file.write(frame(header))
                while True:
                    end_ns = self._end_ns
                    if end_ns is None:
                        self._wake.wait(_TURN_S)
                        self._wake.clear()
                    self._drain()
                    if end_ns is not None:
                        file.write(frame(End(end_ns, self.records, self.lost)))
                        return
                    file.flush()
        except BaseException as error:  # noqa: BLE001 - told by whoever looks at ``fault``
            self.fault = error
            self._buffer.clear()

    def _drain(self) -> None:
        buffer = self._buffer
        for _ in range(len(buffer)):
            record = buffer.popleft()
            self._file.write(frame(record))
            self.records += 1
            if isinstance(record, Payload):
                self._payload_nbytes[1] += len(record.pages)


def file_head() -> bytes:
    """The first bytes of a trace."""
    start = MAGIC + VERSION.to_bytes(4, "little")
    return FILE_HEAD.pack(MAGIC, VERSION, zlib.crc32(start))


def frame(record: Record | Header) -> bytes:
    """A record as it stands in the file."""
    body = _ENCODER.encode(record)
    lengths = _LENGTHS.pack(len(body), zlib.crc32(body))
    return lengths + zlib.crc32(lengths).to_bytes(4, "little") + body
