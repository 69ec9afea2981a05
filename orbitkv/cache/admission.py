"""Admission: which objects are written to SSD, and which may take another's place in DRAM."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Sequence
from enum import StrEnum
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from orbitkv.cache.compiled import Words, loops, view

Key = TypeVar("Key", bound=Hashable)
Hashes = npt.NDArray[np.int64]
"""int64[n], host: 64 uniform bits of each key."""

HISTORY_KEYS = 16_384


class WritePolicy(StrEnum):
    """What is written to SSD."""

    ALL = "all"
    REUSE = "reuse"


class SkipReason(StrEnum):
    """Why an object is not to be written. Intended, unlike a write that a full queue drops."""

    DUPLICATE = "duplicate"
    RESIDENT = "resident"
    PENDING = "pending"
    COLD = "cold"


class WriteAdmission(Generic[Key]):
    """Decides which objects in DRAM are to be written to SSD.

    ``all`` admits what was newly saved. ``reuse`` admits what a foreground query returned, and what
    is saved again while the history has its key: the last 16,384 keys that were saved. Neither
    admits what SSD has, nor what is on its way there. A write that is dropped later needs no word
    here, for the next save or query is judged anew.

    Args:
        resident: Keys that SSD has.
        pending: Keys whose write has been asked for and has not ended.

    Attributes:
        admitted: Objects to be written.
        skipped: Objects not to be written, each under the first reason that holds.
    """

    def __init__(
        self, policy: WritePolicy, *, resident: Container[Key], pending: Container[Key]
    ) -> None:
        self.policy = policy
        self.admitted = 0
        self.skipped: dict[SkipReason, int] = dict.fromkeys(SkipReason, 0)
        self._resident = resident
        self._pending = pending
        self._history: OrderedDict[Key, None] = OrderedDict()

    @property
    def history(self) -> tuple[Key, ...]:
        """Keys that were saved, longest ago first. Only ``reuse`` keeps them."""
        return tuple(self._history)

    def save(self, keys: Sequence[Key]) -> list[Key]:
        """Judge a batch of new copies in DRAM; return the keys to be written, in order.

        A save of what DRAM has makes no new copy, so it must not come here. A key that comes twice
        in one batch was saved once.
        """
        return self._judge(keys, self._publish)

    def query(self, keys: Sequence[Key]) -> list[Key]:
        """Judge what a foreground query returned from DRAM; return the keys to be written."""
        if self.policy is WritePolicy.ALL:
            return []  # it admits what is new, and this is not
        return self._judge(keys, lambda _: True)

    def _judge(self, keys: Sequence[Key], is_wanted: Callable[[Key], bool]) -> list[Key]:
        distinct = dict.fromkeys(keys)
        resident, pending, skipped = self._resident, self._pending, self.skipped
        skipped[SkipReason.DUPLICATE] += len(keys) - len(distinct)
        admitted = []
        for key in distinct:
            wanted = is_wanted(key)  # asked even where SSD has it: a publication all the same
            if key in resident:
                skipped[SkipReason.RESIDENT] += 1
            elif key in pending:
                skipped[SkipReason.PENDING] += 1
            elif wanted:
                admitted.append(key)
            else:
                skipped[SkipReason.COLD] += 1
        self.admitted += len(admitted)
        return admitted

    def _publish(self, key: Key) -> bool:
        """Note that an object was saved; whether that is reason enough to write it."""
        if self.policy is WritePolicy.ALL:
            return True
        history = self._history
        if key in history:
            history.move_to_end(key)
            return True
        history[key] = None
        if len(history) > HISTORY_KEYS:
            history.popitem(last=False)
        return False


# A sketch has four rows of ``width`` counters of four bits, two a byte, and a doorkeeper of
# ``_DOOR_BITS * width`` bits. ``width`` is a power of two.
_ROWS, _MOST = 4, 15
_DOOR_BITS, _DOOR_PROBES = 32, 2
_SAMPLE = 8
_MIN_WIDTH = 1024
_HALF_MASK = 0x77
_WORD_BITS, _WORD_MASK = 32, 2**31 - 1


def count_least(counters: Words, width: int, key: int) -> int:
    """The least of a key's counters."""
    first, step = key & _WORD_MASK, key >> _WORD_BITS & _WORD_MASK | 1
    least = _MOST
    for row in range(_ROWS):
        at = row * width + (first + row * step & width - 1)
        least = min(least, counters[at >> 1] >> (at & 1) * 4 & _MOST)
    return least


def knows(door: Words, width: int, key: int) -> bool:
    """Whether the doorkeeper has let a key in, or takes it for one that it has."""
    first, step = key & _WORD_MASK, key >> _WORD_BITS & _WORD_MASK | 1
    for probe in range(_ROWS, _ROWS + _DOOR_PROBES):
        at = first + probe * step & width * _DOOR_BITS - 1
        if not door[at >> 3] >> (at & 7) & 1:
            return False
    return True


