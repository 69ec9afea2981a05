"""The wire: messages, their frames, and what is no message."""

from __future__ import annotations

import asyncio
import inspect
import os
import random
import resource
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv import Client, errors
from orbitkv.errors import GeometryError, OrbitError, ProtocolError, SessionLost
from orbitkv.runtime import wire
from orbitkv.runtime.connection import Connection
from orbitkv.runtime.core import Flushed
from orbitkv.runtime.trace import TraceTotals
from orbitkv.stages.ticket import Failed, Miss, Restored, Saved, Warmed
from tests.builders import WAIT_S, Engine, model, numbered, page_hash, toy_geometry
from tests.serving import Served, descriptors, raw_session

HASHES = tuple(page_hash(i) for i in range(3))
MESSAGES: tuple[wire.Request | wire.Reply, ...] = (
    wire.Hello(1, wire.VERSION),
    wire.Ping(2),
    wire.Register(
        3,
        toy_geometry(),
        model(),
        (wire.Memory("shared", 4096), wire.Memory("cuda", 2**40, bytes(64), "0000:01:00.0")),
        (wire.Tensor("k0", 0, 64, (8, 2, 4, 8), (512, 128, 16, 2)),),
    ),
    wire.Unregister(4, 2**40),
    wire.Publish(5, 2**40, HASHES, (2, 0, 1), bytes(64)),
    wire.Query(6, 2**40, HASHES),
    wire.Prepare(13, 2**40, HASHES, 14),
    wire.Warm(15, 2**40, HASHES),
    wire.Release(7, 2**40),
    wire.Restore(8, 2**40, HASHES, (2, 0, 1)),
    wire.Cancel(9),
    wire.Flush(10, True),  # noqa: FBT003 - a message
    wire.GetStatus(11),
    wire.GetLeaks(12),
    wire.BeginTrace(16, True, False),  # noqa: FBT003 - a message
    wire.EndTrace(17),
    wire.Welcome(1, wire.VERSION, 2**31 - 1, 4711, 1024, 16_384, 60.0),
    wire.Done(2),
    wire.Refused(3, wire.Fault("GeometryError", "a; b", ("a", "b"))),
    wire.Registered(4, 2**40, "orbitkv:v2:00"),
    wire.Leased(5, 2**40, 3, {"dram": 2, "ssd": 1}),
    wire.Ended(6, "saved", HASHES[:1], HASHES[1:2], HASHES[2:]),
    wire.FlushEnded(7, Flushed(1, 4096)),
    wire.TraceEnded(9, TraceTotals(100, 1, "")),
    wire.Leaks(8, ("pool: 1 waiting",)),
)
REQUESTS = tuple(m for m in MESSAGES if isinstance(m, wire.Request))


def decode(message: wire.Request | wire.Reply) -> object:
    decoder = wire.REQUESTS if isinstance(message, wire.Request) else wire.REPLIES
    return decoder.decode(bytes(wire.encode(message))[4:])


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    daemon = Served(tmp_path / "s")
    yield daemon
    assert daemon.rest() == []
    assert daemon.stop()


def run(
    work: Callable[[Connection[Any], socket.socket], Awaitable[None]], **bounds: object
) -> None:
    """Run with a connection that receives requests, and the bare socket at its other end."""

    async def main() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        theirs.setblocking(False)  # noqa: FBT003 - the socket module's own signature
        with theirs:
            connection: Connection[Any] = Connection(ours, wire.REQUESTS, **bounds)
            try:
                async with asyncio.timeout(WAIT_S):
                    await work(connection, theirs)
            finally:
                connection.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


# Messages --------------------------------------------------------------------------------------


def test_every_kind_of_message_is_tried_here() -> None:
    kinds = {*wire.AnyRequest.__args__, *wire.AnyReply.__args__} - {wire.Status}
    assert {type(message) for message in MESSAGES} == kinds


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_crosses_unchanged(message: wire.Request | wire.Reply) -> None:
    assert decode(message) == message


def test_a_field_that_a_later_version_adds_is_passed_over() -> None:
    later = msgspec.msgpack.encode(["query", 6, 1, [b"x"], "something new"])
    assert wire.REQUESTS.decode(later) == wire.Query(6, 1, (b"x",))


@pytest.mark.parametrize(
    "kind",
    [k for _, k in inspect.getmembers(errors, inspect.isclass) if issubclass(k, OrbitError)],
    ids=lambda k: k.__name__,
)
def test_error_crosses_in_its_class_and_words(kind: type[OrbitError]) -> None:
    made = kind(("a", "b")) if kind is GeometryError else kind.__new__(kind, "seen; accepted")
    crossed = wire.error_of(decode(wire.Refused(1, wire.fault_of(made))).fault)
    assert (type(crossed), str(crossed)) == (kind, str(made))
    if isinstance(crossed, GeometryError):
        assert crossed.faults == ("a", "b")


