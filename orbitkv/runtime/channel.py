"""Channel: an edge at run time, bounded by items and by bytes; Inbox: fair over several."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from orbitkv.errors import Cancelled, Closed, Dropped, ImpossibleRequest, OrbitError
from orbitkv.graph import OnFull


class Sized(Protocol):
    """Anything that knows how many bytes it pins."""

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps from others while it waits."""
        ...

    def abandon(self, error: OrbitError) -> None:
        """End it without having done its work."""
        ...


T = TypeVar("T", bound=Sized)


class Watch(Protocol):
    """Is told what a channel does, before that has consequences. It must not raise."""

    def blocked(self, item: object) -> None:
        """There is no room yet for a batch."""
        ...

    def entered(self, queue: Channel[Any], item: object) -> None:
        """A batch is in the queue."""
        ...

    def taken(self, queue: Channel[Any], item: object) -> None:
        """The consumer takes a batch."""
        ...

    def dropped(self, queue: Channel[Any], item: Any, error: OrbitError) -> None:  # noqa: ANN401
        """A batch is to be abandoned."""
        ...


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """What a channel holds and has carried. Times and rates are the reader's to derive."""

    name: str
    items: int
    nbytes: int
    peak_items: int
    peak_nbytes: int
    passed_items: int
    passed_nbytes: int
    dropped_items: int
    senders_waiting: int


class Channel(Generic[T]):
    """A queue with one consumer and any number of producers, who wait in order.

    A batch is never in two places and never in none: what cannot be put in is abandoned here,
    also when its sender is cancelled.

    Args:
        max_items: Most batches held.
        max_nbytes: Most bytes held. A batch above it can never pass, and is refused at once.
        on_full: ``wait``, or ``drop``: abandon the batch, count it, go on.

    Attributes:
        watch: Is told of every batch; None: nobody is.
    """

    def __init__(self, name: str, *, max_items: int, max_nbytes: int, on_full: OnFull) -> None:
        self.name = name
        self.max_items = max_items
        self.max_nbytes = max_nbytes
        self.watch: Watch | None = None
        self._on_full = on_full
        self._items: deque[tuple[T, int]] = deque()
        self._nbytes = 0
        self._senders: dict[asyncio.Future[None], tuple[T, int]] = {}
        self._abandoned_with: OrbitError | None = None
        self._readable: asyncio.Future[None] | None = None
        self._closed = False
        self._peak = (0, 0)
        self._passed = (0, 0)
        self._dropped_items = 0

    @property
    def items(self) -> int:
        """Batches that it holds."""
        return len(self._items)

    @property
    def exhausted(self) -> bool:
        """Closed, and nothing is left to receive."""
        return self._closed and not self._items and not self._senders

    async def send(self, item: T) -> bool:
        """Put a batch in, in turn. From the call on it is the channel's, whatever happens.

        Returns:
            False where the batch was abandoned: dropped from a full channel, too large ever to
            pass, or sent to a channel that is closed.
        """
        taken = self.offer(item)
        if taken is not None:
            return taken
        accepted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._senders[accepted] = (item, item.nbytes)
        if self.watch is not None:
            self.watch.blocked(item)
        try:
            await accepted
        except asyncio.CancelledError:
            if self._senders.pop(accepted, None):  # else the consumer has it already
                self._abandon(item, Cancelled(f"cancelled while {self.name} was full"))
                self._admit_senders()
                self._wake()  # a closed channel may be exhausted now
            raise
        return True

    def offer(self, item: T) -> bool | None:
        """Put a batch in, if that needs no waiting; then it is the channel's.

        Returns:
            True where it is in, False where it was abandoned, and None where its turn has not
            come: it is still the caller's.
        """
        nbytes = item.nbytes
        if self._closed:
            self._abandon(item, self._abandoned_with or Closed(f"{self.name} is closed"))
            return False
        if nbytes > self.max_nbytes:
            self._dropped_items += self._on_full == "drop"
            self._abandon(
                item,
                ImpossibleRequest(
                    f"{self.name}: a batch of {nbytes} bytes; the edge holds {self.max_nbytes}"
                ),
            )
            return False
        if not self._senders and self._fits(nbytes):
            self._put(item, nbytes)
            return True
        if self._on_full == "drop":
            self._dropped_items += 1
            self._abandon(item, Dropped(f"{self.name} is full"))
            return False
        return None

    def receive_nowait(self) -> T | None:
        """Take the oldest batch; None where there is none now."""
        if not self._items:
            return None
        item, nbytes = self._items.popleft()
        self._nbytes -= nbytes
        self._passed = (self._passed[0] + 1, self._passed[1] + nbytes)
        self._admit_senders()
        return item

    def close(self) -> None:
        """Take no new batches. What is inside, and who waits to send, is still served."""
        self._closed = True
        self._wake()

    def abandon_all(self, error: OrbitError) -> None:
        """Close, and end every batch that nobody will receive."""
        self._closed = True
        self._abandoned_with = error
        while (item := self.receive_nowait()) is not None:
            self._abandon(item, error)
        self._admit_senders()
        self._wake()

    def wake_with(self, readable: asyncio.Future[None] | None) -> None:
        """Complete this future when there is something to receive, or the channel closes."""
        self._readable = readable

    def statistics(self) -> ChannelStatistics:
        """A snapshot."""
        return ChannelStatistics(
            self.name,
            len(self._items),
            self._nbytes,
            *self._peak,
            *self._passed,
            self._dropped_items,
            len(self._senders),
        )

    def _fits(self, nbytes: int) -> bool:
        return len(self._items) < self.max_items and self._nbytes + nbytes <= self.max_nbytes

    def _put(self, item: T, nbytes: int) -> None:
        if self._abandoned_with is not None:
            self._abandon(item, self._abandoned_with)
            return
        self._items.append((item, nbytes))
        self._nbytes += nbytes
        if self.watch is not None:
            self.watch.entered(self, item)
        self._peak = (max(self._peak[0], len(self._items)), max(self._peak[1], self._nbytes))
        self._wake()

    def _abandon(self, item: T, error: OrbitError) -> None:
        if self.watch is not None:
            self.watch.dropped(self, item, error)
        item.abandon(error)

    def _admit_senders(self) -> None:
        while self._senders:
            accepted, (item, nbytes) = next(iter(self._senders.items()))
            if accepted.cancelled():
                return  # its own task takes it back, and admits the next
            if not (self._fits(nbytes) or self._abandoned_with):
                return
            del self._senders[accepted]
            accepted.set_result(None)
            self._put(item, nbytes)

    def _wake(self) -> None:
        if self._readable is not None and not self._readable.done():
            self._readable.set_result(None)


class Inbox(Generic[T]):
    """All channels into one node, served in turn, until each is exhausted."""

    def __init__(self, channels: tuple[Channel[T], ...]) -> None:
        self.channels = channels
        self._next = 0

    def __aiter__(self) -> Inbox[T]:
        return self

    async def __anext__(self) -> T:
        while True:
            for step in range(len(self.channels)):
                index = (self._next + step) % len(self.channels)
                item = self.channels[index].receive_nowait()
                if item is not None:
                    self._next = (index + 1) % len(self.channels)
                    watch = self.channels[index].watch
                    if watch is not None:
                        watch.taken(self.channels[index], item)
                    return item
            if all(channel.exhausted for channel in self.channels):
                raise StopAsyncIteration
            readable: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            for channel in self.channels:
                channel.wake_with(readable)
            try:
                await readable
            finally:
                for channel in self.channels:
                    channel.wake_with(None)
