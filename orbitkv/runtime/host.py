"""Host: what all sessions of a daemon share, and the bounds of each."""

from __future__ import annotations

import resource
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import structlog

from orbitkv.errors import Closed, ImpossibleRequest, ProtocolError
from orbitkv.runtime import wire
from orbitkv.runtime.core import Core
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.tensors import Imported
from orbitkv.runtime.wire import MAX_DESCRIPTORS

MAX_IN_FLIGHT = 1024
MAX_INSTANCES = 256
MAX_MEMORIES = 1024
MAX_LEASES = 4096
MAX_EVENTS = 2 * MAX_IN_FLIGHT
_MEMORIES_SHARE = 4  # of all descriptors, one session's memories take no more than a quarter


@dataclass(eq=False)
class ServedInstance:
    """One registration: what the core knows of it, and the mappings that its tensors are in.

    Attributes:
        leaving: It takes no new work, and goes when the last has ended.
    """

    instance: Instance
    imported: Imported
    pid: int
    leaving: bool = False


def _max_memories() -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return min(MAX_MEMORIES, max(MAX_DESCRIPTORS, descriptors // _MEMORIES_SHARE))


@dataclass(eq=False)
class Host:
    """What all sessions of a daemon share.

    Attributes:
        devices: Ordinals of the GPUs that tensors may be on; None: all.
        observe: Told of each save and restore that has ended, and how many seconds it took.
        status: Takes a snapshot of the daemon.
        incarnation: A number of this start alone, the upper half of each of its handles.
        draining: No new work is taken.
        counters: Of what clients asked.
        max_memories: Shared memories that one session may have mapped, as each keeps a descriptor.
    """

    core: Core
    devices: frozenset[int] | None
    log: structlog.stdlib.BoundLogger
    observe: Callable[[str, float], None]
    status: Callable[[], Coroutine[Any, Any, wire.DaemonStatus]]
    incarnation: int = field(default_factory=lambda: secrets.randbelow(2**31 - 1) + 1)
    draining: bool = False
    counters: Counter[str] = field(default_factory=Counter)
    max_memories: int = field(default_factory=_max_memories)
    _given: int = 0
    _sessions: int = 0

    def next_session(self) -> int:
        """A number for one more session."""
        self._sessions += 1
        return self._sessions

    def next_handle(self) -> int:
        """A handle that no other start of the daemon gives."""
        self._given += 1
        return (self.incarnation << 32) + self._given

    def stale(self, handle: int, what: str) -> Closed:
        """Tell why a handle stands for nothing here."""
        if handle >> 32 != self.incarnation:
            return Closed(
                f"the {what} is of another start of the daemon ({handle >> 32:08x}; "
                f"this one is {self.incarnation:08x}): register again"
            )
        return Closed(f"the {what} is not of this session, or has ended")


def check_count(
    message: wire.Publish | wire.Query | wire.Prepare | wire.Warm | wire.Restore,
) -> None:
    """Refuse what would keep the loop from others for too long."""
    if len(message.hashes) > wire.MAX_HASHES:
        seen = f"{len(message.hashes)} page hashes in one request"
        raise ImpossibleRequest(f"{seen}; accepted: {wire.MAX_HASHES}")


def too_many() -> ProtocolError:
    """Refuse one more request."""
    return ProtocolError(f"more than {MAX_IN_FLIGHT} requests without an answer")
