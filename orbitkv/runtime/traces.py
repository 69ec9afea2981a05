"""Request traces: what was asked of an engine, request by request, without payloads."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

from orbitkv.errors import TraceError

BLOCK_TOKENS = 512
"""Tokens that one hash id of a public trace stands for."""

MOST_TOKENS = 2**31 - 1  # of one request
MOST_ID = 2**63 - 1
MOST_BLOCKS = 2**31 - 1  # of one trace, so that a block has a number of 32 bits
MOST_MS = 2**53 - 1

_SHOWN = 60  # characters of what was seen
_PIECE = 2**20  # blocks numbered at once, so that what is needed meanwhile stays small
_TELL_EVERY_NBYTES = 2**20

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RequestTrace:
    """Requests in the order in which they came. All arrays are on the host.

    Attributes:
        starts: int64[requests + 1]. Request ``i`` has the blocks ``starts[i]`` to
            ``starts[i + 1]``, in the order of its prompt.
        blocks: int32[...]: number of each block, 0 to ``unique_blocks - 1``. A number names a
            block together with all before it.
        timestamps_ms: float64[requests].
        input_tokens, output_tokens: int64[requests].
    """

    starts: Int64s
    blocks: Int32s
    unique_blocks: int
    timestamps_ms: npt.NDArray[np.float64]
    input_tokens: Int64s
    output_tokens: Int64s


_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MOST_TOKENS)]


class _Request(msgspec.Struct):
    """One line. Fields that it has besides are not ours."""

    timestamp: Annotated[float, msgspec.Meta(ge=0, le=MOST_MS)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: list[Annotated[int, msgspec.Meta(ge=0, le=MOST_ID)]]


def read_trace(path: Path, *, on_read: Callable[[int], None] | None = None) -> RequestTrace:
    """Read a trace of JSON lines with ``timestamp``, ``input_length``, ``output_length``,
    ``hash_ids``; empty lines are passed over.

    Args:
        on_read: Called now and then, with the bytes that have been read.

    Raises:
        TraceError: with file, line and field, what was seen, and what is accepted.
        OSError: the file cannot be read.
    """  # noqa: D205 - the fields belong together
    decoder = msgspec.json.Decoder(_Request)
    ids, starts = array("q"), array("q", (0,))
    timestamps, inputs, outputs = array("d"), array("q"), array("q")
    read_nbytes, told_nbytes = 0, 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            read_nbytes += len(line)
            if on_read and read_nbytes - told_nbytes >= _TELL_EVERY_NBYTES:
                told_nbytes = read_nbytes
                on_read(read_nbytes)
            if line.isspace():
                continue
            try:
                request = decoder.decode(line)
            except (msgspec.DecodeError, RecursionError):
                raise TraceError(f"{path}, line {number}: {_fault(line)}") from None
            hash_ids = request.hash_ids
            if len(set(hash_ids)) != len(hash_ids):
                at, twice = _first_repeated(hash_ids)
                raise TraceError(
                    f"{path}, line {number}: hash_ids[{at}]: {twice} for the second time; "
                    "accepted: each id once in a request"
                )
            ids.extend(hash_ids)
            starts.append(len(ids))
            timestamps.append(request.timestamp)
            inputs.append(request.input_length)
            outputs.append(request.output_length)
    if not inputs:
        raise TraceError(f"{path}: no request; accepted: {_ONE_LINE}")
    if len(ids) > MOST_BLOCKS:
        raise TraceError(f"{path}: {len(ids)} blocks; accepted: up to {MOST_BLOCKS}")
    blocks, unique_blocks = _number(np.frombuffer(ids, np.int64))
    return RequestTrace(
        np.array(starts),
        blocks,
        unique_blocks,
        np.array(timestamps),
        np.array(inputs),
        np.array(outputs),
    )


def cut_pages(trace: RequestTrace, page_tokens: int) -> tuple[Int64s, Int32s, int]:
    """Turn blocks of 512 tokens into pages of ``page_tokens``, a divisor or a multiple of 512.

    Pages that are smaller divide their block; a request's last block has as many as its tokens
    fill, whole or in part. Pages that are larger are named by the last of their blocks, since that
    names all before it too.

    Returns:
        Starts, pages and unique pages, as ``RequestTrace`` has them of blocks.

    Raises:
        TraceError: the trace has too many pages.
    """
    starts, blocks = trace.starts, trace.blocks
    if page_tokens == BLOCK_TOKENS:
        return starts, blocks, trace.unique_blocks
    counts = np.diff(starts)
    if page_tokens > BLOCK_TOKENS:
        factor = page_tokens // BLOCK_TOKENS
        paged = _starts(-(-counts // factor))
        at = np.arange(paged[-1]) - np.repeat(paged[:-1], np.diff(paged))
        last = np.minimum((at + 1) * factor, np.repeat(counts, np.diff(paged))) - 1
        return paged, *_number(blocks[np.repeat(starts[:-1], np.diff(paged)) + last])
    factor = BLOCK_TOKENS // page_tokens
    total = len(blocks) * factor
    if total > MOST_BLOCKS:
        raise TraceError(
            f"{total} pages of {page_tokens} tokens; accepted: up to {MOST_BLOCKS} in a trace"
        )
    last_tokens = trace.input_tokens - (counts - 1) * BLOCK_TOKENS
    last_pages = np.clip(-(-last_tokens // page_tokens), 1, factor)
    of_block = np.full(len(blocks), factor)
    of_block[(starts[1:] - 1)[counts > 0]] = last_pages[counts > 0]
    ends = _starts(of_block)
    within = np.arange(ends[-1]) - np.repeat(ends[:-1], of_block)
    return ends[starts], *_number(np.repeat(blocks.astype(np.int64) * factor, of_block) + within)


_ONE_LINE = (
    "one JSON object a line, with timestamp (ms), input_length and output_length (tokens), and "
    "hash_ids (one a block of 512 tokens)"
)


def _starts(counts: Int64s) -> Int64s:
    return np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))


def _number(ids: npt.NDArray[Any]) -> tuple[Int32s, int]:
    """Number ids in their own order, from zero; return how many differ, too."""
    numbers = np.empty(len(ids), np.int32)
    pieces = [slice(start, start + _PIECE) for start in range(0, len(ids), _PIECE)]
    if not len(ids):
        return numbers, 0
    most = int(ids.max())
    if most < 4 * len(ids):
        present = np.zeros(most + 1, np.bool_)
        present[ids] = True
        ranks = np.cumsum(present, dtype=np.int32)
        for piece in pieces:
            numbers[piece] = ranks[ids[piece]] - 1
        return numbers, int(ranks[-1])
    ordered = np.sort(ids)
    is_first = np.concatenate(([True], ordered[1:] != ordered[:-1]))
    distinct = ordered[is_first]
    del ordered
    for piece in pieces:
        numbers[piece] = np.searchsorted(distinct, ids[piece])
    return numbers, len(distinct)


def _first_repeated(hash_ids: list[int]) -> tuple[int, int]:
    seen: set[int] = set()
    for at, block in enumerate(hash_ids):
        if block in seen:
            return at, block
        seen.add(block)
    raise AssertionError("no id is repeated")


def _fault(line: bytes) -> str:
    """What is wrong with a line that was refused: the field, what was seen, what is accepted."""
    try:
        found = json.loads(line)  # which takes numbers of any length
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        for field, value, stands, accepted in _fields(found):
            if not stands:
                return f"{field}: {_cut(json.dumps(value))}; accepted: {accepted}"
    return f"{_cut(repr(line.decode(errors='replace').strip()))}; accepted: {_ONE_LINE}"


def _fields(found: dict[str, Any]) -> Iterator[tuple[str, object, bool, str]]:
    """Each field with its value, whether it stands, and what is accepted."""
    for field in _Request.__struct_fields__:
        yield "fields", sorted(found), field in found, f"{field} too, in {_ONE_LINE}"
    timestamp = found["timestamp"]
    stands = _is_number(timestamp, (int, float), MOST_MS)
    yield "timestamp", timestamp, stands, f"a number of ms, 0 to {MOST_MS}"
    for field in ("input_length", "output_length"):
        stands = _is_number(found[field], (int,), MOST_TOKENS)
        yield field, found[field], stands, f"a whole number of tokens, 0 to {MOST_TOKENS}"
    blocks = found["hash_ids"]
    yield "hash_ids", blocks, isinstance(blocks, list), "a list of whole numbers"
    for at, block in enumerate(blocks):
        stands = _is_number(block, (int,), MOST_ID)
        yield f"hash_ids[{at}]", block, stands, f"a whole number, 0 to {MOST_ID}"


def _is_number(value: Any, kinds: tuple[Any, ...], most: int) -> bool:  # noqa: ANN401 - of JSON
    return isinstance(value, kinds) and not isinstance(value, bool) and 0 <= value <= most


def _cut(text: str) -> str:
    """What was seen, in one line that is not too long."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(text)} characters)"
