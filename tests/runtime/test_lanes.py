"""The host lane: in order, off the loop, and never left before the work has ended."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref

import pytest

from orbitkv.runtime.lanes import HostLane, Submitted, drained
from tests.builders import WAIT_S, Gate


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def started(name: str = "host:test") -> HostLane:
    lane = HostLane(name)
    await lane.start()
    return lane


def test_work_runs_in_order_on_one_thread_that_is_not_the_loops() -> None:
    async def scenario() -> None:
        lane = await started()
        seen: list[tuple[int, int]] = []

        def work(number: int) -> int:
            seen.append((number, threading.get_ident()))
            return number * number

        results = await asyncio.gather(*(lane.run(work, number) for number in range(20)))
        assert results == [number * number for number in range(20)]
        assert [number for number, _ in seen] == list(range(20))
        threads = {thread for _, thread in seen}
        assert len(threads) == 1
        assert threading.get_ident() not in threads
        await lane.close()

    asyncio.run(scenario())


def test_arguments_pass_and_an_exception_comes_back() -> None:
    async def scenario() -> None:
        lane = await started()
        assert await lane.run(int, "ff", base=16) == 255
        with pytest.raises(ZeroDivisionError):
            await lane.run(lambda: 1 // 0)
        assert await lane.run(lambda: "still serving") == "still serving"
        await lane.close()

    asyncio.run(scenario())


def test_work_that_raises_stop_iteration_ends_its_caller_with_an_error() -> None:
    """A future refuses it, so a plain hand-over would leave the caller waiting for ever."""

    async def scenario() -> None:
        lane = await started()
        waiting = asyncio.create_task(lane.run(next, iter(())))
        await asyncio.sleep(0)
        await lane.run(lambda: None)  # the lane has ended what was submitted before this
        await settle()
        ended = waiting.done()
        if not ended:
            waiting.get_coro().close()  # else even the end of the loop would wait for it
        assert ended, "the caller of work that has ended still waits"
        assert waiting.exception() is not None
        await lane.close()

    asyncio.run(scenario())


def test_cancelled_caller_waits_for_the_end_of_submitted_work() -> None:
    async def scenario() -> None:
        lane = await started()
        gate = Gate()
        done: list[str] = []

        def work() -> None:
            gate.pass_through()
            done.append("work")

        caller = asyncio.create_task(lane.run(work))
        await asyncio.to_thread(gate.await_arrival)
        for _ in range(3):  # once more does not help
            caller.cancel()
            await settle()
            assert not caller.done(), "left while the work was under way"
        gate.open()
        with pytest.raises(asyncio.CancelledError):
            await caller
        assert done == ["work"]
        await lane.close()

    asyncio.run(scenario())


def test_drained_gives_results_and_errors_and_a_cancellation_only_afterwards() -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        good, bad, late = (Submitted(loop=loop) for _ in range(3))
        good.set_result(7)
        assert await drained(good) == 7
        bad.set_exception(OSError("EIO"))
        with pytest.raises(OSError, match="EIO"):
            await drained(bad)
        waiting = asyncio.create_task(drained(late))
        await settle()
        waiting.cancel()
        await settle()
        late.set_exception(OSError("EIO"))
        await settle()
        assert waiting.cancelled()

    asyncio.run(scenario())


def test_reached_waits_for_the_event_in_its_turn() -> None:
    async def scenario() -> None:
        lane = await started()
        event = threading.Event()
        reached = asyncio.create_task(lane.reached(event))
        after = asyncio.create_task(lane.run(event.is_set))
        await settle()
        assert not reached.done()
        assert not after.done(), "work overtook the event that stands before it"
        event.set()
        await reached
        assert await after
        await lane.close()

    asyncio.run(scenario())


def test_close_waits_for_what_was_submitted_and_may_be_called_again() -> None:
    async def scenario() -> None:
        lane = await started()
        gate = Gate()
        submitted = asyncio.create_task(lane.run(gate.pass_through))
        await asyncio.to_thread(gate.await_arrival)
        closing = asyncio.create_task(lane.close())
        await settle()
        assert not closing.done()
        gate.open()
        await closing
        await submitted
        await lane.close()

    asyncio.run(scenario())


def test_closed_lane_refuses_work_instead_of_keeping_its_caller_for_ever() -> None:
    async def scenario() -> None:
        lane = await started()
        await lane.close()
        late = asyncio.create_task(lane.run(lambda: None))
        await settle()
        ended = late.done()
        if not ended:
            late.get_coro().close()
        assert ended
        assert isinstance(late.exception(), RuntimeError)

    asyncio.run(scenario())


def test_idle_lane_keeps_no_batch_alive() -> None:
    class Batch:
        pass

    async def scenario() -> None:
        lane = await started()
        batch = Batch()
        kept = weakref.ref(batch)
        await lane.run(id, batch)
        del batch
        # The lane's thread forgets it right after it has handed the result over.
        deadline = asyncio.get_running_loop().time() + WAIT_S
        while kept() is not None and asyncio.get_running_loop().time() < deadline:
            gc.collect()
            await asyncio.sleep(0)
        assert kept() is None
        await lane.close()

    asyncio.run(scenario())
