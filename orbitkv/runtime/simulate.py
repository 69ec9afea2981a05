"""Simulation: what the cache's policies would have done to a trace of requests.

The policies are those that a manager runs. There are no payloads and no time: a request ends before
the next one begins, and every transfer at once. So nothing is leased while something is evicted, no
write is dropped by a full queue, and none comes too late. ``docs/simulation.md`` says the rest.
"""

from __future__ import annotations

import typing
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from orbitkv.cache import admission
from orbitkv.cache.admission import TinyLfu
from orbitkv.cache.compiled import loops, view
from orbitkv.cache.order import FIRST, MAX_NBYTES, MAX_ROWS, WORDS, RetentionClass
from orbitkv.cache.retention import Retention
from orbitkv.config import GIB, STORAGE_CODECS
from orbitkv.errors import ConfigError
from orbitkv.objects import OBJECT_ALIGN_NBYTES, align_up
from orbitkv.runtime import walk
from orbitkv.runtime.traces import BLOCK_TOKENS, RequestTrace, cut_pages

# Bytes of an encoded page for each byte of a raw one, of 36 layers of bfloat16 and head_dim 128:
# TurboQuant's two layers at either end stay raw. ANS: measured on normally distributed values.
_LAYERS, _RAW_LAYERS = 36, 4
_ENCODED = _LAYERS - _RAW_LAYERS
STORED_SHARE = {
    "none": 1.0,
    "fp8": 0.5,
    "turboquant-4": (_ENCODED * (66 + 68) / 512 + _RAW_LAYERS) / _LAYERS,
    "turboquant-3": (_ENCODED * (50 + 52) / 512 + _RAW_LAYERS) / _LAYERS,
    "ans": 1 / 1.48,
}

_MILLION = 10**6
_SHARE_MILLIONTHS = {codec: round(share * _MILLION) for codec, share in STORED_SHARE.items()}

Recency = Literal["head-first", "tail-first"]
Policy = Literal["all", "reuse"]

