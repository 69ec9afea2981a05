"""How much of a memory copy's speed do E > C > D and D > R > E keep, CRC included?

The limit is ``np.copyto`` on one thread, told in two ways: over the same 64 KiB segments in the
order in which a page names them, and over the same bytes in one call.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from measure import HEAD_DIM, HEADS, interleaved, packed_geometry, parser, report

from orbitkv import Config, Geometry, Manager, ModelIdentity, Restored, Saved
from orbitkv.config import GIB, KIB, MIB

LAYERS, PAGE_TOKENS = 16, 16
PAGES = 1024
SEGMENT_NBYTES = 64 * KIB
SHAPE = (PAGES, HEADS, PAGE_TOKENS, 2 * HEAD_DIM)

Tensors = dict[str, np.ndarray]


def geometry() -> Geometry:
    """16 layers of packed KV: 64 KiB a segment, 1 MiB a page, 1 GiB in all."""
    made = packed_geometry(SEGMENT_NBYTES, LAYERS)
    assert made.page_tokens == PAGE_TOKENS
    assert set(made.segment_nbytes) == {SEGMENT_NBYTES}
    assert made.page_nbytes * PAGES == GIB
    return made


def zeros(*shape: int) -> np.ndarray:
    """Memory of torch's alignment (64 B; numpy's is 16 B, which costs a copy up to a third)."""
    return torch.zeros(shape, dtype=torch.int16).numpy().view(np.uint16)


def per_layer_tensors(made: Geometry) -> Tensors:
    """One tensor a layer, as most engines hold them."""
    return {slot.name: zeros(*SHAPE) for slot in made.slots}


def cross_layer_blocks(made: Geometry) -> Tensors:
    """All layers of a page side by side in one allocation, each tensor a view of it."""
    block = zeros(PAGES, LAYERS, *SHAPE[1:])
    return {slot.name: block[:, index] for index, slot in enumerate(made.slots)}


def gib_a_second(work: Callable[[], object]) -> float:
    """Run once over 1 GiB."""
    started_s = time.perf_counter()
    work()
    return 1 / (time.perf_counter() - started_s)


def measure(layout: Callable[[Geometry], Tensors], rounds: int) -> dict[str, float]:
    """Take save, restore and both limits in turn, on fresh keys each round."""
    made = geometry()
    source, target = layout(made), layout(made)
    generator = np.random.default_rng(0)
    for tensor in (*source.values(), *target.values()):
        tensor[:] = generator.integers(0, 2**16, SHAPE, np.uint16)  # touched: no page faults
    segments = [tensor[page].reshape(-1) for page in range(PAGES) for tensor in source.values()]
    width = SEGMENT_NBYTES // 2
    flat, landing = zeros(GIB // 2), zeros(GIB // 2)
    flat[:] = landing[:] = 1

    def copy_segments() -> None:
        for index, segment in enumerate(segments):
            np.copyto(landing[index * width : (index + 1) * width], segment)

    with Manager(Config(pool_nbytes=GIB + 64 * MIB)) as manager:
        model = ModelIdentity("bench")
        sender = manager.register(made, source, model=model)
        receiver = manager.register(made, target, model=model)
        run = 0

        def save() -> None:
            nonlocal run
            run += 1
            outcome = manager.publish(sender, zip(hashes(run), range(PAGES), strict=True)).result()
            assert isinstance(outcome, Saved)
            assert len(outcome.stored) == PAGES

        def restore() -> None:
            lease = manager.query(receiver, hashes(run))
            outcome = manager.restore(lease, dict(zip(hashes(run), range(PAGES), strict=True)))
            restored = outcome.result()
            assert isinstance(restored, Restored)
            assert len(restored.restored) == PAGES

        medians = interleaved(
            rounds,
            {
                "copyto, whole": lambda: gib_a_second(lambda: np.copyto(landing, flat)),
                "copyto, segments": lambda: gib_a_second(copy_segments),
                "E > C > D": lambda: gib_a_second(save),
                "D > R > E": lambda: gib_a_second(restore),
            },
        )
        assert all((source[name] == target[name]).all() for name in source)
        assert manager.leaks() == []
    return medians


def hashes(run: int) -> list[bytes]:
    """Page hashes that no earlier run has used."""
    return [run.to_bytes(8, "little") + page.to_bytes(24, "little") for page in range(PAGES)]


def main() -> int:
    """Pin to one core unless told otherwise, measure both layouts, print one table."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=7)
    arguments.add_argument("--all-cores", action="store_true", help="do not pin to one core")
    args = arguments.parse_args()
    if not args.all_cores:
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    rows: list[tuple[object, ...]] = []
    for label, layout in (
        ("per-layer tensors", per_layer_tensors),
        ("cross-layer blocks", cross_layer_blocks),
    ):
        medians = measure(layout, args.rounds)
        whole, segments = medians["copyto, whole"], medians["copyto, segments"]
        rows += [
            (label, name, rate, rate / segments * 100, rate / whole * 100)
            for name, rate in medians.items()
        ]
    columns = ("layout", "what", "GiB/s", "% of copyto, segments", "% of copyto, whole")
    report("1 GiB in 64 KiB segments, medians", columns, rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