def test_error_of_a_class_that_is_not_known_here_is_an_orbit_error() -> None:
    crossed = wire.error_of(wire.Fault("annotations", "of another version"))
    assert (type(crossed), str(crossed)) == (OrbitError, "of another version")


@pytest.mark.parametrize(
    "outcome",
    [
        Saved(*((h,) for h in HASHES)),
        Restored(HASHES[:1], HASHES[1:]),
        Miss(HASHES),
        Warmed(HASHES[:1], HASHES[1:]),
    ],
    ids=lambda o: type(o).__name__,
)
def test_outcome_crosses_unchanged(outcome: Saved | Restored | Miss | Warmed) -> None:
    ended = decode(wire.ended_of(1, outcome))
    assert wire.outcome_of(ended, None) == outcome


def test_failed_outcome_crosses_as_its_error() -> None:
    refused = decode(wire.ended_of(1, Failed(errors.ImpossibleRequest("too much"))))
    assert isinstance(wire.error_of(refused.fault), errors.ImpossibleRequest)


# Frames ----------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(1, 400), min_size=1, max_size=12))
def test_messages_are_put_together_however_they_are_cut(cuts: list[int]) -> None:
    stream = b"".join(bytes(wire.encode(message)) for message in REQUESTS)

    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        sent, received = 0, []
        for step in range(len(stream)):
            if sent == len(stream):
                break
            more = stream[sent : sent + cuts[step % len(cuts)]]
            peer.send(more)
            sent += len(more)
            await asyncio.sleep(0)
        while len(received) < len(REQUESTS):
            received.append(await connection.receive())
        assert tuple(received) == REQUESTS

    run(work)


def test_a_message_over_the_limit_is_not_sent() -> None:
    message = wire.Query(1, 1, (bytes(wire.MAX_MESSAGE_NBYTES),))
    with pytest.raises(ProtocolError, match=r"message of \d+ bytes; accepted: 4194304"):
        wire.encode(message)


def test_a_message_over_the_limit_is_refused_before_it_has_come() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        peer.send(struct.pack("<I", wire.MAX_MESSAGE_NBYTES + 1))
        with pytest.raises(ProtocolError, match="4194305 bytes; accepted: 4194304"):
            await connection.receive()

    run(work)


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x93\xa5query\x01", b"\x92\xa4nope\x01"])
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        peer.send(struct.pack("<I", len(payload)) + payload)
        with pytest.raises(ProtocolError, match="cannot be read"):
            await connection.receive()

    run(work)


def test_half_a_message_is_told_from_an_end() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        peer.send(wire.encode(wire.Ping(1))[:-1])
        peer.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError, match="in the middle of a message"):
            await connection.receive()

    run(work)


def test_half_a_message_has_a_deadline() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        peer.send(wire.encode(wire.Ping(1)) + b"\x08")
        assert await connection.receive() == wire.Ping(1)
        with pytest.raises(ProtocolError, match=r"half a message.*0\.05 s"):
            await connection.receive()

    run(work, message_s=0.05)


def test_slow_messages_of_one_session_have_a_deadline_each() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        frame = bytes(wire.encode(wire.Ping(1)))
        for _ in range(4):
            peer.send(frame[:3])
            await asyncio.sleep(0.06)
            peer.send(frame[3:])
            assert await connection.receive() == wire.Ping(1)

    run(work, message_s=0.1)


def test_what_was_sent_before_the_end_is_received() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        peer.send(wire.encode(wire.Ping(1)) + wire.encode(wire.Ping(2)))
        peer.close()
        assert [await connection.receive() for _ in range(3)] == [wire.Ping(1), wire.Ping(2), None]

    run(work)


def test_a_peer_that_does_not_read_is_left_behind_at_a_bound() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        leaks = wire.Leaks(1, ("x" * 10_000,))

        def send_all() -> None:
            for _ in range(1000):
                connection.send(leaks)

        with pytest.raises(SessionLost, match="unread"):
            send_all()
        assert connection.ended is not None

    run(work, max_unsent_nbytes=100_000)


def test_what_waited_for_the_peer_to_read_comes_whole() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        sent = [wire.Leaks(n, ("x" * 50_000,)) for n in range(1, 40)]
        for message in sent:
            connection.send(message)
        loop, stream = asyncio.get_running_loop(), b""
        whole = b"".join(bytes(wire.encode(message)) for message in sent)
        while len(stream) < len(whole):
            stream += await loop.sock_recv(peer, 2**20)
        assert stream == whole

    run(work)