_ALL_PERCENT = 100
_MOST_BYTES_PER_TOKEN = 2**32
_MOST_PAGE_TOKENS = 2**20
_MOST_NBYTES = 2**62
_PIECE = 2**20  # pages hashed at once, so that what is needed meanwhile stays small


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """Settings of one simulated manager and its engine. All sizes are bytes.

    Attributes:
        pool_nbytes: DRAM for encoded objects.
        ssd_cache_capacity_nbytes: SSD for encoded objects, one shard. 0: no SSD tier.
        cache_protected_percent: Share of the pool that pages which demand has asked for again may
            have, 0 to 100. 0: a plain LRU.
        enable_lfu_admission: A page is saved to a full pool only if it is asked for as often as the
            one that has to go.
        ssd_write_policy: What is written to SSD: all that is new, or what is used again.
        storage_codec: Representation of stored pages. It changes their bytes, and so how many fit.
        gpu_pages: Pages that the engine keeps on the GPU by itself, the most recently used ones.
            0: none beyond its requests.
        page_tokens: Tokens of a page: a divisor or a multiple of 512.
        bytes_per_token: Raw KV of one token, all layers.
        recency: Which end of a prompt leaves first: its head, as in a plain LRU that takes block
            after block; or its tail, as a manager has it, which judges a prompt as a whole.
    """

    pool_nbytes: int = GIB
    ssd_cache_capacity_nbytes: int = 0
    cache_protected_percent: int = 0
    enable_lfu_admission: bool = False
    ssd_write_policy: Policy = "all"
    storage_codec: str = "none"
    gpu_pages: int = 0
    page_tokens: int = BLOCK_TOKENS
    bytes_per_token: int = 147_456
    recency: Recency = "head-first"

    def __post_init__(self) -> None:
        per_token, tokens = self.bytes_per_token, self.page_tokens
        self._check("cache_protected_percent", 0, _ALL_PERCENT)
        self._check("gpu_pages", 0, MAX_ROWS)
        self._check("bytes_per_token", 1, _MOST_BYTES_PER_TOKEN)
        self._check("page_tokens", 1, _MOST_PAGE_TOKENS)
        if BLOCK_TOKENS % tokens and tokens % BLOCK_TOKENS:
            raise ConfigError(
                f"page_tokens: {tokens}; accepted: a divisor or a multiple of {BLOCK_TOKENS}"
            )
        for setting, accepted in (
            ("enable_lfu_admission", (True, False)),
            ("ssd_write_policy", typing.get_args(Policy)),
            ("storage_codec", STORAGE_CODECS),
            ("recency", typing.get_args(Recency)),
        ):
            if getattr(self, setting) not in accepted:
                raise ConfigError(
                    f"{setting}: {getattr(self, setting)!r}; "
                    f"accepted: {', '.join(map(str, accepted))}"
                )
        if self.page_nbytes > MAX_NBYTES:
            raise ConfigError(
                f"bytes_per_token: {per_token} make pages of {self.page_nbytes} bytes; "
                f"accepted: up to {MAX_NBYTES}"
            )
        self._check("pool_nbytes", self.page_nbytes, _MOST_NBYTES, "one page")
        if self.ssd_cache_capacity_nbytes:
            self._check("ssd_cache_capacity_nbytes", self.page_nbytes, _MOST_NBYTES, "0, or a page")

    @property
    def raw_page_nbytes(self) -> int:
        """Length of a page on the GPU."""
        return self.page_tokens * self.bytes_per_token

    @property
    def page_nbytes(self) -> int:
        """Length of a page's object, less its header: whole 4 KiB blocks."""
        nbytes = -(-self.raw_page_nbytes * _SHARE_MILLIONTHS[self.storage_codec] // _MILLION)
        return align_up(nbytes, OBJECT_ALIGN_NBYTES)

    @property
    def pool_pages(self) -> int:
        """Pages that DRAM holds."""
        return align_up(self.pool_nbytes, OBJECT_ALIGN_NBYTES) // self.page_nbytes

    @property
    def ssd_pages(self) -> int:
        """Pages that SSD holds."""
        return align_up(self.ssd_cache_capacity_nbytes, OBJECT_ALIGN_NBYTES) // self.page_nbytes

    def _check(self, setting: str, least: int, most: int, what: str = "") -> None:
        value = getattr(self, setting)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            least_of = f"{least} ({what})" if what else str(least)
            raise ConfigError(f"{setting}: {value}; accepted: {least_of} to {most}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What a simulation found. A block is a page of ``page_tokens``; bytes are those stored.

    Attributes:
        blocks: Of all requests.
        unlimited_prefix_hit_rate: Share of blocks that would be found if nothing ever left.
        prefix_hit_rate: Share of blocks that were found, in any tier, with all before them.
        recomputed_tokens: Input tokens that no found block holds.
        saved_blocks: Taken into DRAM after they had been computed.
        ssd_read_raw_bytes, ssd_write_raw_bytes, unique_raw_bytes: Of the same blocks without codec.
        write_amplification: Bytes written to SSD for each of the distinct blocks' bytes.
        ssd_overwritten_blocks: Driven out of SSD by others.
        skipped_resident: Blocks found in DRAM that ``reuse`` did not write, since SSD had them.
        skipped_cold: Saved blocks that ``reuse`` did not write, since nothing had used them before.
        lfu_rejected: Blocks that were not saved to a full pool.
        evicted_reclaimable, evicted_probationary, evicted_protected: From DRAM, by class.
    """

    blocks: int
    unique_blocks: int
    requests: int
    unlimited_prefix_hit_rate: float
    prefix_hit_rate: float
    gpu_hit_blocks: int
    dram_hit_blocks: int
    ssd_hit_blocks: int
    input_tokens: int
    recomputed_tokens: int
    pool_blocks: int
    ssd_blocks: int
    block_bytes: int
    block_raw_bytes: int
    unique_bytes: int
    unique_raw_bytes: int
    saved_blocks: int
    ssd_read_blocks: int
    ssd_read_bytes: int
    ssd_read_raw_bytes: int
    ssd_write_blocks: int
    ssd_write_bytes: int
    ssd_write_raw_bytes: int
    write_amplification: float
    ssd_overwritten_blocks: int
    skipped_resident: int
    skipped_cold: int
    lfu_rejected: int
    evicted_reclaimable: int
    evicted_probationary: int
    evicted_protected: int
    evicted_gpu: int
    promotions: int
    demotions: int


@dataclass(frozen=True, slots=True, eq=False)
class Pages:
    """A trace, cut into pages of one length.

    Attributes:
        starts, pages: As ``RequestTrace.starts`` and ``blocks``.
        unlimited_hits: Pages found if nothing ever left.
        longest: Most pages of one request.
    """

    starts: npt.NDArray[np.int64]
    pages: npt.NDArray[np.int32]
    unique_pages: int
    input_tokens: npt.NDArray[np.int64]
    page_tokens: int
    unlimited_hits: int
    longest: int


def cut(trace: RequestTrace, page_tokens: int, *, compiled: bool = True) -> Pages:
    """Cut a trace into pages once, for any number of simulations."""
    starts, pages, unique_pages = cut_pages(trace, page_tokens)
    made = loops(walk.WALK_LOOPS, compiled=compiled)
    arrays = (starts, pages, np.zeros(unique_pages, np.int8))
    hits = made.bound(*(view(words, compiled=compiled) for words in arrays))
    longest = int(np.diff(starts).max())
    tokens = trace.input_tokens
    return Pages(starts, pages, unique_pages, tokens, page_tokens, int(hits), longest)


def load() -> None:
    """Compile the loops, which takes seconds, or load them from disk."""
    one = np.zeros(1, np.int64)
    trace = RequestTrace(np.arange(2), np.zeros(1, np.int32), 1, np.zeros(1), one, one)
    simulate(cut(trace, BLOCK_TOKENS), Simulation())


def simulate(pages: Pages, settings: Simulation, *, compiled: bool = True) -> Simulated:
    """Walk a trace through the tiers. The same trace and settings give the same figures.

    Args:
        pages: Cut for ``settings.page_tokens``.
        compiled: Run the loops compiled.
    """
    assert pages.page_tokens == settings.page_tokens
    unique = pages.unique_pages
    ssd = settings.ssd_pages > 0
    reuse = ssd and settings.ssd_write_policy == "reuse"
    retention = Retention(
        align_up(settings.pool_nbytes, OBJECT_ALIGN_NBYTES),
        settings.cache_protected_percent,
        compiled=compiled,
    )
    dram = _shelf(retention, settings.pool_pages, unique, settings.page_nbytes, compiled=compiled)
    on_gpu, published = (Retention(0, 0, compiled=compiled) for _ in range(2))
    gpu = _shelf(on_gpu, settings.gpu_pages, unique, OBJECT_ALIGN_NBYTES, compiled=compiled)
    history = _shelf(
        published,
        admission.HISTORY_KEYS if reuse else 0,
        unique,
        OBJECT_ALIGN_NBYTES,
        compiled=compiled,
    )
    # A ring that has a slot a page never turns; more of them change nothing.
    slots = np.zeros(min(settings.ssd_pages, unique), np.int32)
    on_ssd = np.zeros(unique if ssd else 0, np.int8)
    lfu = (
        TinyLfu(min(settings.pool_pages, unique), compiled=compiled)
        if settings.enable_lfu_admission
        else None
    )
    hashes = hashes_of_pages(unique if lfu else 0)
    counts = np.zeros(walk.COUNTS, np.int64)
    scratch = tuple(
        view(np.zeros(length, kind), compiled=compiled)
        for length, kind in (
            *((1, np.int64), (2, np.int64), (2, np.int64), (2, np.int64)),
            (max(pages.longest, 1), np.int32),
        )
    )
    arrays = (pages.starts, pages.pages, pages.input_tokens, slots, on_ssd, hashes, counts)
    starts, numbers, tokens, *rest = (view(words, compiled=compiled) for words in arrays)
    slot_words, on_ssd_words, hash_words, count_words = rest
    nothing = view(np.zeros(0, np.uint8), compiled=compiled)
    choices = (settings.recency == "tail-first", reuse, settings.page_tokens)
    made = loops(walk.WALK_LOOPS, compiled=compiled)
    while counts[walk.REQUEST] < len(tokens):
        sketch = (*lfu.sketch, hash_words, lfu.width) if lfu else (nothing, nothing, hash_words, 0)
        counts[walk.ROOM] = room = lfu.room if lfu else 0
        made.walk(
            (starts, numbers, tokens),
            gpu,
            (dram, (slot_words, on_ssd_words), sketch, history),
            choices,
            scratch,
            count_words,
        )
        if lfu:
            lfu.recorded(room - int(counts[walk.ROOM]))
    return _figures(pages, settings, counts.tolist(), retention, on_gpu)


def hashes_of_pages(count: int) -> npt.NDArray[np.int64]:
    """Well mixed bits for each page's number, in the place of its key's digest (splitmix64)."""
    mixed = np.arange(1, count + 1, dtype=np.uint64)
    for start in range(0, count, _PIECE):
        piece = mixed[start : start + _PIECE]
        piece *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            piece ^= piece >> np.uint64(shift)
            piece *= np.uint64(factor)
        piece ^= piece >> np.uint64(31)
    return mixed.view(np.int64)


def _shelf(
    retention: Retention, most: int, unique: int, nbytes: int, *, compiled: bool
) -> walk.Shelf:
    """A tier of ``most`` pages as the walk takes it."""
    held = min(most, unique)
    retention.reserve(held)
    words = (
        np.zeros(unique if most else 0, np.int32),
        np.zeros(FIRST // WORDS + held, np.int32),
        np.array([most], np.int64),
        np.array([nbytes // OBJECT_ALIGN_NBYTES], np.int64),
    )
    place, owner, room, nblocks = (view(each, compiled=compiled) for each in words)
    return (*retention.arrays, place, owner, room, nblocks)


def _figures(
    pages: Pages,
    settings: Simulation,
    counts: list[int],
    dram: Retention,
    gpu: Retention,
) -> Simulated:
    blocks, unique = len(pages.pages), pages.unique_pages
    nbytes, raw_nbytes = settings.page_nbytes, settings.raw_page_nbytes
    hits = [counts[each] for each in (walk.GPU_HITS, walk.DRAM_HITS, walk.SSD_HITS)]
    read, written = counts[walk.SSD_HITS], counts[walk.WRITTEN]
    kept = dram.statistics()
    input_tokens = int(pages.input_tokens.sum())
    return Simulated(
        blocks=blocks,
        unique_blocks=unique,
        requests=len(pages.input_tokens),
        unlimited_prefix_hit_rate=pages.unlimited_hits / max(blocks, 1),
        prefix_hit_rate=sum(hits) / max(blocks, 1),
        gpu_hit_blocks=hits[0],
        dram_hit_blocks=hits[1],
        ssd_hit_blocks=hits[2],
        input_tokens=input_tokens,
        recomputed_tokens=input_tokens - counts[walk.HIT_TOKENS],
        pool_blocks=settings.pool_pages,
        ssd_blocks=settings.ssd_pages,
        block_bytes=nbytes,
        block_raw_bytes=raw_nbytes,
        unique_bytes=unique * nbytes,
        unique_raw_bytes=unique * raw_nbytes,
        saved_blocks=counts[walk.SAVED],
        ssd_read_blocks=read,
        ssd_read_bytes=read * nbytes,
        ssd_read_raw_bytes=read * raw_nbytes,
        ssd_write_blocks=written,
        ssd_write_bytes=written * nbytes,
        ssd_write_raw_bytes=written * raw_nbytes,
        write_amplification=written / max(unique, 1),
        ssd_overwritten_blocks=counts[walk.OVERWRITTEN],
        skipped_resident=counts[walk.SKIPPED_RESIDENT],
        skipped_cold=counts[walk.SKIPPED_COLD],
        lfu_rejected=counts[walk.LFU_REJECTED],
        evicted_reclaimable=kept.evicted[RetentionClass.RECLAIMABLE],
        evicted_probationary=kept.evicted[RetentionClass.PROBATIONARY],
        evicted_protected=kept.evicted[RetentionClass.PROTECTED],
        evicted_gpu=sum(gpu.statistics().evicted.values()),
        promotions=kept.promotions,
        demotions=kept.demotions,
    )
