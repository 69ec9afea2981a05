"""The walk of a trace through the tiers: what a request asks for, takes in, and drives out.

The functions are loops in the sense of ``compiled``. The policies are those of ``cache``; here is
only who calls which, page by page, as a manager does for requests that come one after the other.
All pages have one length, so that one that leaves makes room for one that comes.
"""

from __future__ import annotations

from orbitkv.cache.admission import SKETCH_LOOPS, estimate, record
from orbitkv.cache.compiled import Words
from orbitkv.cache.order import (
    COUNT,
    LOOPS,
    PROTECTED,
    ROW_MASK,
    ROW_SPAN,
    USES,
    WORDS,
    admit,
    advance,
    evict,
    look_up,
    touch,
)

Trace = tuple[Words, Words, Words]
"""Starts, pages and input tokens of the requests."""

Shelf = tuple[Words, Words, Words, Words, Words, Words, Words]
"""Rows, state and turns of its ``Retention``; number of the row of each page, or 0; page of each
row; most pages, in a word; length of a page in blocks, in a word."""

Ring = tuple[Words, Words]
"""Page in each slot plus one, or 0; whether each page is in one."""

Sketch = tuple[Words, Words, Words, int]
"""Counters, doorkeeper and width of ``TinyLfu``, before the width the hash of each page. Width 0:
everything is admitted."""

Span = tuple[Words, bool, bool]
"""Pages of the trace; whether a prompt's tail leaves first; whether SSD is written on reuse alone.
"""

Tiers = tuple[Shelf, Ring, Sketch, Shelf]
"""DRAM; SSD, which may have no slot; admission to DRAM; the history of what was saved."""

Scratch = tuple[Words, Words, Words, Words, Words]
"""A handle; an evicted handle and how many; two hashes; two estimates; a mark a page of a request.
"""

# Words of the counts. The last four say where the walk is.
GPU_HITS, DRAM_HITS, SSD_HITS, HIT_TOKENS = range(4)
SAVED, WRITTEN, OVERWRITTEN = 4, 5, 6
SKIPPED_RESIDENT, SKIPPED_COLD, LFU_REJECTED = 7, 8, 9
CURSOR, REQUEST, RECORDED, ROOM = 10, 11, 12, 13
COUNTS = 14

IN_DRAM, ON_SSD, TAKEN_IN, WANTED, UNWELCOME = range(1, 6)  # marks


def has(shelf: Shelf, page: int) -> bool:
    """Whether a page is in a tier."""
    return shelf[3][page] != 0


def point_at(shelf: Shelf, page: int, scratch: Scratch) -> None:
    """Make the handle of scratch that of a page in a tier."""
    rows, _, _, place, _, _, _ = shelf
    number = place[page]
    scratch[0][0] = rows[number * WORDS + USES] * ROW_SPAN + number


def freshen(shelf: Shelf, page: int, scratch: Scratch) -> None:
    """Make a page the most recent of its class."""
    point_at(shelf, page, scratch)
    touch(shelf[0], shelf[1], scratch[0])


def is_full(shelf: Shelf) -> bool:
    """Whether one page more needs another's place."""
    state = shelf[1]
    count = 0
    for kind in range(1, PROTECTED + 1):
        count += state[COUNT + kind]
    return count >= shelf[5][0]


