"""Channel and Inbox: nothing lost, nothing twice, never above a bound, first in first out."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv.errors import Cancelled, Closed, Dropped, ImpossibleRequest, OrbitError
from orbitkv.graph import OnFull
from orbitkv.runtime.channel import Channel, Inbox

MAX_ITEMS = 2
MAX_NBYTES = 10


class Item:
    """Knows how it ended."""

    def __init__(self, name: object, nbytes: int = 1) -> None:
        self.name = name
        self.nbytes = nbytes
        self.abandoned_with: list[OrbitError] = []
        self.received = 0

    def abandon(self, error: OrbitError) -> None:
        self.abandoned_with.append(error)

    def __repr__(self) -> str:
        return f"{self.name}:{self.nbytes}"


def opened(
    on_full: OnFull = "wait", *, max_items: int = MAX_ITEMS, name: str = "a > b"
) -> Channel[Item]:
    return Channel(name, max_items=max_items, max_nbytes=MAX_NBYTES, on_full=on_full)


async def settle(ticks: int = 12) -> None:
    for _ in range(ticks):
        await asyncio.sleep(0)


async def consume(channels: Sequence[Channel[Item]], into: list[Item]) -> None:
    async for item in Inbox(tuple(channels)):
        item.received += 1
        into.append(item)


def test_sender_waits_for_items_and_for_bytes() -> None:
    async def scenario() -> None:
        for nbytes in (1, 6):  # the third item, or the second six bytes, is too much
            channel = opened()
            filling = 2 if nbytes == 1 else 1
            for index in range(filling):
                assert await channel.send(Item(index, nbytes))
            waiting = asyncio.create_task(channel.send(Item("late", nbytes)))
            await settle()
            assert not waiting.done()
            assert channel.statistics().senders_waiting == 1
            assert channel.receive_nowait()
            assert await waiting

    asyncio.run(scenario())


def test_batch_above_the_byte_bound_is_refused_at_once_even_by_an_empty_channel() -> None:
    async def scenario() -> None:
        channel = opened()
        item = Item("large", MAX_NBYTES + 1)
        assert not await channel.send(item)
        (error,) = item.abandoned_with
        assert isinstance(error, ImpossibleRequest)
        assert str(error) == "a > b: a batch of 11 bytes; the edge holds 10"
        assert channel.statistics().dropped_items == 0, "a refusal on a wait edge is no drop"

    asyncio.run(scenario())


def test_full_drop_channel_abandons_counts_and_never_waits() -> None:
    async def scenario() -> None:
        channel = opened("drop")
        items = [Item(index) for index in range(4)]
        assert [await channel.send(item) for item in items] == [True, True, False, False]
        assert [type(error) for item in items for error in item.abandoned_with] == [Dropped] * 2
        statistics = channel.statistics()
        assert (statistics.items, statistics.dropped_items) == (2, 2)
        assert channel.receive_nowait() is items[0]
        assert await channel.send(items[2]), "what was dropped may be sent again"

    asyncio.run(scenario())


def test_small_batch_does_not_overtake_a_large_one_that_waits() -> None:
    async def scenario() -> None:
        channel = opened()
        await channel.send(Item("held", 5))
        large = asyncio.create_task(channel.send(Item("large", 9)))
        await settle()
        small = asyncio.create_task(channel.send(Item("small", 1)))
        await settle()
        assert not small.done()
        received: list[Item] = []
        consumer = asyncio.create_task(consume([channel], received))
        await asyncio.gather(large, small)
        channel.close()
        await consumer
        assert [item.name for item in received] == ["held", "large", "small"]

    asyncio.run(scenario())


def test_closed_channel_serves_what_is_inside_and_who_waits() -> None:
    async def scenario() -> None:
        channel = opened()
        items = [Item(index) for index in range(4)]
        senders = [asyncio.create_task(channel.send(item)) for item in items]
        await settle()
        channel.close()
        late = Item("late")
        assert not await channel.send(late)
        assert isinstance(late.abandoned_with[0], Closed)
        received: list[Item] = []
        await consume([channel], received)
        assert received == items
        assert all([await sender for sender in senders])
        assert channel.exhausted

    asyncio.run(scenario())


def test_abandoned_channel_ends_every_batch_with_the_reason_once() -> None:
    async def scenario() -> None:
        channel = opened()
        items = [Item(index) for index in range(5)]
        senders = [asyncio.create_task(channel.send(item)) for item in items]
        await settle()
        reason = Cancelled("enough")
        channel.abandon_all(reason)
        await asyncio.gather(*senders)
        late = Item("late")
        await channel.send(late)
        assert [item.abandoned_with for item in (*items, late)] == [[reason]] * 6
        assert channel.exhausted
        assert (channel.statistics().items, channel.statistics().nbytes) == (0, 0)

    asyncio.run(scenario())


def test_sender_that_is_cancelled_abandons_its_batch_and_lets_the_next_go() -> None:
    async def scenario() -> None:
        channel = opened()
        await channel.send(Item("held", 5))
        first, second = Item("first", 9), Item("second", 1)
        cancelled = asyncio.create_task(channel.send(first))
        waiting = asyncio.create_task(channel.send(second))
        await settle()
        cancelled.cancel()
        await settle()
        assert isinstance(first.abandoned_with[0], Cancelled)
        assert waiting.done()
        assert [channel.receive_nowait().name for _ in range(2)] == ["held", "second"]  # type: ignore[union-attr]

    asyncio.run(scenario())


def test_sender_cancelled_after_its_batch_was_taken_does_not_abandon_it() -> None:
    async def scenario() -> None:
        channel = opened(max_items=1)
        await channel.send(Item("held"))
        item = Item("late")
        sender = asyncio.create_task(channel.send(item))
        await settle()
        channel.receive_nowait()  # makes room: the batch is in
        sender.cancel()
        await settle()
        assert sender.cancelled()
        assert channel.receive_nowait() is item
        assert item.abandoned_with == []

    asyncio.run(scenario())


def test_consumer_ends_when_the_last_sender_of_a_closed_channel_is_cancelled() -> None:
    """It takes the last batch and waits in the very tick in which the sender goes."""

    async def scenario() -> None:
        channel = opened(max_items=1)
        await channel.send(Item("held"))
        sender = asyncio.create_task(channel.send(Item("late")))
        await settle()
        channel.close()
        received: list[Item] = []
        consumer = asyncio.create_task(consume([channel], received))
        sender.cancel()
        await settle()
        assert [item.name for item in received] == ["held"]
        assert channel.exhausted
        assert consumer.done(), "the consumer waits for a channel that is exhausted"

    asyncio.run(scenario())


def test_inbox_is_fair_over_its_channels() -> None:
    async def scenario() -> None:
        left, right = opened(max_items=4), opened(max_items=4)
        for index in range(3):
            await left.send(Item(f"left {index}"))
        for index in range(2):
            await right.send(Item(f"right {index}"))
        left.close()
        right.close()
        received: list[Item] = []
        await consume([left, right], received)
        assert [item.name for item in received] == [
            "left 0",
            "right 0",
            "left 1",
            "right 1",
            "left 2",
        ]

    asyncio.run(scenario())


def test_inbox_wakes_for_any_of_its_channels_and_ends_with_the_last() -> None:
    async def scenario() -> None:
        channels = [opened(), opened(), opened()]
        received: list[Item] = []
        consumer = asyncio.create_task(consume(channels, received))
        for channel in reversed(channels):
            await settle()
            await channel.send(Item("x"))
            await settle()
            channel.close()
        await settle()
        assert consumer.done()
        assert len(received) == 3

    asyncio.run(scenario())


def test_inbox_without_channels_ends_at_once() -> None:
    received: list[Item] = []
    asyncio.run(consume([], received))
    assert received == []


def test_cancelled_consumer_leaves_the_batches_to_the_next() -> None:
    async def scenario() -> None:
        channel = opened()
        received: list[Item] = []
        first = asyncio.create_task(consume([channel], received))
        await settle()
        first.cancel()
        await settle()
        await channel.send(Item("x"))
        second = asyncio.create_task(consume([channel], received))
        channel.close()
        await second
        assert [item.name for item in received] == ["x"]

    asyncio.run(scenario())


class Interleaving:
    """One channel, what was done to it, and what must hold whatever that was."""

    def __init__(self, on_full: OnFull) -> None:
        self.channel = opened(on_full)
        self.items: list[Item] = []
        self.senders: list[asyncio.Task[bool]] = []
        self.received: list[Item] = []
        self.consumer: asyncio.Task[None] | None = None
        self.peak = (0, 0)

    async def apply(self, name: str, number: int) -> None:
        if name == "send":
            self.items.append(Item(len(self.items), number))
            self.senders.append(asyncio.create_task(self.channel.send(self.items[-1])))
        elif name == "receive" and self.consumer is None:
            if item := self.channel.receive_nowait():
                item.received += 1
                self.received.append(item)
        elif name == "cancel" and self.senders:
            self.senders[number % len(self.senders)].cancel()
        elif name == "close":
            self.channel.close()
        elif name == "abandon all":
            self.channel.abandon_all(Closed("end"))
        elif name == "tick":
            await settle(number)

    def consume(self) -> None:
        if self.consumer is None:
            self.consumer = asyncio.create_task(consume([self.channel], self.received))

    def check_bounds(self) -> None:
        now = self.channel.statistics()
        assert now.items <= MAX_ITEMS
        assert now.nbytes <= MAX_NBYTES
        self.peak = max(self.peak[0], now.items), max(self.peak[1], now.nbytes)
        assert now.peak_items >= self.peak[0]
        assert now.peak_nbytes >= self.peak[1]

    def check_rest(self) -> None:
        """The first sender waits only for want of room."""
        now = self.channel.statistics()
        pairs = zip(self.items, self.senders, strict=True)
        waiting = [item for item, sender in pairs if not sender.done()]
        assert now.senders_waiting == len(waiting)
        if waiting and self.consumer is None:
            has_room = now.items < MAX_ITEMS and now.nbytes + waiting[0].nbytes <= MAX_NBYTES
            assert not has_room, "room, and yet the first waits"

    def check_end(self) -> None:
        assert self.consumer is not None
        assert self.consumer.done(), "the consumer waits for a channel that has ended"
        assert all(sender.done() for sender in self.senders), "a sender waits for ever"
        for item, sender in zip(self.items, self.senders, strict=True):
            ends = item.received + len(item.abandoned_with)
            assert ends == 1 or (ends == 0 and sender.cancelled()), item  # it never began
        names = [item.name for item in self.received]
        assert names == sorted(names), "not first in, first out"

    def check_counts(self, on_full: OnFull, *, abandoned: bool) -> None:
        ended = self.channel.statistics()
        assert (ended.items, ended.nbytes, ended.senders_waiting) == (0, 0, 0)
        reasons = [error for item in self.items for error in item.abandoned_with]
        dropped = [error for error in reasons if isinstance(error, Dropped | ImpossibleRequest)]
        assert ended.dropped_items == (len(dropped) if on_full == "drop" else 0)
        if not abandoned:
            assert ended.passed_items == len(self.received)
            assert ended.passed_nbytes == sum(item.nbytes for item in self.received)


operation = st.one_of(
    st.tuples(st.just("send"), st.integers(0, MAX_NBYTES + 2)),
    st.tuples(st.just("receive"), st.just(0)),
    st.tuples(st.just("cancel"), st.integers(0, 30)),
    st.tuples(st.just("tick"), st.integers(1, 3)),
)


@pytest.mark.parametrize("on_full", ["wait", "drop"])
@settings(max_examples=250, deadline=None)
@given(
    before=st.lists(operation, max_size=30),
    ending=st.sampled_from(["close", "abandon all"]),
    after=st.lists(operation, max_size=10),
    consumer_at=st.integers(0, 45),
)
def test_any_interleaving_loses_and_doubles_nothing(
    on_full: OnFull,
    before: list[tuple[str, int]],
    ending: str,
    after: list[tuple[str, int]],
    consumer_at: int,
) -> None:
    async def scenario() -> None:
        run = Interleaving(on_full)
        for step, (name, number) in enumerate([*before, (ending, 0), *after]):
            if step == consumer_at:
                run.consume()
            await run.apply(name, number)
            run.check_bounds()
        await settle()
        run.check_bounds()
        run.check_rest()
        run.consume()
        await settle(60)
        run.check_end()
        run.check_counts(on_full, abandoned=ending == "abandon all")

    asyncio.run(scenario())
