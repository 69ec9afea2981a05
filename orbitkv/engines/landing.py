"""Where restored prefixes arrive, and what saves and restores of several bands look like as one.

A *band* is a run of neighbouring layers that is stored by itself. Bands come back one after the
other, so that a model can begin with the first while the others are on their way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Sequence
from typing import Any

import torch
from transformers import DynamicCache

from orbitkv.cache.catalogue import Tier
from orbitkv.engines.device import mark_stream, order_after
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.leases import PrefixLease
from orbitkv.runtime.manager import Manager
from orbitkv.stages.ticket import Failed, Outcome, Restored, Saved, Ticket

# While one band is copied the next one waits behind it, so that there is no gap between the two. To
# ask for more at once takes the caller's time, and the first band would be noticed later.
_BANDS_UNDER_WAY = 2

ModelConfig = Any  # transformers.PreTrainedConfig


class Landing:
    """Tensors that restored prefixes are put into, registered with a manager once.

    A cache that was restored here lies in these tensors until the model has grown it, which makes
    new ones. The next restore writes over them.

    Attributes:
        tensors: K and V of each layer in turn, [1, heads, pages * page_tokens, head_dim].
        pages: Pages that have room.
        first_layers: Of each band.
        instances: Of each band: its tensors, registered as pages.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        pages: int,
        first_layers: Sequence[int],
        instances: Sequence[Instance],
    ) -> None:
        self.tensors = tuple(tensors)
        self.pages = pages
        self.first_layers = tuple(first_layers)
        self.instances = tuple(instances)
        self._arrival: Arrival | None = None

    @property
    def page_tokens(self) -> int:
        """Tokens of a page."""
        return self.instances[0].geometry.page_tokens

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.tensors[0].device

    def cache(self, config: ModelConfig, pages: int) -> DynamicCache:
        """See the first pages as a cache of a model with this configuration; nothing is copied."""
        tokens = pages * self.page_tokens
        return make_cache(config, [tensor[:, :, :tokens] for tensor in self.tensors])

    def expect(self, arrival: Arrival) -> None:
        """Wait until nothing writes here any more; from now on it is this arrival's."""
        if self._arrival:
            self._arrival.drain()
        self._arrival = arrival


def make_cache(config: ModelConfig, tensors: Sequence[torch.Tensor]) -> DynamicCache:
    """Make a cache of K and V of each layer in turn, which are not copied."""
    cache = DynamicCache(config=config)
    layers: list[Any] = cache.layers
    for layer, keys, values in zip(layers, tensors[::2], tensors[1::2], strict=True):
        # As its lazy_initialization does, but for two empty tensors a layer, made on the device.
        layer.device, layer.dtype = keys.device, keys.dtype
        layer.keys, layer.values = keys, values
        layer.is_initialized = True
    return cache


class Arrival:
    """A prefix on its way into a landing, band by band, in order of their layers.

    Args:
        hashes: Of the prefix's pages; as many of them are restored as there are, and have room.

    Attributes:
        pages: Pages that all bands asked for so far have brought, or still may. It only falls.
    """

    def __init__(self, manager: Manager, landing: Landing, hashes: Sequence[bytes]) -> None:
        self._manager = manager
        self._landing = landing
        self._hashes = hashes
        self._asked: list[tuple[PrefixLease, Ticket]] = []
        self._arrived = 0
        self.pages = min(len(hashes), landing.pages)
        landing.expect(self)
        for _ in landing.instances[:_BANDS_UNDER_WAY]:
            self._ask()

    def wait(self, band: int) -> int:
        """Wait for a band and all before it; the current stream may then read them.

        Returns:
            Pages of the prefix that are whole in all of them: fewer than before, where one was
            damaged or has been evicted.

        Raises:
            OrbitError: the restore failed, as its text says.
        """
        while self._arrived <= band:
            lease, ticket = self._asked[self._arrived]
            outcome = ticket.result()
            self._arrived += 1
            if len(self._asked) < len(self._landing.instances):
                self._ask()
            if isinstance(outcome, Failed):
                raise outcome.error
            placed: frozenset[bytes] = frozenset()
            if isinstance(outcome, Restored):
                placed = frozenset(outcome.restored)
                order_after(outcome.ready, self._landing.device)
            hashes = enumerate(lease.hashes)
            whole = next((i for i, page_hash in hashes if page_hash not in placed), None)
            self.pages = min(self.pages, len(lease.hashes) if whole is None else whole)
        return self.pages

    def wait_for_all(self) -> int:
        """Wait for every band, as ``wait`` does for one."""
        return self.wait(len(self._landing.instances) - 1)

    def sources(self) -> dict[Tier, int]:
        """How many of the pages came from each tier; where their bands differ, the slowest counts.

        To be asked once all bands have come.
        """
        leases, tiers = [lease for lease, _ in self._asked], tuple(Tier)
        slowest = [
            max((lease.copies[page].tier for lease in leases), key=tiers.index)
            for page in range(self.pages)
        ]
        return {tier: slowest.count(tier) for tier in tiers}

    def drain(self) -> None:
        """Wait until nothing is under way any more, whatever came of it."""
        for _, ticket in self._asked:
            ticket.result()

    def _ask(self) -> None:
        instance = self._landing.instances[len(self._asked)]
        # A forward may still read what the landing held before.
        ready = mark_stream(self._landing.device)
        with self._manager.query(instance, self._hashes[: self.pages]) as lease:
            self.pages = len(lease.hashes)
            places = {page_hash: index for index, page_hash in enumerate(lease.hashes)}
            self._asked.append((lease, self._manager.restore(lease, places, ready=ready)))


class SaveTicket:
    """The saves of all bands of a prefix, as one; to be waited for like a ``Ticket``.

    A page is stored once it is in every band, resident where it was before in every band, and
    dropped where it is missing from one.
    """

    def __init__(self, hashes: Sequence[bytes], tickets: Sequence[Ticket]) -> None:
        self._hashes = tuple(hashes)
        self._tickets = tuple(tickets)

    @property
    def done(self) -> bool:
        """Whether all have ended."""
        return all(ticket.done for ticket in self._tickets)

    def cancel(self) -> None:
        """Stop what has not been submitted to a lane."""
        for ticket in self._tickets:
            ticket.cancel()

    def result(self, timeout_s: float | None = None) -> Outcome:
        """Wait for the outcome, from any thread but the manager's.

        Raises:
            TimeoutError: the saves have not ended within ``timeout_s``; they go on.
        """
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        return self._merge(
            [
                ticket.result(None if until_s is None else max(0.0, until_s - time.monotonic()))
                for ticket in self._tickets
            ]
        )

    def __await__(self) -> Generator[object, None, Outcome]:
        return self._gathered().__await__()

    async def _gathered(self) -> Outcome:
        async def ended(ticket: Ticket) -> Outcome:
            return await ticket

        return self._merge(await asyncio.gather(*map(ended, self._tickets)))

    def _merge(self, outcomes: Sequence[Outcome]) -> Outcome:
        failed = next((outcome for outcome in outcomes if isinstance(outcome, Failed)), None)
        if failed:
            return failed
        saved = [outcome for outcome in outcomes if isinstance(outcome, Saved)]
        dropped = {page_hash for outcome in saved for page_hash in outcome.dropped}
        resident = set(self._hashes).intersection(*(outcome.resident for outcome in saved))
        return Saved(
            tuple(h for h in self._hashes if h not in dropped and h not in resident),
            tuple(h for h in self._hashes if h in resident),
            tuple(h for h in self._hashes if h in dropped),
        )
