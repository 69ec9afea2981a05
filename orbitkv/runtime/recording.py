"""Recording: a trace that has been read, as far as it goes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from orbitkv.errors import TraceError
from orbitkv.runtime.trace_file import (
    FILE_HEAD,
    HEAD,
    HEADERS,
    MAGIC,
    MAX_RECORD_NBYTES,
    RECORDS,
    VERSION,
    Arrival,
    Drop,
    End,
    Ended,
    Header,
    Lost,
    Payload,
    Record,
    Remote,
    Sample,
    Space,
    Span,
    TracedPipeline,
)

R = TypeVar("R")


@dataclass
class Recording:
    """A trace that has been read, as far as it goes.

    Attributes:
        cut: Where it ends before its end, in words; None where it is whole.
        tickets: Arrivals of requests with a ticket, by its number.
    """

    path: Path
    header: Header
    cut: str | None = None
    spaces: dict[int, str] = field(default_factory=dict)
    arrivals: list[Arrival] = field(default_factory=list)
    tickets: dict[int, Arrival] = field(default_factory=dict)
    remotes: dict[int, Remote] = field(default_factory=dict)
    ended: dict[int, Ended] = field(default_factory=dict)
    spans: list[Span] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    payloads: dict[int, Payload] = field(default_factory=dict)
    lost: int = 0

    @property
    def pipelines(self) -> Mapping[str, TracedPipeline]:
        """By direction."""
        return {pipeline.direction: pipeline for pipeline in self.header.pipelines}

    def take(self, record: Record) -> None:
        """Add one record."""
        if isinstance(record, Span | Drop | Sample | Arrival):
            lists: dict[type, list[Any]] = {
                Span: self.spans,
                Drop: self.drops,
                Sample: self.samples,
                Arrival: self.arrivals,
            }
            lists[type(record)].append(record)
        if isinstance(record, Arrival) and record.ticket:
            self.tickets[record.ticket] = record
        elif isinstance(record, Remote):
            self.remotes[record.ticket] = record
        elif isinstance(record, Ended):
            self.ended[record.ticket] = record
        elif isinstance(record, Space):
            self.spaces[record.number] = record.namespace
        elif isinstance(record, Payload):
            self.payloads[record.batch] = record
        elif isinstance(record, Lost):
            self.lost += record.records


def read_recording(path: Path) -> Recording:
    """Read a trace, up to where it was cut.

    Raises:
        TraceError: it is no trace, its header is not whole, or a byte was changed: at which record.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        _check_head(path, file.read(FILE_HEAD.size))
        bodies = _bodies(path, file)
        where, first = next(bodies, ("cut before its header", None))
        if first is None:
            raise TraceError(f"{path}: {where}; accepted: a trace with its header")
        found = Recording(path, _decode(HEADERS, path, where, first), cut="cut after its header")
        for where, body in bodies:
            if body is None:
                found.cut = where
                break
            record = _decode(RECORDS, path, where, body)
            if isinstance(record, End):
                found.cut = None
                if file.read(1):
                    raise TraceError(f"{path}: bytes after its end")
                break
            found.take(record)
            found.cut = f"cut after {where}"
    return found


def _check_head(path: Path, head: bytes) -> None:
    if len(head) < FILE_HEAD.size and MAGIC.startswith(head[: len(MAGIC)]):
        raise TraceError(f"{path}: cut at byte {len(head)}, within its head")
    if not head.startswith(MAGIC):
        raise TraceError(f"{path}: no trace; accepted: a file of orbitkv trace record")
    _, version, crc = FILE_HEAD.unpack(head)
    if crc != zlib.crc32(head[:-4]):
        raise TraceError(f"{path}: its head was changed")
    if version != VERSION:
        raise TraceError(f"{path}: version {version}; accepted: {VERSION}")


def _bodies(path: Path, file: BinaryIO) -> Iterator[tuple[str, bytes | None]]:
    """Every record, and where it is; in the end, one that is not whole as None, and why."""
    at, number = file.tell(), 0
    while head := file.read(HEAD.size):
        number += 1
        where = f"record {number} at byte {at}"
        if len(head) < HEAD.size:
            yield f"cut within {where}", None
            return
        nbytes, crc, head_crc = HEAD.unpack(head)
        if zlib.crc32(head[:-4]) != head_crc:
            raise TraceError(f"{path}: {where}: its head was changed")
        if nbytes > MAX_RECORD_NBYTES:
            accepted = f"up to {MAX_RECORD_NBYTES}"
            raise TraceError(f"{path}: {where}: {nbytes} bytes; accepted: {accepted}")
        body = file.read(nbytes)
        if len(body) < nbytes:
            yield f"cut within {where}", None
            return
        if zlib.crc32(body) != crc:
            raise TraceError(f"{path}: {where}: its bytes were changed")
        at += len(head) + nbytes
        yield where, body


def _decode(decoder: msgspec.msgpack.Decoder[R], path: Path, where: str, body: bytes) -> R:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise TraceError(f"{path}: {where}: {error}") from error
