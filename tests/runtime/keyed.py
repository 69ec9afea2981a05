"""Engines whose pages hold what their key says, so that any byte of another key is seen."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from orbitkv import Manager
from tests.builders import BLOCK, Engine, big_geometry, page_hash, toy_geometry

GEOMETRIES = (toy_geometry(), big_geometry(3 * BLOCK))  # objects of one block, and of four
PAGES = 4


def content(engine: Engine, key: int) -> bytes:
    """All bytes of a page that holds what its key says."""
    nbytes = sum(engine.geometry.segment_nbytes)
    return np.random.default_rng(key).integers(1, 256, nbytes, np.uint8).tobytes()


def fill(engine: Engine, index: int, key: int) -> None:
    """Compute the page of a key, as an engine would."""
    raw = np.frombuffer(content(engine, key), np.uint8)
    for item in engine.geometry.slots:
        page = np.moveaxis(engine.tensors[item.name], item.axes.index("page"), 0)[index]
        page[...] = raw[: page.nbytes].view(page.dtype).reshape(page.shape)
        raw = raw[page.nbytes :]


class Keyed:
    """One registration a geometry; a key's number says which of them has its page."""

    def __init__(self, manager: Manager) -> None:
        self.manager = manager
        self.engines = [
            Engine.register(manager, pages=PAGES, seed=None, geometry=geometry)
            for geometry in GEOMETRIES
        ]

    def save(self, keys: Iterable[int]) -> None:
        """Compute and save pages, as many at once as there is room for."""
        for engine, batch in self._batches(keys):
            for index, key in enumerate(batch):
                fill(engine, index, key)
            engine.save({page_hash(key): index for index, key in enumerate(batch)})

    def restore(self, keys: Iterable[int]) -> int:
        """Restore pages; every one that is restored holds its key's bytes, and no other any.

        Returns:
            How many were restored.
        """
        hits = 0
        for engine, batch in self._batches(keys):
            engine.clear()
            placed = set(engine.restored({page_hash(key): i for i, key in enumerate(batch)}))
            for index, key in enumerate(batch):
                if page_hash(key) in placed:
                    assert engine.page(index) == content(engine, key), f"key {key}"
                else:
                    assert engine.is_clear(index), f"key {key} is a miss, and left bytes"
            hits += len(placed)
        return hits

    def _batches(self, keys: Iterable[int]) -> list[tuple[Engine, list[int]]]:
        found = []
        for which, engine in enumerate(self.engines):
            mine = [key for key in dict.fromkeys(keys) if key % len(self.engines) == which]
            found += [(engine, mine[at : at + PAGES]) for at in range(0, len(mine), PAGES)]
        return found
