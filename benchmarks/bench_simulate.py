"""How fast does a simulation walk a trace, and how much memory does it take?

Processor time of one core, the median of several runs, loops compiled before. A bare LRU, which is
an ``OrderedDict`` in Python and knows no classes, SSD or admission, walks the same pages beside.
Then a sweep of twenty points by the clock, and the most resident memory of processes that simulate
ten million unique pages. The public traces are read where they are; one more is generated.
"""

from __future__ import annotations

import itertools
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
from measure import parser, report

from orbitkv.objects import OBJECT_ALIGN_NBYTES as BLOCK
from orbitkv.runtime.simulate import Pages, Simulation, cut, load, simulate
from orbitkv.runtime.traces import BLOCK_TOKENS, RequestTrace, read_trace

TRACES = Path(__file__).parents[2] / "shared" / "data" / "traces"
TARGET_PER_S, TARGET_TRACE_S, TARGET_SWEEP_S, TARGET_MB = 1_000_000, 1.0, 20.0, 500
CAPACITIES = (5_000, 20_000, 50_000)
SSD_PAGES = 100_000
ROUNDS = 5
UNIQUE = 10_000_000
PROMPT_BLOCKS, SHARED_BLOCKS = 100, 20  # of the generated trace


def generated(requests: int) -> RequestTrace:
    """Prompts of 100 blocks, the first 20 of them one of 1,000 system prompts, all else new."""
    rng = np.random.default_rng(1)
    own = PROMPT_BLOCKS - SHARED_BLOCKS
    blocks = np.empty((requests, PROMPT_BLOCKS), np.int32)
    systems = rng.integers(0, min(1000, requests), requests, np.int32)
    blocks[:, :SHARED_BLOCKS] = systems[:, None] * SHARED_BLOCKS + np.arange(SHARED_BLOCKS)
    first = 1000 * SHARED_BLOCKS
    blocks[:, SHARED_BLOCKS:] = first + np.arange(requests * own).reshape(requests, own)
    tokens = np.full(requests, PROMPT_BLOCKS * BLOCK_TOKENS)
    starts = np.arange(requests + 1) * PROMPT_BLOCKS
    return RequestTrace(
        starts, blocks.ravel(), first + requests * own, np.zeros(requests), tokens, tokens
    )


def settings(pool_pages: int, **changes: object) -> Simulation:
    """Pages of one 4 KiB block."""
    sizes: dict[str, object] = {"pool_nbytes": pool_pages * BLOCK, "bytes_per_token": 8}
    return Simulation(**(sizes | changes))  # type: ignore[arg-type]


def bare_lru(pages: Pages, capacity: int) -> int:
    """Prefix hits of a plain LRU in Python: every block of a request is touched, in order."""
    blocks, starts = pages.pages.tolist(), pages.starts.tolist()
    held: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for start, end in itertools.pairwise(starts):
        found = True
        for block in blocks[start:end]:
            if block in held:
                hits += found
                held.move_to_end(block)
            else:
                found = False
                if len(held) == capacity:
                    held.popitem(last=False)
                held[block] = None
    return hits


def cpu_s(work: Callable[[], object]) -> float:
    """Median processor time of some runs."""
    taken = []
    for _ in range(ROUNDS):
        started = time.process_time()
        work()
        taken.append(time.process_time() - started)
    return statistics.median(taken)


def policies(pool_pages: int) -> Iterator[tuple[str, Simulation]]:
    """Cheap ones first."""
    ssd: dict[str, object] = {"ssd_cache_capacity_nbytes": SSD_PAGES * BLOCK}
    yield "plain LRU", settings(pool_pages)
    yield "tail first", settings(pool_pages, recency="tail-first")
    yield "protected 80 %", settings(pool_pages, cache_protected_percent=80)
    yield "LFU admission", settings(pool_pages, enable_lfu_admission=True)
    yield "SSD, all", settings(pool_pages, **ssd)
    yield "SSD, reuse", settings(pool_pages, **ssd, ssd_write_policy="reuse")
    everything: dict[str, object] = {
        **ssd,
        "ssd_write_policy": "reuse",
        "cache_protected_percent": 80,
        "enable_lfu_admission": True,
        "gpu_pages": 2_000,
        "recency": "tail-first",
    }
    yield "all of them, and a GPU", settings(pool_pages, **everything)


