"""Leases: prefixes kept from eviction, each for a time, all of them within a quota."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from orbitkv.cache.budget import Claim, Quota
from orbitkv.cache.catalogue import Catalogue, Copy, Tier
from orbitkv.config import Config
from orbitkv.runtime.instance import Instance
from orbitkv.stages.ticket import Ticket

_UNBOUNDED_NBYTES = 2**63


@dataclass(eq=False)
class PrefixLease:
    """The longest prefix that can be restored, kept from eviction until released or restored.

    Attributes:
        hashes: The prefix, in order: the first ``len(hashes)`` of those asked for.
        copies: The objects of its pages, page after page; of each one a state group, in order.
        spent: Released, restored or expired; from the start where nothing was found.
        expired: Nobody restored or released it in time.
        preparation: Of ``prepare``: ends when what SSD alone had is in DRAM too.
    """

    instance: Instance
    hashes: tuple[bytes, ...]
    copies: Sequence[Copy]
    _release: Callable[[PrefixLease], None]
    claim: Claim | None = None
    expiry: asyncio.TimerHandle | None = None
    spent: bool = False
    expired: bool = False
    preparation: Ticket | None = None

    def release(self) -> None:
        """Let the pages be evicted again. Harmless after a restore, or twice."""
        self._release(self)

    def tiers(self) -> dict[Tier, int]:
        """How many objects come from each tier."""
        found = [copy.tier for copy in self.copies]
        return {tier: found.count(tier) for tier in Tier}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class Leases:
    """Every lease of a manager. Changed on its loop alone.

    Args:
        release: What a lease's own ``release`` calls, on any thread.
    """

    def __init__(
        self, catalogue: Catalogue, config: Config, release: Callable[[PrefixLease], None]
    ) -> None:
        capacity_nbytes = config.query_budget_nbytes or _UNBOUNDED_NBYTES
        each_nbytes = config.query_instance_budget_nbytes or capacity_nbytes
        self.quota = Quota(capacity_nbytes, each_nbytes)
        self._catalogue = catalogue
        self._ttl_s = config.lease_ttl_s
        self._release = release
        self._loop = asyncio.get_running_loop()
        self._standing: set[PrefixLease] = set()

    def __len__(self) -> int:
        return len(self._standing)

    def of(self, instance: Instance) -> list[PrefixLease]:
        """The leases of one instance."""
        return [lease for lease in self._standing if lease.instance is instance]

    def grant(
        self, instance: Instance, hashes: tuple[bytes, ...], copies: Sequence[Copy]
    ) -> PrefixLease:
        """Pin what was found, for as long as a lease stands; nothing where the quota is too small.

        A lease of nothing does not stand: it holds nothing, and need not be released.

        Args:
            hashes: Those asked for.
            copies: The objects of the first of them, as the lease has them.
        """
        nbytes = sum([copy.nbytes for copy in set(copies)])  # of a page named twice, once
        claim = self.quota.claim(instance, nbytes) if copies else None
        if copies and claim is None:
            oversized = nbytes > self.quota.each_nbytes
            self._catalogue.counters["query_oversized" if oversized else "query_budget_full"] += 1
            copies = ()
        found = hashes[: len(copies) // len(instance.geometry.groups)]
        lease = PrefixLease(instance, found, copies, self._release, claim)
        if not copies:
            lease.spent = True
            return lease
        self._catalogue.pin_all(copies)
        lease.expiry = self._loop.call_later(self._ttl_s, self._expire, lease)
        self._standing.add(lease)
        return lease

    def spend(self, lease: PrefixLease) -> None:
        """End a lease; its pins and its claim are the caller's."""
        lease.spent = True
        self._standing.discard(lease)
        if lease.expiry:
            lease.expiry.cancel()

    def release(self, lease: PrefixLease) -> None:
        """End a lease that was not restored. Harmless twice."""
        if lease.spent:
            return
        self.spend(lease)
        self._catalogue.unpin_all(lease.copies)
        if lease.claim:
            lease.claim.release()

    def release_all(self, leases: Iterable[PrefixLease] | None = None) -> None:
        """End these leases, or all."""
        for lease in tuple(self._standing if leases is None else leases):
            self.release(lease)

    def leaks(self) -> list[str]:
        """What still stands or is claimed: nothing at rest."""
        found = [f"{len(self)} leases"] if self._standing else []
        if self.quota.used_nbytes:
            found.append(f"queries: {self.quota.used_nbytes} bytes claimed")
        return found

    def _expire(self, lease: PrefixLease) -> None:
        lease.expired = True
        self._catalogue.counters["leases_expired"] += 1
        self.release(lease)