def oldest(shelf: Shelf) -> int:
    """The page that leaves a full tier next."""
    rows, state, turns, _, owner, _, _ = shelf
    page = -1
    for kind in range(1, PROTECTED + 1):
        row = advance(rows, state, turns, kind)
        if row != kind * WORDS:
            page = owner[row // WORDS]
            break
    return page


def oust(shelf: Shelf, scratch: Scratch) -> None:
    """Evict the page that leaves next."""
    rows, state, turns, place, owner, _, _ = shelf
    evicted = scratch[1]
    for kind in range(1, PROTECTED + 1):
        evict(rows, state, turns, kind, 1, evicted)
        if evicted[1] != 0:
            place[owner[evicted[0] & ROW_MASK]] = 0
            break


def take_in(shelf: Shelf, page: int, scratch: Scratch) -> None:
    """Admit a page as the most recent probationary one; the tier has room."""
    rows, state, _, place, owner, _, nblocks = shelf
    admit(rows, state, nblocks, 0, scratch[0])
    number = scratch[0][0] & ROW_MASK
    place[page] = number
    owner[number] = page


def take_place(shelf: Shelf, page: int, scratch: Scratch) -> None:
    """Admit a page, in the place of the oldest one where the tier is full."""
    if is_full(shelf):
        oust(shelf, scratch)
    take_in(shelf, page, scratch)


def is_welcome(dram: Shelf, sketch: Sketch, page: int, scratch: Scratch, counts: Words) -> bool:
    """Whether admission lets a page take the place of the one that would leave."""
    counters, door, hashes, width = sketch
    if width != 0 and is_full(dram):
        both, estimates = scratch[2], scratch[3]
        both[0], both[1] = hashes[page], hashes[oldest(dram)]
        estimate(counters, door, width, both, estimates)
        if estimates[0] < estimates[1]:
            counts[LFU_REJECTED] += 1
            return False
    return True


def state_of(page: int, tiers: Tiers, scratch: Scratch, counts: Words) -> int:
    """The mark of a page that is to be saved: where it is, or that it is to come to DRAM."""
    dram, ring, sketch, _ = tiers
    if has(dram, page):
        return IN_DRAM
    if len(ring[0]) != 0 and ring[1][page] != 0:
        return ON_SSD
    return WANTED if is_welcome(dram, sketch, page, scratch, counts) else UNWELCOME


def write(ring: Ring, page: int, counts: Words) -> None:
    """Place a page in the next slot of the SSD's ring, over what has been there longest."""
    slots, on_ssd = ring
    cursor = counts[CURSOR]
    if cursor == len(slots):
        cursor = 0
    if len(slots) < len(on_ssd):  # else it never turns, and memory for who lies where is saved
        if slots[cursor] != 0:
            on_ssd[slots[cursor] - 1] = 0
            counts[OVERWRITTEN] += 1
        slots[cursor] = page + 1
    on_ssd[page] = 1
    counts[CURSOR] = cursor + 1
    counts[WRITTEN] += 1


def is_published_again(history: Shelf, page: int, scratch: Scratch) -> bool:
    """Note that a page was saved; whether the history has it already."""
    if has(history, page):
        freshen(history, page, scratch)
        return True
    take_place(history, page, scratch)
    return False


def count_demand(
    span: Span, first: int, end: int, sketch: Sketch, scratch: Scratch, counts: Words
) -> bool:
    """Count what a query asks for; False where the sketch must age before the query goes on."""
    counters, door, hashes, width = sketch
    if width == 0:
        return True
    pages, key = span[0], scratch[0]
    for at in range(first + counts[RECORDED], end):
        key[0] = hashes[pages[at]]
        record(counters, door, width, key)
        counts[ROOM] -= 1
        if counts[ROOM] == 0:
            counts[RECORDED] = at + 1 - first
            return False
    counts[RECORDED] = 0
    return True


def freshen_from_the_end(span: Span, first: int, end: int, dram: Shelf, scratch: Scratch) -> None:
    """Let what was taken in, and is still there, leave from its tail."""
    pages, marks = span[0], scratch[4]
    for index in range(end - first - 1, -1, -1):
        if marks[index] == TAKEN_IN and has(dram, pages[first + index]):
            freshen(dram, pages[first + index], scratch)


def find_prefix(span: Span, at: int, end: int, tiers: Tiers) -> int:
    """The end of the longest prefix that DRAM and SSD have."""
    pages, (dram, ring, _, _) = span[0], tiers
    while at < end and (has(dram, pages[at]) or (len(ring[0]) != 0 and ring[1][pages[at]] != 0)):
        at += 1
    return at


def restore(
    span: Span, first: int, found: int, tiers: Tiers, scratch: Scratch, counts: Words
) -> None:
    """Promote what a query found in DRAM, and load into DRAM what it found on SSD."""
    pages, tail_first, _ = span
    dram, marks = tiers[0], scratch[4]
    for index in range(found - first):
        marks[index] = IN_DRAM if has(dram, pages[first + index]) else ON_SSD
        counts[DRAM_HITS if marks[index] == IN_DRAM else SSD_HITS] += 1
    for index in range(found - first):
        at = found - first - 1 - index if tail_first else index
        if marks[at] == IN_DRAM:
            point_at(dram, pages[first + at], scratch)
            look_up(dram[0], dram[1], scratch[0])
    for index in range(found - first):
        if marks[index] == ON_SSD:
            take_place(dram, pages[first + index], scratch)
            marks[index] = TAKEN_IN
    if tail_first:
        freshen_from_the_end(span, first, found, dram, scratch)


def write_found(
    span: Span, first: int, found: int, ring: Ring, scratch: Scratch, counts: Words
) -> None:
    """Write to SSD what a query found in DRAM alone, all of it judged before the first write."""
    pages, marks = span[0], scratch[4]
    for index in range(found - first):
        if marks[index] == IN_DRAM:
            is_on_ssd = ring[1][pages[first + index]] != 0
            counts[SKIPPED_RESIDENT] += is_on_ssd
            marks[index] = ON_SSD if is_on_ssd else WANTED
    for index in range(found - first):
        if marks[index] == WANTED:
            write(ring, pages[first + index], counts)


def save(span: Span, found: int, end: int, tiers: Tiers, scratch: Scratch, counts: Words) -> None:
    """Take into DRAM what had to be computed, and write it to SSD where the policy wants that.

    What a tier has already is no new copy, although something before it was missing. A manager
    judges all pages before it takes the first one in, a plain LRU one after the other.
    """
    pages, tail_first, reuse = span
    dram, ring, _, history = tiers
    marks = scratch[4]
    for at in range(found, end if tail_first else found):
        marks[at - found] = state_of(pages[at], tiers, scratch, counts)
    for at in range(found, end):
        page = pages[at]
        if not tail_first:
            marks[at - found] = state_of(page, tiers, scratch, counts)
            if marks[at - found] == IN_DRAM:
                freshen(dram, page, scratch)
        if marks[at - found] == WANTED:
            take_place(dram, page, scratch)
            marks[at - found] = TAKEN_IN
            counts[SAVED] += 1
            if len(ring[0]) != 0:
                if not reuse or is_published_again(history, page, scratch):
                    write(ring, page, counts)
                else:
                    counts[SKIPPED_COLD] += 1
    if tail_first:
        freshen_from_the_end(span, found, end, dram, scratch)


def use(span: Span, start: int, end: int, gpu: Shelf, scratch: Scratch) -> None:
    """Keep a request's pages on the GPU once it has ended, as far as they fit."""
    pages, tail_first, _ = span
    for at in range(start, end):
        if has(gpu, pages[at]):
            freshen(gpu, pages[at], scratch)
        else:
            take_place(gpu, pages[at], scratch)
    if tail_first:
        for at in range(end - 1, start - 1, -1):
            if has(gpu, pages[at]):
                freshen(gpu, pages[at], scratch)


def walk(
    trace: Trace,
    gpu: Shelf,
    tiers: Tiers,
    choices: tuple[bool, bool, int],
    scratch: Scratch,
    counts: Words,
) -> None:
    """Go on with a trace until it ends, or until the sketch must age: ``counts[ROOM]`` is 0 then.

    Args:
        gpu: May have no page.
        choices: Whether a prompt's tail leaves first; whether SSD is written on reuse alone; tokens
            of a page.
    """
    starts, pages, tokens = trace
    tail_first, reuse, page_tokens = choices
    span = (pages, tail_first, reuse)
    has_gpu = gpu[5][0] != 0
    for request in range(counts[REQUEST], len(tokens)):
        start, end = starts[request], starts[request + 1]
        counts[REQUEST] = request
        first = start
        while has_gpu and first < end and has(gpu, pages[first]):
            first += 1
        if not count_demand(span, first, end, tiers[2], scratch, counts):
            return
        found = find_prefix(span, first, end, tiers)
        counts[GPU_HITS] += first - start
        counts[HIT_TOKENS] += min(tokens[request], (found - start) * page_tokens)
        restore(span, first, found, tiers, scratch, counts)
        if reuse:
            write_found(span, first, found, tiers[1], scratch, counts)
        save(span, found, end, tiers, scratch, counts)
        if has_gpu:
            use(span, start, end, gpu, scratch)
    counts[REQUEST] = len(tokens)


def bound(starts: Words, pages: Words, seen: Words) -> int:
    """Pages that would be found as a prefix if nothing ever left. ``seen``: a zero a page."""
    hits = 0
    for request in range(len(starts) - 1):
        start, end = starts[request], starts[request + 1]
        first = start
        while first < end and seen[pages[first]] != 0:
            first += 1
        hits += first - start
        for at in range(first, end):
            seen[pages[at]] = 1
    return hits


WALK_LOOPS = (
    *LOOPS,
    *SKETCH_LOOPS,
    *(has, point_at, freshen, is_full, oldest, oust, take_in, take_place, is_welcome, write),
    *(state_of, is_published_again, count_demand, freshen_from_the_end, find_prefix, restore),
    *(write_found, save, use, walk, bound),
)