def test_descriptors_travel_beside_their_message() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        files = [os.memfd_create("test") for _ in range(3)]
        inodes = [os.fstat(file).st_ino for file in files]
        socket.send_fds(peer, [wire.encode(wire.Ping(1))], files)
        assert await connection.receive() == wire.Ping(1)
        taken = connection.take_descriptors(2)
        assert [os.fstat(file).st_ino for file in taken] == inodes[:2]
        assert not os.get_inheritable(taken[0])
        with pytest.raises(ProtocolError, match="1 descriptors came; 2 are named"):
            connection.take_descriptors(2)
        for file in (*files, *taken):
            os.close(file)

    before = descriptors()
    run(work)
    assert descriptors() == before, "what nobody took is closed with the connection"


def test_more_descriptors_than_are_ever_named_end_the_connection() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        file = os.memfd_create("test")
        for _ in range(3):
            socket.send_fds(peer, [wire.encode(wire.Ping(1))], [file] * 40)
        os.close(file)

        async def receive_all() -> None:
            while True:
                await connection.receive()

        with pytest.raises(ProtocolError, match="descriptors"):
            await receive_all()

    before = descriptors()
    run(work)
    assert descriptors() == before


def test_descriptors_of_many_messages_wait_until_those_before_were_taken() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        file = os.memfd_create("test")
        for number in range(1, 6):
            socket.send_fds(peer, [wire.encode(wire.Ping(number))], [file] * 40)
        os.close(file)
        for number in range(1, 6):
            assert await connection.receive() == wire.Ping(number)
            for taken in connection.take_descriptors(40):
                os.close(taken)

    before = descriptors()
    run(work)
    assert descriptors() == before


def test_where_no_descriptor_is_free_that_is_said() -> None:
    async def work(connection: Connection[Any], peer: socket.socket) -> None:
        file = os.memfd_create("test")
        socket.send_fds(peer, [wire.encode(wire.Ping(1))], [file] * 3)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (file + 2, hard))
        try:
            with pytest.raises(SessionLost, match="no descriptor is free"):
                await connection.receive()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(file)
        assert connection.ended is None, "the peer can still be told"

    before = descriptors()
    run(work)
    assert descriptors() == before


# Garbage ---------------------------------------------------------------------------------------


def mutated(rng: random.Random, frames: list[bytes]) -> bytes:
    """One message, damaged: bits, cuts, repetitions, lengths, or pieces of two."""
    frame = bytearray(rng.choice(frames))
    for _ in range(rng.randint(1, 4)):
        kind, at = rng.randrange(6), rng.randrange(len(frame))
        if kind == 0:
            frame[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            frame[at] = rng.randrange(256)
        elif kind == 2:
            del frame[at : at + rng.randint(1, 8)]
        elif kind == 3:
            frame[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 4:
            frame[at:] = rng.choice(frames)[at:]
        else:
            frame[at:at] = frame[at : at + rng.randint(1, 16)]
        if len(frame) < 5:
            return bytes(frame)
    if rng.random() < 0.8:  # else the receiver mostly waits for more
        struct.pack_into("<I", frame, 0, len(frame) - 4)
    return bytes(frame)


def garbage(served: Served, count: int, seed: int) -> None:
    """Send damaged messages in many sessions, beside a client that must not notice."""
    rng = random.Random(seed)
    with Client(served.path) as client:
        engine = Engine.register(client)
        wanted = [engine.page(index) for index in range(8)]
        engine.save(numbered(8))
        number = engine.instance.number  # type: ignore[attr-defined]
        aimed = (
            *REQUESTS,
            wire.Publish(20, number, HASHES, (0, 1, 2)),
            wire.Query(21, number, HASHES),
            wire.Restore(22, number + 1, HASHES, (0, 1, 2)),
            wire.Unregister(23, number),
        )
        frames = [bytes(wire.encode(message)) for message in aimed]
        saved = {name: tensor.copy() for name, tensor in engine.tensors.items()}
        sent = checked = hits = 0
        while sent < count:
            hello = rng.random() < 0.9
            with raw_session(served.path, hello=hello) as sock:
                sock.settimeout(0.5)
                try:
                    # Some before the answer to the first: what follows a broken one is there too.
                    for _ in range(rng.randint(1, 6)):
                        sent += 1
                        sock.sendall(mutated(rng, frames))
                except (ConnectionError, TimeoutError):
                    pass
            if sent // 1000 > checked:
                checked = sent // 1000
                engine.clear()
                found = engine.restored(numbered(8))
                assert [engine.page(numbered(8)[page]) for page in found] == wanted[: len(found)]
                hits += len(found)
                if len(found) < 8:  # somebody's flush, damaged or not, may evict
                    for name, tensor in engine.tensors.items():
                        tensor[...] = saved[name]
                    engine.save(numbered(8))
    assert hits > 0
    assert served.rest() == []


@pytest.mark.fuzz
def test_garbage_hurts_nobody(served: Served) -> None:
    before = descriptors()
    garbage(served, 20_000, seed=1)
    assert descriptors() <= before


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_million_damaged_messages_hurt_nobody(served: Served) -> None:
    before = descriptors()
    garbage(served, 1_000_000, seed=2)
    assert descriptors() <= before
