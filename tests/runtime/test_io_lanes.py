"""The two I/O lanes keep one contract."""

import asyncio
import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.errors import Unavailable
from orbitkv.runtime import liburing, preadv, uring
from orbitkv.runtime.liburing import probe_io_uring
from orbitkv.runtime.preadv import Demand, PreadLane, Transfer
from orbitkv.runtime.uring import RingLane, open_io_lane

IoLane = RingLane | PreadLane
OpenLane = Callable[..., IoLane]

needs_ring = pytest.mark.skipif(probe_io_uring() is not None, reason=f"{probe_io_uring()}")


@pytest.fixture(params=[pytest.param(RingLane, marks=needs_ring), PreadLane])
def open_lane(request: pytest.FixtureRequest) -> OpenLane:
    lane_type: type[IoLane] = request.param
    return lambda depth, demand=None: lane_type("test", depth=depth, demand=demand)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    number = os.open(tmp_path / "extents", os.O_RDWR | os.O_CREAT)
    yield number
    os.close(number)


def random_bytes(nbytes: int) -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)


def aligned(nbytes: int) -> npt.NDArray[np.uint8]:
    room = np.zeros(nbytes + 4096, np.uint8)
    start = -room.ctypes.data % 4096
    return room[start : start + nbytes]


def count_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def in_flight_is(lane: IoLane, wanted: int) -> None:
    while lane.in_flight != wanted:  # noqa: ASYNC110  a lane has no such event
        await asyncio.sleep(0.001)


