"""Order: the resident objects of a tier in linked lists, one for each class, oldest first.

The functions are loops in the sense of ``compiled``, on flat arrays of integers: an object is a row
of four words. Two things keep eviction from looking at pinned objects again and again. Each list
has a hand: what lies before it was pinned when eviction passed it. And what was passed and is then
unpinned is queued, by the turn in which it was passed. So an object is passed at most once for each
time that it became the most recent of its class.
"""

from __future__ import annotations

from enum import IntEnum

from orbitkv.cache.compiled import Words
from orbitkv.objects import OBJECT_ALIGN_NBYTES


class RetentionClass(IntEnum):
    """In the order of eviction: replicas, what demand has not asked for again, the rest."""

    RECLAIMABLE = 1
    PROBATIONARY = 2
    PROTECTED = 3


# Words of a row. Links are positions of rows; rows 1 to 3 are the ends of the classes' lists.
PREV, NEXT, MARKS, USES = range(4)
WORDS = 4
FIRST = (len(RetentionClass) + 1) * WORDS
MAX_ROWS = (2**31 - 1) // WORDS

# Marks: the class; whether the object is pinned, whether the hand has passed it, whether it is
# queued; above them, its length in blocks.
CLASS, PINNED, PASSED, QUEUED, BLOCK_BITS = 3, 4, 8, 16, 5
MAX_NBYTES = (2 ** (31 - BLOCK_BITS) - 1) * OBJECT_ALIGN_NBYTES
PROBATIONARY, PROTECTED = int(RetentionClass.PROBATIONARY), int(RetentionClass.PROTECTED)

# Words of the state. Of the last four there is one for each class, at ``COUNT + class``.
LIMIT, PROMOTIONS, DEMOTIONS, STALE, FREE, FRESH, TURN = range(7)
COUNT, SUM, HAND, EVICTED = 8, 12, 16, 20
STATE_WORDS = 24

# A handle: how often its row had been used before, and the row's number.
ROW_SPAN = 2**32
ROW_MASK, ROW_BITS = ROW_SPAN - 1, 32
MOST_USES = 2**31 - 1


def find(rows: Words, state: Words, handle: int) -> int:
    """Row of a handle; 0, and counted, where its object has left."""
    row = (handle & ROW_MASK) * WORDS
    if FIRST <= row < state[FRESH] and rows[row + USES] == handle >> ROW_BITS:
        return row
    state[STALE] += 1
    return 0


def unlink(rows: Words, state: Words, row: int) -> None:
    """Take an object out of its list."""
    before = rows[row + PREV]
    after = rows[row + NEXT]
    rows[before + NEXT] = after
    rows[after + PREV] = before
    kind = rows[row + MARKS] & CLASS
    if state[HAND + kind] == row:
        state[HAND + kind] = after
    state[COUNT + kind] -= 1
    state[SUM + kind] -= rows[row + MARKS] >> BLOCK_BITS


def append(rows: Words, state: Words, row: int, kind: int) -> None:
    """Make an object the most recent of a class; its length and whether it is pinned stay."""
    end = kind * WORDS
    last = rows[end + PREV]
    rows[last + NEXT] = row
    rows[row + PREV] = last
    rows[row + NEXT] = end
    rows[end + PREV] = row
    rows[row + MARKS] = rows[row + MARKS] & ~(CLASS | PASSED | QUEUED) | kind
    if state[HAND + kind] == end:
        state[HAND + kind] = row
    state[COUNT + kind] += 1
    state[SUM + kind] += rows[row + MARKS] >> BLOCK_BITS


def forget(rows: Words, state: Words, row: int) -> int:
    """Let an object's row be used again, under another handle; return its blocks."""
    unlink(rows, state, row)
    blocks = rows[row + MARKS] >> BLOCK_BITS
    rows[row + MARKS] = 0
    rows[row + USES] = rows[row + USES] + 1 & MOST_USES
    rows[row + NEXT] = state[FREE]
    state[FREE] = row
    return blocks


