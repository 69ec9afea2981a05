"""What do the cache policies cost a page, and does it stay so up to ten million resident objects?

Nanoseconds of processor time for each page, in batches as a query has them. Every column is a
process of its own, so that bytes for each key are resident memory. A plain ``OrderedDict`` of
digests, which is the smallest LRU that Python has, stands beside.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measure import parser, report

from orbitkv.cache.admission import TinyLfu, WriteAdmission, WritePolicy, hashes_of
from orbitkv.cache.retention import Retention
from orbitkv.objects import OBJECT_ALIGN_NBYTES as BLOCK

TARGET_NS = 1000
MOST_OPERATIONS = 1_000_000
PINNED = 10_000


def resident_nbytes() -> int:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def per_page_ns(batches: Sequence[Sequence[object]], work: Callable[..., object]) -> float:
    """Time of ``work`` on every batch, for each page of them."""
    pages = sum(map(len, batches))
    started = time.process_time()
    for batch in batches:
        work(batch)
    return (time.process_time() - started) * 1e9 / pages


def cut(pages: npt.NDArray[np.int64], batch: int) -> list[npt.NDArray[np.int64]]:
    """Pages in batches of at most ``MOST_OPERATIONS`` pages in all."""
    few = pages[:MOST_OPERATIONS]
    return [few[start : start + batch] for start in range(0, len(few), batch)]


def measure_retention(keys: int, batch: int, *, compiled: bool) -> Iterator[tuple[str, float]]:
    """Admit, promote, look up, evict and pin, with ``keys`` resident throughout."""
    rng = np.random.default_rng(keys)
    handles = np.zeros(keys, np.int64)  # the caller's, so written before memory is read
    handles[:] = -1
    Retention(BLOCK, 80, compiled=compiled)  # loads the code
    before_nbytes = resident_nbytes()
    retention = Retention(keys * BLOCK, 80, compiled=compiled)
    started = time.process_time()
    for start in range(0, keys, batch):
        lengths = [BLOCK] * min(batch, keys - start)
        handles[start : start + batch] = retention.admit(lengths, pinned=False)
    yield "admit", (time.process_time() - started) * 1e9 / keys
    yield "bytes a key", (resident_nbytes() - before_nbytes) / keys

    yield (
        "promote, and demote",
        per_page_ns(cut(rng.permutation(handles), batch), retention.look_up),
    )
    anyone = cut(rng.choice(handles, max(keys, MOST_OPERATIONS // 4)), batch)
    yield "look up", per_page_ns(anyone, retention.look_up)

    def use(pages: Sequence[int]) -> None:
        retention.pin(pages)
        retention.unpin(pages)

    yield "pin and unpin", per_page_ns(anyone, use)

    def replace(pages: Sequence[int]) -> None:
        retention.evict(len(pages) * BLOCK)
        retention.admit([BLOCK] * len(pages), pinned=False)

    yield "evict and admit", per_page_ns(anyone, replace)
    singles = anyone[0][:200].reshape(-1, 1)
    yield "evict and admit, in two calls a page", per_page_ns(singles, replace)
    retention.evict(PINNED * BLOCK)
    retention.pin(retention.admit([BLOCK] * PINNED, pinned=True))
    retention.evict(keys * BLOCK)
    retention.admit([BLOCK] * keys, pinned=False)
    retention.evict(BLOCK)
    yield f"evict and admit behind {PINNED} pinned", per_page_ns(anyone, replace)


def measure_admission(keys: int, batch: int, *, compiled: bool) -> Iterator[tuple[str, float]]:
    """TinyLFU with ``keys`` resident, and the write policy before an SSD that has a tenth."""
    rng = np.random.default_rng(keys)
    hashes = rng.integers(-(2**63), 2**63, keys, np.int64, endpoint=False)
    few = cut(rng.choice(hashes, max(keys, MOST_OPERATIONS // 4)), batch)
    TinyLfu(1, compiled=compiled)  # loads the code
    before_nbytes = resident_nbytes()
    lfu = TinyLfu(keys, compiled=compiled)
    for start in range(0, keys, 2**16):  # so that all of it is in use
        lfu.record(hashes[start : start + 2**16])
    yield "TinyLFU: record", per_page_ns(few, lfu.record)
    yield "TinyLFU: estimate", per_page_ns(few, lfu.estimates)
    yield "TinyLFU: bytes a key", (resident_nbytes() - before_nbytes) / keys


def measure_digests(keys: int, batch: int) -> Iterator[tuple[str, float]]:
    """What is done with digests: find, hash, judge a write; and LRU by an ``OrderedDict``."""
    before_nbytes = resident_nbytes()
    digests = [os.urandom(32) for _ in range(keys)]
    table = OrderedDict((digest, index) for index, digest in enumerate(digests))
    yield "OrderedDict: bytes a key", (resident_nbytes() - before_nbytes) / keys
    order = np.random.default_rng(keys).integers(0, keys, max(keys, MOST_OPERATIONS // 4))
    # Copies: what a query brings is new, whatever is resident.
    some = [[bytes(memoryview(digests[at])) for at in pages] for pages in cut(order, batch)]
    yield "digest to handle, by a dict", per_page_ns(some, lambda pages: [table[p] for p in pages])
    yield "digest to hash", per_page_ns(some, hashes_of)
    writes = WriteAdmission(WritePolicy.REUSE, resident=set(digests[::10]), pending=set[bytes]())
    yield "write admission: save", per_page_ns(some, writes.save)
    yield "write admission: query", per_page_ns(some, writes.query)

    def touch(pages: Sequence[bytes]) -> None:
        for page in pages:
            table.move_to_end(page)

    def replace(pages: Sequence[bytes]) -> None:
        for _ in pages:
            digest, index = table.popitem(last=False)
            table[digest] = index

    yield "OrderedDict: look up", per_page_ns(some, touch)
    yield "OrderedDict: evict and admit", per_page_ns(some, replace)


def main() -> int:
    """Run every size in a process of its own, and print one table."""
    asked = parser(__doc__ or "")
    asked.add_argument("--keys", type=float, nargs="+", default=[1e4, 1e5, 1e6, 1e7])
    asked.add_argument("--batch", type=int, default=256, help="pages a call")
    asked.add_argument("--interpreted", action="store_true", help="loops as they are")
    asked.add_argument("--probe", help="used by this script: what to measure")
    args = asked.parse_args()
    sizes = [int(keys) for keys in args.keys]
    if args.probe:
        compiled = not args.interpreted
        made = {
            "retention": lambda keys: measure_retention(keys, args.batch, compiled=compiled),
            "admission": lambda keys: measure_admission(keys, args.batch, compiled=compiled),
            "digests": lambda keys: measure_digests(keys, args.batch),
        }[args.probe](sizes[0])
        json.dump(dict(made), sys.stdout)
        return 0
    found: dict[str, list[float]] = {}
    options = ["--batch", str(args.batch), *(["--interpreted"] if args.interpreted else [])]
    for what in ("retention", "admission", "digests"):
        for keys in sizes:
            command = [sys.executable, __file__, "--probe", what, "--keys", str(keys), *options]
            for name, value in json.loads(subprocess.check_output(command)).items():
                found.setdefault(name, []).append(value)
    rows = [
        (
            name,
            *values,
            ""
            if any(word in name for word in ("bytes", "Dict", "two calls"))
            else f"< {TARGET_NS}",
        )
        for name, values in found.items()
    ]
    way = "interpreted" if args.interpreted else "compiled"
    title = f"Nanoseconds a page, {way}, {args.batch} pages a call, by resident objects"
    columns = ("what", *(f"{keys:,}" for keys in sizes), "target")
    report(title, columns, rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