def test_what_was_written_is_read_back(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        source, target = random_bytes(5000), np.zeros(5000, np.uint8)
        async with open_lane(2) as lane:
            assert await lane.write(fd, source, 123) == 5000
            assert await lane.read(fd, target, 123) == 5000
        np.testing.assert_array_equal(source, target)

    asyncio.run(main())


def test_a_batch_gives_one_outcome_per_transfer_in_order(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        source, target = random_bytes(64 * 512), np.zeros(64 * 512, np.uint8)
        parts = [slice(i * 512, i * 512 + 512) for i in range(64)]
        writes = [Transfer(fd, source[part], part.start) for part in parts]
        reads = [Transfer(fd, target[part], part.start) for part in parts]
        reads[7] = Transfer(fd, np.zeros(10, np.uint8), 64 * 512 - 4)  # 4 bytes before the end
        reads[9] = Transfer(-1, np.zeros(10, np.uint8), 0)
        async with open_lane(3) as lane:
            assert await lane.write_many(writes) == [512] * 64
            outcomes = await lane.read_many(reads)
            assert await lane.read_many([]) == []
        refused = outcomes[9]
        assert isinstance(refused, OSError)
        assert refused.errno == errno.EBADF
        assert [*outcomes[:9], *outcomes[10:]] == [512] * 7 + [4] + [512] + [512] * 54
        target[parts[7]], target[parts[9]] = source[parts[7]], source[parts[9]]
        np.testing.assert_array_equal(source, target)

    asyncio.run(main())


@pytest.mark.parametrize("nbytes", [4096, 1 << 20], ids=["submitted inline", "by a kernel worker"])
@pytest.mark.parametrize("register", [False, True])
def test_o_direct_moves_aligned_bytes(
    open_lane: OpenLane, tmp_path: Path, nbytes: int, *, register: bool
) -> None:
    try:
        fd = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    except OSError as error:
        pytest.skip(f"no O_DIRECT in {tmp_path}: {error}")

    async def main() -> None:
        region = aligned(2 * nbytes)
        source, target = region[:nbytes], region[nbytes:]
        source[:] = random_bytes(nbytes)
        async with open_lane(4) as lane:
            if register and not await lane.register_buffers(region):
                assert lane.buffers_refused
            assert await lane.write(fd, source, 4096) == nbytes
            assert await lane.read(fd, target, 4096) == nbytes
            np.testing.assert_array_equal(source, target)
            with pytest.raises(OSError, match="at offset 1 of fd") as caught:
                await lane.read(fd, target, 1)
            assert caught.value.errno == errno.EINVAL

    asyncio.run(main())
    os.close(fd)


def test_read_only_memory_can_be_written_from_but_not_read_into(
    open_lane: OpenLane, fd: int
) -> None:
    async def main() -> None:
        frozen = np.frombuffer(b"orbit", np.uint8)
        target = np.zeros(5, np.uint8)
        async with open_lane(1) as lane:
            assert await lane.write(fd, frozen, 0) == 5
            assert await lane.read(fd, target, 0) == 5
            with pytest.raises(ValueError, match="read-only"):
                await lane.read(fd, frozen, 0)
        assert target.tobytes() == b"orbit"

    asyncio.run(main())


@pytest.mark.parametrize(
    ("buffer", "offset", "complaint"),
    [
        (np.zeros(4, np.uint16), 0, r"uint16\[4\], wanted contiguous uint8\[n\]"),
        (np.zeros((2, 2), np.uint8), 0, r"uint8\[2, 2\]"),
        (np.zeros(8, np.uint8)[::2], 0, r"wanted contiguous"),
        (np.zeros(0, np.uint8), 0, "0 bytes, wanted 1 to 1073741824"),
        (np.broadcast_to(np.zeros(1, np.uint8), (1,)), -1, "offset is -1"),
        (np.zeros(1, np.uint8), 1 << 63, "offset is 9223372036854775808"),
    ],
)
def test_transfers_no_lane_can_do_are_refused_before_any_is_submitted(
    open_lane: OpenLane, fd: int, buffer: npt.NDArray[np.uint8], offset: int, complaint: str
) -> None:
    async def main() -> None:
        async with open_lane(1) as lane:
            with pytest.raises(ValueError, match=complaint):
                await lane.write_many(
                    [Transfer(fd, random_bytes(9), 0), Transfer(fd, buffer, offset)]
                )
            assert lane.statistics().submitted == 0

    asyncio.run(main())
    assert os.fstat(fd).st_size == 0


def test_a_transfer_over_one_gib_is_refused_with_both_sizes(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        untouched = np.empty((1 << 30) + 1, np.uint8)
        async with open_lane(1) as lane:
            with pytest.raises(ValueError, match="1073741825 bytes, wanted 1 to 1073741824"):
                await lane.read(fd, untouched, 0)

    asyncio.run(main())


def test_in_flight_never_exceeds_depth(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        source = random_bytes(100 * 64)
        async with open_lane(3) as lane:
            writes = [lane.write(fd, source[i * 64 : i * 64 + 64], i * 64) for i in range(50)]
            rest = [Transfer(fd, source[i * 64 : i * 64 + 64], i * 64) for i in range(50, 100)]
            await asyncio.gather(lane.write_many(rest), *writes)
            statistics = lane.statistics()
        assert statistics.peak_in_flight == 3
        assert os.pread(fd, 6400, 0) == source.tobytes()

    asyncio.run(main())


def test_operations_start_in_the_order_of_their_calls(open_lane: OpenLane) -> None:
    async def main() -> None:
        started: list[int] = []
        async with open_lane(1) as lane:
            await asyncio.gather(*(lane.run(started.append, i) for i in range(20)))
        assert started == list(range(20))

    asyncio.run(main())


def test_statistics_count_what_was_moved_and_refused(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        async with open_lane(2) as lane:
            await lane.write(fd, random_bytes(1000), 0)
            assert await lane.read(fd, np.zeros(600, np.uint8), 500) == 500
            with pytest.raises(OSError, match="Bad file descriptor"):
                await lane.read(-1, np.zeros(1, np.uint8), 0)
            await lane.run(os.fsync, fd)
            with pytest.raises(ZeroDivisionError):
                await lane.run(divmod, 1, 0)
            assert lane.statistics() == preadv.LaneStatistics(
                submitted=5,
                completed=3,
                failed=2,
                in_flight=0,
                read_nbytes=500,
                written_nbytes=1000,
                peak_in_flight=1,
            )

    asyncio.run(main())


def test_a_refusal_carries_the_kernels_errno(open_lane: OpenLane, tmp_path: Path) -> None:
    async def main() -> None:
        closed = os.open(tmp_path / "closed", os.O_RDWR | os.O_CREAT)
        os.close(closed)
        full = os.open("/dev/full", os.O_WRONLY)
        async with open_lane(1) as lane:
            with pytest.raises(OSError, match="read of 8 bytes at offset 16 of fd") as caught:
                await lane.read(closed, np.zeros(8, np.uint8), 16)
            assert caught.value.errno == errno.EBADF
            with pytest.raises(OSError, match="No space left on device: write of 8") as caught:
                await lane.write(full, np.zeros(8, np.uint8), 0)
            assert caught.value.errno == errno.ENOSPC
        os.close(full)

    asyncio.run(main())


def test_a_read_past_the_end_is_short(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        os.pwrite(fd, b"12345", 0)
        async with open_lane(1) as lane:
            assert await lane.read(fd, np.zeros(8, np.uint8), 2) == 3
            assert await lane.read(fd, np.zeros(8, np.uint8), 5) == 0

    asyncio.run(main())


def test_cancel_waits_for_a_submitted_host_call(open_lane: OpenLane) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with open_lane(1) as lane:
            call = asyncio.create_task(lane.run(gate.wait))
            await in_flight_is(lane, 1)
            for _ in range(3):  # impatience does not help
                call.cancel()
                await turns()
                assert not call.done()
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert lane.in_flight == 0

    asyncio.run(main())


@needs_ring
def test_cancel_waits_until_the_kernel_has_filled_the_buffer() -> None:
    async def main() -> None:
        reader, writer = os.pipe()
        target = np.zeros(4, np.uint8)
        async with RingLane("test", depth=2) as lane:
            read = asyncio.create_task(lane.read(reader, target, 0))
            await in_flight_is(lane, 1)
            read.cancel()
            await turns()
            assert not read.done()
            os.write(writer, b"late")
            with pytest.raises(asyncio.CancelledError):
                await read
            assert target.tobytes() == b"late"
            assert lane.in_flight == 0
        os.close(reader)
        os.close(writer)

    asyncio.run(main())


def test_cancel_waits_until_preadv_has_returned(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()

    def gated_preadv(fd: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait()
        return os.readv(fd, buffers)

    monkeypatch.setattr(os, "preadv", gated_preadv)

    async def main() -> None:
        os.pwrite(fd, b"late", 0)
        target = np.zeros(4, np.uint8)
        async with PreadLane("test", depth=2) as lane:
            read = asyncio.create_task(lane.read(fd, target, 0))
            await in_flight_is(lane, 1)
            read.cancel()
            await turns()
            assert not read.done()
            gate.set()
            with pytest.raises(asyncio.CancelledError):
                await read
            assert target.tobytes() == b"late"
            assert lane.in_flight == 0

    asyncio.run(main())


def test_cancel_withdraws_what_is_queued(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        gate = threading.Event()
        async with open_lane(1) as lane:
            holder = asyncio.create_task(lane.run(gate.wait))
            await in_flight_is(lane, 1)
            queued = asyncio.create_task(lane.write(fd, random_bytes(100), 0))
            behind = asyncio.create_task(lane.write(fd, random_bytes(10), 0))
            await turns()
            queued.cancel()
            with pytest.raises(asyncio.CancelledError):
                await queued
            assert lane.in_flight == 1  # the holder: nobody waited for it
            gate.set()
            assert await behind == 10
            await holder
            assert lane.statistics().submitted == 2
        assert os.fstat(fd).st_size == 10

    asyncio.run(main())


@needs_ring
def test_cancel_of_a_batch_withdraws_its_queued_part_and_drains_the_rest() -> None:
    async def main() -> None:
        reader, writer = os.pipe()
        targets = [np.zeros(1, np.uint8) for _ in range(5)]
        async with RingLane("test", depth=2) as lane:
            batch = asyncio.create_task(
                lane.read_many([Transfer(reader, target, 0) for target in targets])
            )
            await in_flight_is(lane, 2)
            batch.cancel()
            await turns()
            assert not batch.done()
            os.write(writer, b"x")
            await in_flight_is(lane, 1)
            assert not batch.done()
            os.write(writer, b"y")
            with pytest.raises(asyncio.CancelledError):
                await batch
            assert lane.statistics().submitted == 2
        assert sorted(int(target[0]) for target in targets) == [0, 0, 0, ord("x"), ord("y")]
        os.close(reader)
        os.close(writer)

    asyncio.run(main())


def test_close_waits_for_what_is_queued_and_in_flight(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        gate = threading.Event()
        lane = open_lane(1)
        await lane.start()
        holder = asyncio.create_task(lane.run(gate.wait))
        queued = asyncio.create_task(lane.write(fd, random_bytes(7), 0))
        await in_flight_is(lane, 1)
        closes = [asyncio.create_task(lane.close()) for _ in range(2)]
        await turns()
        assert not any(close.done() for close in closes)
        with pytest.raises(RuntimeError, match="lane 'test' is closed"):
            await lane.read(fd, np.zeros(1, np.uint8), 0)
        closes[0].cancel()
        await turns()
        assert not closes[0].done()
        gate.set()
        assert await holder
        assert await queued == 7
        with pytest.raises(asyncio.CancelledError):
            await closes[0]
        await closes[1]
        await lane.close()
        assert lane.in_flight == 0

    asyncio.run(main())


def test_a_lane_is_started_once_and_before_use(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        lane = open_lane(1)
        with pytest.raises(RuntimeError, match="lane 'test' is not started"):
            await lane.read(fd, np.zeros(1, np.uint8), 0)
        await lane.start()
        with pytest.raises(RuntimeError, match="was started or closed before"):
            await lane.start()
        await lane.close()
        with pytest.raises(ValueError, match="depth is 0, wanted 1 or more"):
            open_lane(0)
        unused = open_lane(1)
        await unused.close()

    asyncio.run(main())


def test_a_closed_lane_leaves_no_descriptor_open(open_lane: OpenLane) -> None:
    async def main() -> int:
        before = count_descriptors()
        for _ in range(3):
            async with open_lane(4):
                pass
        return count_descriptors() - before

    assert asyncio.run(main()) == 0


@needs_ring
def test_transfers_wait_while_buffers_are_registered(fd: int) -> None:
    async def main() -> None:
        region = random_bytes(1 << 16)
        async with RingLane("test", depth=4) as lane:
            registered = asyncio.create_task(lane.register_buffers(region))
            write = asyncio.create_task(lane.write(fd, region[:100], 0))
            await turns(2)
            with pytest.raises(RuntimeError, match="register once, before the first transfer"):
                await lane.register_buffers(region)
            if not await registered:
                pytest.skip(f"{lane.buffers_refused}")
            assert await write == 100
            outside = random_bytes(64)
            assert await lane.write(fd, outside, 0) == 64
            assert os.pread(fd, 100, 0) == outside.tobytes() + region[64:100].tobytes()

    asyncio.run(main())


@needs_ring
def test_buffers_that_cannot_be_registered_are_done_without(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        region = random_bytes(1 << 16)
        async with RingLane("test", depth=1) as lane:
            monkeypatch.setattr(lane._liburing, "register_buffers", lambda *args: -errno.ENOMEM)
            assert not await lane.register_buffers(region)
            assert lane.buffers_refused == (
                "cannot register 65536 bytes: Cannot allocate memory,"
                " see RLIMIT_MEMLOCK (ulimit -l)"
            )
            assert await lane.write(fd, region, 0) == 1 << 16

    asyncio.run(main())


@needs_ring
def test_a_region_over_one_gib_is_registered_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        part_nbytes = 1 << 30
        region = np.zeros(part_nbytes + 8192, np.uint8)  # not touched, so it takes no memory
        async with RingLane("test", depth=1) as lane:
            seen: list[list[int]] = []

            def note_parts(ring: object, iovecs: list[liburing.IoVec], count: int) -> int:
                seen.append([iovecs[i].nbytes for i in range(count)])
                return -errno.ENOMEM

            monkeypatch.setattr(lane._liburing, "register_buffers", note_parts)
            assert not await lane.register_buffers(region)
            assert seen == [[part_nbytes, 8192]]

    asyncio.run(main())


@needs_ring
def test_a_submit_refused_for_good_comes_back_as_the_operations_error(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with RingLane("test", depth=4) as lane:
            with monkeypatch.context() as fault:
                fault.setattr(lane._liburing, "submit", lambda ring: -errno.ENXIO)
                outcomes = await lane.write_many([Transfer(fd, random_bytes(8), 0)] * 6)
            assert [getattr(outcome, "errno", None) for outcome in outcomes] == [errno.ENXIO] * 6
            assert await lane.write(fd, random_bytes(8), 0) == 8  # the ring is still in step

    asyncio.run(main())


@needs_ring
def test_a_submit_refused_for_a_moment_is_repeated(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main() -> None:
        async with RingLane("test", depth=4) as lane:
            submit = lane._liburing.submit
            refusals = [-errno.EAGAIN, -errno.EBUSY, 0]
            monkeypatch.setattr(
                lane._liburing, "submit", lambda ring: refusals.pop() if refusals else submit(ring)
            )
            assert await lane.write_many([Transfer(fd, random_bytes(8), 0)] * 6) == [8] * 6
            assert not refusals

    asyncio.run(main())


@needs_ring
def test_ring_indices_may_wrap(fd: int) -> None:
    async def main() -> None:
        async with RingLane("test", depth=3) as lane:
            for turn in range(50):
                assert await lane.write_many([Transfer(fd, random_bytes(8), turn)] * 5) == [8] * 5

    asyncio.run(main())


def test_a_missing_library_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liburing, "SONAME", "libabsent.so.2")
    reason = probe_io_uring()
    assert reason is not None
    assert "cannot load libabsent.so.2" in reason
    assert "install liburing2" in reason


@needs_ring
@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EPERM, "not permitted"),
        (errno.ENOSYS, "no io_uring"),
        (errno.ENOMEM, "RLIMIT_MEMLOCK"),
        (errno.EMFILE, "Too many open files"),
    ],
)
def test_a_kernel_that_refuses_is_explained_in_words(
    monkeypatch: pytest.MonkeyPatch, number: int, words: str
) -> None:
    class RefusedLiburing(liburing.Liburing):
        def __init__(self) -> None:
            super().__init__()
            monkeypatch.setattr(self, "queue_init", lambda *args: -number)

    monkeypatch.setattr(liburing, "Liburing", RefusedLiburing)
    monkeypatch.setattr(uring, "Liburing", RefusedLiburing)
    reason = probe_io_uring()
    assert reason is not None
    assert words in reason
    with pytest.raises(OSError, match=words) as caught:
        asyncio.run(RingLane("test", depth=1).start())
    assert caught.value.errno == number


def test_uring_asked_for_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liburing, "SONAME", "libabsent.so.2")
    events: list[str] = []
    with pytest.raises(Unavailable, match=r"cannot load libabsent\.so\.2"):
        open_io_lane("u", depth=1, backend="uring", log=lambda event, **_: events.append(event))
    assert events == []


def test_auto_falls_back_to_threads_and_says_so_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liburing, "SONAME", "libabsent.so.2")
    events: list[tuple[str, dict[str, str]]] = []
    lane = open_io_lane(
        "u", depth=1, backend="auto", log=lambda event, **fields: events.append((event, fields))
    )
    assert lane.backend == "preadv"
    ((event, fields),) = events
    assert event == "io_uring_unavailable"
    assert fields["lane"] == "u"
    assert "install liburing2" in fields["reason"]
    assert fields["instead"] == "preadv"


@needs_ring
def test_auto_takes_io_uring_where_it_can_be_had() -> None:
    events: list[str] = []
    lane = open_io_lane("u", depth=1, backend="auto", log=lambda event, **_: events.append(event))
    assert lane.backend == "io_uring"
    assert events == []


def test_preadv_asked_for_does_not_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liburing, "SONAME", "libabsent.so.2")
    lane = open_io_lane("u", depth=1, backend="preadv", log=pytest.fail)
    assert lane.backend == "preadv"


# Demand before writeback -----------------------------------------------------------------------


def test_writes_go_one_at_a_time_while_reads_are_awaited_and_none_is_starved(
    open_lane: OpenLane, fd: int
) -> None:
    async def main() -> None:
        demand = Demand()
        async with open_lane(4, demand) as lane:
            with demand:
                writes = [Transfer(fd, random_bytes(512), 512 * at) for at in range(20)]
                assert await lane.write_many(writes) == [512] * 20
            assert lane.statistics().peak_in_flight == 1

    asyncio.run(main())


def test_reads_are_held_back_by_no_reads(open_lane: OpenLane, fd: int) -> None:
    async def main() -> None:
        os.ftruncate(fd, 512 * 8)
        demand = Demand()
        async with open_lane(4, demand) as lane:
            with demand:
                reads = [Transfer(fd, np.zeros(512, np.uint8), 512 * at) for at in range(8)]
                assert await lane.read_many(reads) == [512] * 8
            assert lane.statistics().peak_in_flight == 4

    asyncio.run(main())


def test_writes_fill_the_depth_again_once_the_last_read_has_ended(
    fd: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    write = os.pwritev

    def gated_pwritev(fd: int, buffers: list[memoryview], offset: int) -> int:
        gate.wait()
        return write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", gated_pwritev)

    async def main() -> None:
        demand = Demand()
        async with PreadLane("test", depth=4, demand=demand) as lane:
            seen = []
            with demand:
                with demand:
                    transfers = [Transfer(fd, random_bytes(8), 8 * at) for at in range(9)]
                    writes = asyncio.create_task(lane.write_many(transfers))
                    await turns()
                    seen.append(lane.in_flight)
                await turns()
                seen.append(lane.in_flight)  # one of two reads is still awaited
            await turns()
            seen.append(lane.in_flight)
            gate.set()
            assert await writes == [8] * 9
            assert seen == [1, 1, 4]

    asyncio.run(main())


@needs_ring
def test_lanes_that_share_demand_hold_writes_back_for_each_others_reads(fd: int) -> None:
    """A read that hangs in the kernel, another that is queued behind it, then neither."""

    async def main() -> None:
        demand = Demand()
        reader, writer = os.pipe()
        target = np.zeros(1, np.uint8)
        reading = RingLane("read", depth=1, demand=demand)
        writing = RingLane("write", depth=4, demand=demand)
        async with reading, writing:
            reads = [
                asyncio.create_task(reading.read(reader, target, 0)),
                asyncio.create_task(reading.read(reader, target, 0)),
            ]
            await in_flight_is(reading, 1)
            transfers = [Transfer(fd, random_bytes(8), 8 * at) for at in range(9)]
            assert await writing.write_many(transfers) == [8] * 9
            assert writing.statistics().peak_in_flight == 1
            reads[1].cancel()
            os.write(writer, b"x")
            assert await reads[0] == 1
            with pytest.raises(asyncio.CancelledError):
                await reads[1]
            assert not demand.is_waiting
            assert await writing.write_many(transfers) == [8] * 9
            assert writing.statistics().peak_in_flight == 4
        os.close(reader)
        os.close(writer)

    asyncio.run(main())


def test_refused_reads_and_strange_ones_are_not_awaited_any_more(
    open_lane: OpenLane, fd: int
) -> None:
    async def main() -> None:
        demand = Demand()
        async with open_lane(2, demand) as lane:
            with pytest.raises(OSError, match="Bad file descriptor"):
                await lane.read(-1, np.zeros(1, np.uint8), 0)
            with pytest.raises(ValueError, match="offset is -1"):
                await lane.read(fd, np.zeros(1, np.uint8), -1)
            assert not demand.is_waiting

    asyncio.run(main())
