"""Instance: one registration of an engine's pages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from orbitkv.segment import Geometry, KeyDigests, PagedTensors, hash_pages
from orbitkv.stages.ticket import Ticket


@dataclass(eq=False)
class Instance:
    """One registration of an engine's pages: what ``publish`` reads and ``restore`` fills.

    Attributes:
        namespace: ``orbitkv:v2:<64 hex>``; instances with equal namespaces share objects.
    """

    namespace: str
    tensors: PagedTensors
    tickets: set[Ticket] = field(default_factory=set)

    @property
    def geometry(self) -> Geometry:
        """As declared at registration."""
        return self.tensors.geometry

    @cached_property
    def digests(self) -> tuple[KeyDigests, ...]:
        """Digests of its keys by page hash, one for each state group."""
        return tuple(KeyDigests(self.namespace, group) for group in self.geometry.groups)

    def hash_pages(self, tokens: Sequence[int]) -> list[bytes]:
        """Hash every full page of a token sequence, each chained to its prefix."""
        return hash_pages(self.namespace, tokens, self.geometry.page_tokens)