def admit(rows: Words, state: Words, blocks: Words, marks: int, out: Words) -> None:
    """Take objects in as the most recent probationary ones."""
    for index in range(len(blocks)):
        row = state[FREE]
        if row != 0:
            state[FREE] = rows[row + NEXT]
        else:
            row = state[FRESH]
            state[FRESH] = row + WORDS
        rows[row + MARKS] = blocks[index] << BLOCK_BITS | marks
        append(rows, state, row, PROBATIONARY)
        out[index] = rows[row + USES] * ROW_SPAN + row // WORDS


def look_up(rows: Words, state: Words, handles: Words) -> None:
    """Promote, making room among the protected; what cannot fit becomes most recent only."""
    oldest_link = PROTECTED * WORDS + NEXT
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row == 0:
            continue
        kind = PROTECTED
        if rows[row + MARKS] & CLASS != PROTECTED:
            room = state[LIMIT] - (rows[row + MARKS] >> BLOCK_BITS)
            if room < 0:
                kind = PROBATIONARY
            else:
                while state[SUM + PROTECTED] > room:
                    oldest = rows[oldest_link]
                    unlink(rows, state, oldest)
                    append(rows, state, oldest, PROBATIONARY)
                    state[DEMOTIONS] += 1
                state[PROMOTIONS] += 1
        unlink(rows, state, row)
        append(rows, state, row, kind)


def touch(rows: Words, state: Words, handles: Words) -> None:
    """Make objects the most recent of the classes that they are in."""
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row != 0:
            kind = rows[row + MARKS] & CLASS
            unlink(rows, state, row)
            append(rows, state, row, kind)


def reclaim(rows: Words, state: Words, handles: Words, kind: int) -> None:
    """Make objects of other classes the most recent ones of the class ``kind``."""
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row != 0 and rows[row + MARKS] & CLASS != kind:
            if rows[row + MARKS] & CLASS == PROTECTED:
                state[DEMOTIONS] += 1
            unlink(rows, state, row)
            append(rows, state, row, kind)


def remove(rows: Words, state: Words, handles: Words) -> None:
    """Take objects out, pinned or not."""
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row != 0:
            forget(rows, state, row)


def pin(rows: Words, state: Words, handles: Words) -> None:
    """Mark objects as pinned."""
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row != 0:
            rows[row + MARKS] |= PINNED


def unpin(rows: Words, state: Words, handles: Words, out: Words) -> int:
    """Mark objects as not pinned; write the rows of those that eviction has passed to ``out``."""
    count = 0
    for index in range(len(handles)):
        row = find(rows, state, handles[index])
        if row != 0:
            marks = rows[row + MARKS] & ~PINNED
            if marks & PASSED and not marks & QUEUED:
                marks |= QUEUED
                out[count] = row
                count += 1
            rows[row + MARKS] = marks
    return count


def advance(rows: Words, state: Words, turns: Words, kind: int) -> int:
    """Pass what is pinned; return the row of the oldest object that is not, or the list's end."""
    row = state[HAND + kind]
    while row != kind * WORDS and rows[row + MARKS] & PINNED:
        rows[row + MARKS] |= PASSED
        turns[row // WORDS] = state[TURN]
        state[TURN] += 1
        row = rows[row + NEXT]
    state[HAND + kind] = row
    return row


def evict(rows: Words, state: Words, turns: Words, kind: int, wanted: int, out: Words) -> int:
    """Evict from behind the hand until no more blocks are wanted; return how many still are."""
    count = 0
    while wanted > 0 and count < len(out) - 1:
        row = advance(rows, state, turns, kind)
        if row == kind * WORDS:
            break
        out[count] = rows[row + USES] * ROW_SPAN + row // WORDS
        count += 1
        state[EVICTED + kind] += 1
        wanted -= forget(rows, state, row)
    out[len(out) - 1] = count
    return wanted


def in_order(rows: Words, kind: int, out: Words) -> None:
    """Write the handles of a class to ``out``, oldest first."""
    row = rows[kind * WORDS + NEXT]
    for index in range(len(out)):
        out[index] = rows[row + USES] * ROW_SPAN + row // WORDS
        row = rows[row + NEXT]


LOOPS = (
    *(find, unlink, append, forget, admit, look_up, touch, reclaim, remove, pin, unpin),
    *(advance, evict, in_order),
)