def record(counters: Words, door: Words, width: int, keys: Words) -> None:
    """Count keys: the first time in the doorkeeper, then in those counters that are least."""
    for index in range(len(keys)):
        key = keys[index]
        first, step = key & _WORD_MASK, key >> _WORD_BITS & _WORD_MASK | 1
        if not knows(door, width, key):
            for probe in range(_ROWS, _ROWS + _DOOR_PROBES):
                at = first + probe * step & width * _DOOR_BITS - 1
                door[at >> 3] |= 1 << (at & 7)
            continue
        least = count_least(counters, width, key)
        if least == _MOST:
            continue
        for row in range(_ROWS):
            at = row * width + (first + row * step & width - 1)
            shift = (at & 1) * 4
            if counters[at >> 1] >> shift & _MOST == least:
                counters[at >> 1] += 1 << shift


def estimate(counters: Words, door: Words, width: int, keys: Words, out: Words) -> None:
    """Write how often each key was counted."""
    for index in range(len(keys)):
        out[index] = count_least(counters, width, keys[index])
        if knows(door, width, keys[index]):
            out[index] += 1


SKETCH_LOOPS = (count_least, knows, record, estimate)


class TinyLfu:
    """Admission to DRAM by frequency: a newcomer must be asked for as often as who has to go.

    A count-min sketch of four-bit counters with minimal increment and a doorkeeper, aged by halving
    once 8 times its width was recorded (Einziger, Friedman, Manes, "TinyLFU: A Highly Efficient
    Cache Admission Policy", 2017). A key's places come from two halves of its hash (Kirsch,
    Mitzenmacher, "Less Hashing, Same Performance", 2006). Nothing is random: the same calls give
    the same answers. About 6 to 12 bytes for each resident object.

    Args:
        entries: Resident objects to expect; ``grow`` follows where there are more.
        compiled: Run loops compiled; the constructor then compiles or loads them.

    Attributes:
        admitted, rejected: Answers that ``admits`` gave.
        width: Counters in a row of the sketch.
    """

    def __init__(self, entries: int, *, compiled: bool) -> None:
        self.admitted = 0
        self.rejected = 0
        self._compiled = compiled
        self._loops = loops(SKETCH_LOOPS, compiled=compiled)
        self.width = _MIN_WIDTH
        self._recorded = 0
        self._counters = np.zeros(_ROWS * self.width // 2, np.uint8)
        self._door = np.zeros(self.width * _DOOR_BITS // 8, np.uint8)
        self.grow(entries)
        none = np.empty(0, np.int64)
        self._loops.record(*self.sketch, self.width, self._batch(none))
        self.estimates(none)

    def grow(self, entries: int) -> None:
        """Widen the sketch to so many resident objects. No estimate changes by that."""
        while self.width < entries:
            # A place is taken modulo the width, so each key finds its count at either new place.
            by_row = self._counters.reshape(_ROWS, -1)
            self._counters = np.concatenate([by_row, by_row], axis=1).reshape(-1)
            self._door = np.concatenate([self._door, self._door])
            self.width *= 2

    def record(self, keys: Sequence[int] | Hashes) -> None:
        """Count what a foreground query asked for, found or not."""
        while len(keys):
            few = keys[: self.room]
            self._loops.record(*self.sketch, self.width, self._batch(few))
            self.recorded(len(few))
            keys = keys[len(few) :]

    @property
    def room(self) -> int:
        """Keys that may be counted before the sketch ages."""
        return _SAMPLE * self.width - self._recorded

    def recorded(self, count: int) -> None:
        """Note that so many keys, no more than ``room``, were counted; age where that is all."""
        self._recorded += count
        if self._recorded == _SAMPLE * self.width:
            self._counters >>= 1
            self._counters &= _HALF_MASK
            self._door[:] = 0
            self._recorded //= 2

    def estimates(self, keys: Sequence[int] | Hashes) -> npt.NDArray[np.int64]:
        """How often each was asked for of late, 0 to 16; too high at times, and never too low."""
        out = np.empty(len(keys), np.int64)
        self._loops.estimate(
            *self.sketch, self.width, self._batch(keys), view(out, compiled=self._compiled)
        )
        return out

    def admits(self, candidate: int, victim: int) -> bool:
        """Whether a candidate may take a victim's place in a full pool."""
        newcomer, resident = self.estimates((candidate, victim)).tolist()
        if newcomer >= resident:
            self.admitted += 1
        else:
            self.rejected += 1
        return bool(newcomer >= resident)

    @property
    def sketch(self) -> tuple[Words, Words]:
        """Counters and doorkeeper as loops take them, until the next ``grow``."""
        return (
            view(self._counters, compiled=self._compiled),
            view(self._door, compiled=self._compiled),
        )

    def _batch(self, keys: Sequence[int] | Hashes) -> Sequence[int] | Hashes:
        if self._compiled:
            return np.asarray(keys, np.int64)
        return keys.tolist() if isinstance(keys, np.ndarray) else keys


def hashes_of(digests: Sequence[bytes]) -> Hashes:
    """The first eight bytes of each key's digest, which is 32 bytes of SHA-256."""
    return np.frombuffer(b"".join(digests), "<i8")[::4]