def measured(name: str, pages: Pages, capacities: Sequence[int]) -> Iterator[tuple[object, ...]]:
    """A row for each capacity of a plain LRU, and for each policy at the middle one."""
    blocks = len(pages.pages)
    for capacity in capacities:
        made = settings(capacity)
        found = simulate(pages, made)
        took_s = cpu_s(lambda made=made: simulate(pages, made))
        bare_s = cpu_s(lambda capacity=capacity: bare_lru(pages, capacity))
        assert found.dram_hit_blocks == bare_lru(pages, capacity)
        yield (
            *(name, f"plain LRU, {capacity:,}", f"{found.prefix_hit_rate:.2%}", took_s),
            *(blocks / took_s / 1e6, blocks / bare_s / 1e6, f">= {TARGET_PER_S / 1e6:.0f}"),
        )
    middle = capacities[len(capacities) // 2]
    for policy, made in list(policies(middle))[1:]:
        found = simulate(pages, made)
        took_s = cpu_s(lambda made=made: simulate(pages, made))
        yield (
            *(name, f"{policy}, {middle:,}", f"{found.prefix_hit_rate:.2%}", took_s),
            *(blocks / took_s / 1e6, "", f">= {TARGET_PER_S / 1e6:.0f}"),
        )


def measure_sweep(pages: Pages) -> float:
    """Twenty points: five capacities, two shares, two write policies; seconds by the clock."""
    started = time.perf_counter()
    for capacity in (2_000, 5_000, 10_000, 20_000, 50_000):
        for percent in (0, 80):
            for policy in ("all", "reuse"):
                made = settings(
                    capacity,
                    cache_protected_percent=percent,
                    ssd_write_policy=policy,
                    ssd_cache_capacity_nbytes=SSD_PAGES * BLOCK,
                )
                simulate(pages, made)
    return time.perf_counter() - started


def memories() -> dict[str, Simulation]:
    """Settings whose memory is measured, by name."""
    tenth = UNIQUE // 10
    return {
        "every policy, a tenth in DRAM, all on SSD": settings(
            tenth,
            ssd_cache_capacity_nbytes=UNIQUE * BLOCK,
            ssd_write_policy="reuse",
            cache_protected_percent=80,
            enable_lfu_admission=True,
        ),
        "a tenth in DRAM, all on SSD": settings(tenth, ssd_cache_capacity_nbytes=UNIQUE * BLOCK),
        "all in DRAM": settings(2 * UNIQUE),
        "all in DRAM and on SSD": settings(
            2 * UNIQUE, ssd_cache_capacity_nbytes=2 * UNIQUE * BLOCK
        ),
    }


def measure_memory(made: Simulation) -> tuple[int, float]:
    """Most resident bytes of this process, and seconds, for unique pages read from a file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.jsonl"
        # By a process of its own, so that the generator's memory is not counted.
        subprocess.run([sys.executable, __file__, "--probe", "write", "--out", path], check=True)
        trace = read_trace(path)
    pages = cut(trace, BLOCK_TOKENS)
    del trace
    assert pages.unique_pages >= UNIQUE
    started = time.process_time()
    simulate(pages, made)
    took_s = time.process_time() - started
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, took_s


def write_trace(path: Path) -> None:
    """Write the generated trace of ten million unique pages."""
    trace = generated(UNIQUE // (PROMPT_BLOCKS - SHARED_BLOCKS))
    with path.open("w", encoding="ascii") as file:
        for start, end in itertools.pairwise(trace.starts.tolist()):
            blocks = trace.blocks[start:end].tolist()
            line = {
                "timestamp": start,
                "input_length": len(blocks) * BLOCK_TOKENS,
                "output_length": 1,
                "hash_ids": blocks,
            }
            file.write(json.dumps(line) + "\n")


def main() -> int:
    """Measure every trace, then a sweep, then memory, and print one table."""
    asked = parser(__doc__ or "")
    asked.add_argument("--probe", choices=("memory", "write"), help="used by this script")
    asked.add_argument("--of", default=next(iter(memories())), help="used by this script")
    asked.add_argument("--out", type=Path, help="used by this script")
    args = asked.parse_args()
    if args.probe == "write":
        write_trace(args.out)
        return 0
    if args.probe == "memory":
        print(*measure_memory(memories()[args.of]))
        return 0
    load()
    facts: dict[str, object] = {}
    rows: list[tuple[object, ...]] = []
    pages = cut(generated(20_000), BLOCK_TOKENS)
    rows += measured("generated", pages, (100_000,))
    for name in ("conversation", "synthetic"):
        path = TRACES / f"{name}_trace.jsonl"
        if not path.exists():
            facts[name] = f"not here ({path}), so not measured"
            continue
        started = time.perf_counter()
        trace = read_trace(path)
        facts[f"{name}, read, s"] = time.perf_counter() - started
        pages = cut(trace, BLOCK_TOKENS)
        facts[f"{name}, bound"] = f"{pages.unlimited_hits / len(pages.pages):.2%}"
        rows += measured(name, pages, CAPACITIES)
        facts[f"{name}, sweep of 20 points, s (target: {TARGET_SWEEP_S:.0f})"] = measure_sweep(
            pages
        )
    for name in memories():
        command = [sys.executable, __file__, "--probe", "memory", "--of", name]
        nbytes, took_s = subprocess.check_output(command, text=True).split()
        facts[f"10,000,000 unique pages, {name}, MB (target: {TARGET_MB})"] = int(nbytes) / 1e6
        facts[f"10,000,000 unique pages, {name}, processor s"] = float(took_s)
    columns = ("trace", "policy, pages of DRAM", "hits", "s", "M blocks/s", "bare LRU", "target")
    title = f"Simulation on one core (target: a trace in {TARGET_TRACE_S:.0f} s)"
    report(title, columns, rows, as_json=args.json, facts=facts)
    return 0


if __name__ == "__main__":
    sys.exit(main())
