"""Ticket: ends once, when nothing of it is under way, and says of every page what became of it."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv.errors import Cancelled, OrbitError, StageFault
from orbitkv.stages.ticket import Failed, Outcome, Saved, Ticket
from tests.builders import WAIT_S, in_thread

A, B, C = b"a", b"b", b"c"


def save_ticket() -> Ticket:
    def conclude(done: tuple[bytes, ...], not_done: tuple[bytes, ...]) -> Outcome:
        return Saved(done, (), not_done)

    return Ticket(conclude)


def test_ticket_ends_only_when_it_is_sealed_and_every_part_is_settled() -> None:
    ticket = save_ticket()
    first, second = ticket.part((A,)), ticket.part((B,))
    first.settle(done=(A,))
    ticket.seal()
    assert not ticket.done
    second.settle(done=())
    assert ticket.result(0) == Saved((A,), (), (B,))


def test_ticket_without_parts_ends_when_it_is_sealed() -> None:
    ticket = save_ticket()
    assert not ticket.done
    ticket.seal()
    assert ticket.result(0) == Saved((), (), ())


def test_page_in_several_parts_is_done_only_if_every_part_says_so() -> None:
    ticket = save_ticket()
    attention, recurrent = ticket.part((A, B)), ticket.part((A, B))
    ticket.seal()
    attention.settle(done=(A, B))
    recurrent.settle(done=(B,))
    assert ticket.result(0) == Saved((B,), (), (A,))


def test_first_fault_is_the_outcome_but_only_after_the_last_part() -> None:
    ticket = save_ticket()
    first, second, third = (ticket.part((page,)) for page in (A, B, C))
    ticket.seal()
    fault = StageFault("first")
    second.fail(fault)
    assert not ticket.done, "its other parts are still under way"
    first.fail(OrbitError("second"))
    third.settle(done=(C,))
    assert ticket.result(0) == Failed(fault)


def test_part_is_settled_once_whatever_else_is_said_of_it() -> None:
    ticket = save_ticket()
    part, other = ticket.part((A,)), ticket.part((B,))
    ticket.seal()
    part.settle(done=(A,))
    part.settle(done=())
    part.fail(OrbitError("too late"))
    assert not ticket.done
    other.settle(done=(B,))
    assert ticket.result(0) == Saved((A, B), (), ())


def test_cancelled_ticket_still_waits_for_its_parts() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()
    ticket.cancel()
    assert ticket.cancelled
    assert not ticket.done
    part.settle(done=(A,))
    outcome = ticket.result(0)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)


def test_cancel_after_the_end_changes_nothing() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()
    part.settle(done=(A,))
    ticket.cancel()
    assert ticket.result(0) == Saved((A,), (), ())


def test_cancellation_reaches_a_loop_from_any_thread_and_at_once_if_it_was_before() -> None:
    ticket = save_ticket()

    async def wait() -> None:
        early = [ticket.cancellation() for _ in range(2)]
        await asyncio.sleep(0)
        assert not any(future.done() for future in early)
        in_thread(ticket.cancel)
        await asyncio.wait_for(asyncio.gather(*early), WAIT_S)
        ticket.cancel()
        await asyncio.wait_for(ticket.cancellation(), WAIT_S)

    asyncio.run(wait())
    assert ticket.cancelled


def test_result_that_is_not_there_in_time_is_a_timeout_and_the_ticket_goes_on() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()
    with pytest.raises(TimeoutError):
        ticket.result(0)
    part.settle(done=(A,))
    assert ticket.result(0) == Saved((A,), (), ())


def test_ticket_may_be_awaited_on_any_loop_and_more_than_once() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()

    async def wait() -> list[Outcome]:
        async def one() -> Outcome:
            return await ticket

        waiting = [asyncio.create_task(one()) for _ in range(3)]
        await asyncio.sleep(0)
        settling = in_thread(lambda: part.settle(done=(A,)))
        outcomes = await asyncio.gather(*waiting)
        settling.join()
        return outcomes

    assert asyncio.run(wait()) == [Saved((A,), (), ())] * 3
    assert ticket.result(0) == Saved((A,), (), ())


def test_waiter_that_is_cancelled_does_not_end_the_request() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()

    async def wait_and_leave() -> None:
        async def one() -> Outcome:
            return await ticket

        waiting = asyncio.create_task(one())
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(wait_and_leave())
    assert not ticket.done
    assert not ticket.cancelled
    part.settle(done=(A,))
    assert ticket.result(0) == Saved((A,), (), ())


def test_when_done_calls_at_the_end_or_at_once() -> None:
    ticket = save_ticket()
    calls: list[str] = []
    ticket.when_done(lambda: calls.append("before"))
    assert calls == []
    ticket.seal()
    ticket.when_done(lambda: calls.append("after"))
    assert calls == ["before", "after"]


def test_result_wakes_every_thread_that_waits() -> None:
    ticket = save_ticket()
    part = ticket.part((A,))
    ticket.seal()
    seen: list[Outcome] = []
    waiting = [in_thread(lambda: seen.append(ticket.result(WAIT_S))) for _ in range(4)]
    part.settle(done=(A,))
    for thread in waiting:
        thread.join(WAIT_S)
    assert seen == [Saved((A,), (), ())] * 4
    assert threading.active_count() >= 1


pages = st.sampled_from([A, B, C, b"d", b"e"])
parts = st.lists(st.tuples(st.lists(pages, unique=True), st.sets(pages), st.booleans()), max_size=6)


@given(parts=parts, order=st.randoms(use_true_random=False), seal_at=st.integers(0, 6))
def test_every_page_is_in_exactly_one_place_whatever_the_order(
    parts: list[tuple[list[bytes], set[bytes], bool]], order: object, seal_at: int
) -> None:
    ticket = save_ticket()
    opened = [(ticket.part(tuple(hashes)), hashes, done, fails) for hashes, done, fails in parts]
    order.shuffle(opened)  # type: ignore[attr-defined]
    for step, (part, hashes, done, fails) in enumerate(opened):
        if step == seal_at:
            ticket.seal()
        assert not ticket.done
        part.fail(OrbitError("x")) if fails else part.settle(done=done & set(hashes))
    if seal_at >= len(opened):
        assert not ticket.done
        ticket.seal()
    outcome = ticket.result(0)
    if any(fails for *_, fails in opened):
        assert isinstance(outcome, Failed)
        return
    assert isinstance(outcome, Saved)
    named = {page for hashes, *_ in parts for page in hashes}
    assert Counter(outcome.stored + outcome.dropped) == Counter(named)
    for page in named:
        everywhere = all(page in done for hashes, done, _ in parts if page in hashes)
        assert (page in outcome.stored) == everywhere
