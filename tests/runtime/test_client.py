"""The client: the manager's interface through a socket, and sessions that cannot hurt another."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from orbitkv import Client
from orbitkv.cache.catalogue import Tier
from orbitkv.config import MIB
from orbitkv.errors import (
    Cancelled,
    Closed,
    DeadlineMissed,
    DestinationError,
    EngineFault,
    GeometryError,
    ImpossibleRequest,
    SessionLost,
    Unavailable,
)
from orbitkv.runtime import wire
from orbitkv.runtime.host import MAX_IN_FLIGHT, MAX_LEASES
from orbitkv.runtime.remote import RemoteInstance
from orbitkv.runtime.tensors import SharedMemory
from orbitkv.segment import NHD
from orbitkv.stages.ticket import Failed, Miss, Restored, Saved, Warmed
from tests.builders import (
    WAIT_S,
    Engine,
    Gate,
    Lanes,
    big_geometry,
    grouped_geometry,
    model,
    numbered,
    page_hash,
    slot,
    tensors_of,
    toy_geometry,
    toy_geometry_of_slots,
)
from tests.serving import Served, descriptors, last_reply, raw_session, read_reply, settled

ServedFactory = Callable[..., Served]


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[ServedFactory]:
    """Start daemons; at the end each must hold nothing, and stop."""
    daemons: list[Served] = []

    def start(**settings: object) -> Served:
        daemons.append(Served(tmp_path / f"s{len(daemons)}", **settings))
        return daemons[-1]

    yield start
    while Gate.built:
        Gate.built.pop().open()
    held = [daemon.rest() for daemon in daemons]
    stopped = [daemon.stop() for daemon in daemons]
    assert not any(held), held
    assert all(stopped), "a daemon did not stop"


@pytest.fixture
def served(serve: ServedFactory) -> Served:
    return serve()


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.path) as client:
        yield client


class SharedEngine(Engine):
    """An engine whose tensors lie page after page, so that none of them is contiguous."""

    def clear(self) -> None:
        for tensor in self.tensors.values():
            tensor[...] = 0


def shared_engine(
    client: Client, *, pages: int = 8, name: str = "toy", **options: object
) -> Engine:
    """An engine whose tensors the daemon reaches without a copy."""
    geometry = options.pop("geometry", None) or toy_geometry(**options)
    tensors = client.allocate(geometry, pages)
    rng = np.random.default_rng(7)
    for tensor in tensors.values():
        tensor[...] = rng.integers(1, 200, tensor.shape).astype(tensor.dtype)
    instance = client.register(geometry, tensors, model=model(name))
    return SharedEngine(client, geometry, tensors, instance)


def vanish(client: Client) -> None:
    """Close a client's socket as the kernel does for a process that was killed."""
    calls = client.core._calls
    client.core._loop.call_soon_threadsafe(calls._connection.close)


# The same interface ----------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [False, True], ids=["mirrored", "shared"])
def test_pages_come_back_byte_for_byte(client: Client, *, shared: bool) -> None:
    engine = shared_engine(client) if shared else Engine.register(client)
    wanted = [engine.page(index) for index in range(8)]
    assert set(engine.save(numbered(8)).stored) == set(numbered(8))
    engine.clear()
    destinations = {page: 7 - index for page, index in numbered(8).items()}
    assert set(engine.restored(destinations)) == set(numbered(8))
    assert [engine.page(index) for index in range(8)] == wanted[::-1]
    assert engine.save(numbered(8)).resident == tuple(numbered(8))
    assert isinstance(engine.instance, RemoteInstance)
    assert (engine.instance.mirror is None) == shared


def test_pages_come_back_from_ssd(serve: ServedFactory, ssd_path: Path) -> None:
    served = serve(ssd_cache_paths=ssd_path)
    with Client(served.path) as client:
        engine = Engine.register(client)
        wanted = [engine.page(index) for index in range(8)]
        engine.save(numbered(8))
        flushed = client.flush(evict_dram=True)
        assert (flushed.unwritten, flushed.evicted_nbytes) == (0, 8 * 4096)
        engine.clear()
        with client.query(engine.instance, list(numbered(8))) as lease:
            assert lease.tiers() == {Tier.DRAM: 0, Tier.SSD: 8}
        engine.restored(numbered(8))
        assert [engine.page(index) for index in range(8)] == wanted


def test_warmed_and_prepared_pages_are_in_dram(serve: ServedFactory, ssd_path: Path) -> None:
    served = serve(ssd_cache_paths=ssd_path)
    with Client(served.path) as client:
        engine = Engine.register(client)
        wanted = [engine.page(index) for index in range(8)]
        pages = list(numbered(8))
        engine.save(numbered(8))
        client.flush(evict_dram=True)
        engine.clear()
        warmed = client.warm(engine.instance, [*pages[:2], b"none"]).result(WAIT_S)
        assert warmed == Warmed(tuple(pages[:2]), (b"none",))
        assert engine.is_clear(0), "nothing is placed"
        lease = client.prepare(engine.instance, pages)
        assert lease.preparation.result(WAIT_S) == Warmed(tuple(pages), ())
        with client.query(engine.instance, pages) as queried:
            assert queried.tiers() == {Tier.DRAM: 8, Tier.SSD: 0}
        restored = client.restore(lease, numbered(8)).result(WAIT_S)
        assert isinstance(restored, Restored)
        assert [engine.page(index) for index in range(8)] == wanted


@pytest.mark.parametrize(
    "geometry",
    [
        grouped_geometry(),
        big_geometry(MIB // 4),
        toy_geometry(axes=NHD),
        toy_geometry(dtype="bfloat16"),
        toy_geometry_of_slots(slot("k0", 0, "k", dtype="float8_e4m3fn", heads=8, head_dim=64)),
    ],
    ids=["groups", "large", "NHD", "bfloat16", "fp8"],
)
def test_every_layout_can_be_shared(client: Client, geometry: object) -> None:
    engine = shared_engine(client, geometry=geometry, pages=3)
    wanted = [engine.page(index) for index in range(3)]
    engine.save(numbered(3))
    engine.clear()
    assert len(engine.restored(numbered(3))) == 3
    assert [engine.page(index) for index in range(3)] == wanted


def test_torch_tensors_that_are_views_of_one_allocation_are_mirrored(client: Client) -> None:
    geometry = toy_geometry(layers=3, dtype="bfloat16")
    whole = torch.randint(0, 99, (6, 5, 2, 4, 8), dtype=torch.int16).view(torch.bfloat16)
    tensors = {item.name: whole[index] for index, item in enumerate(geometry.slots)}
    instance = client.register(geometry, tensors, model=model())
    before = whole.clone()
    assert isinstance(client.publish(instance, numbered(5).items()).result(WAIT_S), Saved)
    whole.zero_()
    lease = client.query(instance, list(numbered(5)))
    assert isinstance(client.restore(lease, numbered(5)).result(WAIT_S), Restored)
    assert torch.equal(whole.view(torch.int16), before.view(torch.int16))


def test_torch_tensors_on_allocated_memory_are_shared(client: Client) -> None:
    geometry = toy_geometry()
    tensors = {name: torch.from_numpy(t) for name, t in client.allocate(geometry, 4).items()}
    instance = client.register(geometry, tensors, model=model())
    assert isinstance(instance, RemoteInstance)
    assert instance.mirror is None


def test_two_engines_share_what_either_saved(served: Served) -> None:
    with Client(served.path) as first, Client(served.path) as second:
        writer, reader = Engine.register(first), Engine.register(second, seed=None)
        assert writer.instance.namespace == reader.instance.namespace
        writer.save(numbered(8))
        assert len(reader.restored(numbered(8))) == 8
        assert [reader.page(index) for index in range(8)] == [
            writer.page(index) for index in range(8)
        ]
        assert served.status().instances == 2


def test_refusals_of_a_request_are_those_of_the_manager(client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(4))
    with pytest.raises(DestinationError, match="page index 8; accepted: 0 to 7"):
        client.publish(engine.instance, [(page_hash(0), 8)])
    with pytest.raises(DestinationError, match="page hash 'text'; accepted: bytes"):
        client.query(engine.instance, ["text"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="accepted: an event"):
        client.publish(engine.instance, numbered(1).items(), ready=object())
    lease = client.query(engine.instance, list(numbered(4)))
    with pytest.raises(DestinationError, match="not in the lease"):
        client.restore(lease, {page_hash(7): 0})
    with pytest.raises(DestinationError, match="comes twice"):
        client.restore(lease, {page_hash(0): 0, page_hash(1): 0})
    assert isinstance(client.restore(lease, numbered(4)).result(WAIT_S), Restored)
    with pytest.raises(Closed, match="released or restored before"):
        client.restore(lease, numbered(4))


def test_refusals_of_a_registration_are_those_of_the_manager(client: Client) -> None:
    geometry = toy_geometry()
    with pytest.raises(GeometryError, match="no tensor"):
        client.register(geometry, {}, model=model())
    large = big_geometry(2 * MIB)
    with pytest.raises(ImpossibleRequest, match="pool: 1048576"):
        client.register(large, tensors_of(large, 1), model=model())
    assert client.status().instances == 0


def test_nothing_found_is_a_miss_and_costs_no_lease(client: Client) -> None:
    engine = Engine.register(client)
    with client.query(engine.instance, list(numbered(3))) as lease:
        assert lease.hashes == ()
    assert settled(client.leaks) == []


def test_an_evicted_page_is_missed(client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(8))
    client.flush(evict_dram=True)
    assert engine.restore({}) == Miss(())
    assert engine.hits(list(numbered(8))) == 0


def test_calls_may_come_from_many_threads(client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(8))
    with ThreadPoolExecutor(8) as threads:
        hits = list(threads.map(lambda _: engine.hits(list(numbered(8))), range(200)))
    assert hits == [8] * 200
    assert settled(client.leaks) == []


def test_twins_serve_callers_on_a_loop(served: Served) -> None:
    geometry = toy_geometry()
    tensors = tensors_of(geometry, 4)

    async def main() -> None:
        async with Client(served.path) as client:
            instance = await client.register_async(geometry, tensors, model=model())
            saved = await (await client.publish_async(instance, numbered(4).items()))
            assert isinstance(saved, Saved)
            lease = await client.query_async(instance, list(numbered(4)))
            restored = await (await client.restore_async(lease, numbered(4)))
            assert isinstance(restored, Restored)
            assert (await client.flush_async()).evicted_nbytes == 0
            await client.unregister_async(instance)
            with pytest.raises(Closed):
                await client.query_async(instance, [])

    asyncio.run(main())


def test_status_and_statistics_tell_of_the_daemon(client: Client, served: Served) -> None:
    engine = Engine.register(client)
    engine.save(numbered(8))
    engine.hits([*numbered(8), page_hash("none")])
    status = client.status()
    assert (status.pid, status.sessions, status.instances) == (os.getpid(), 1, 1)
    assert status.counters["queried_pages"] == 9
    assert status.counters["found_pages"] == 8
    assert client.statistics() == served.status().statistics
    assert status.incarnation == served.sessions.host.incarnation


# Events ----------------------------------------------------------------------------------------


def test_a_save_waits_for_the_engines_event_before_it_looks_at_a_page(client: Client) -> None:
    engine = Engine.register(client)
    ready = threading.Event()
    ticket = client.publish(engine.instance, numbered(1).items(), ready=ready)
    with pytest.raises(TimeoutError):
        ticket.result(0.05)
    engine.tensors["k0"][0] = 1.5
    wanted = engine.page(0)
    ready.set()
    assert isinstance(ticket.result(WAIT_S), Saved)
    engine.clear()
    engine.restored(numbered(1))
    assert engine.page(0) == wanted


def test_a_restore_waits_for_the_engines_event_before_it_writes(client: Client) -> None:
    engine = shared_engine(client)
    engine.save(numbered(2))
    engine.clear()
    ready = threading.Event()
    lease = client.query(engine.instance, list(numbered(2)))
    ticket = client.restore(lease, numbered(2), ready=ready)
    with pytest.raises(TimeoutError):
        ticket.result(0.05)
    assert engine.is_clear(0)
    ready.set()
    assert isinstance(ticket.result(WAIT_S), Restored)


def test_an_event_that_never_happens_holds_up_nobody_else(served: Served) -> None:
    ready = threading.Event()
    with Client(served.path) as slow, Client(served.path) as other:
        stuck = Engine.register(slow)
        ticket = slow.publish(stuck.instance, numbered(1).items(), ready=ready)
        engine = Engine.register(other, name="other")
        assert len(engine.save(numbered(8)).stored) == 8
        assert not ticket.done
        ready.set()


def test_an_event_that_fails_ends_its_save_alone(client: Client) -> None:
    engine = Engine.register(client)
    outcome = client.publish(engine.instance, numbered(1).items(), ready=Broken()).result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, EngineFault)
    assert len(engine.save(numbered(8)).stored) == 8


# Cancelling ------------------------------------------------------------------------------------


def test_a_cancelled_save_ends_as_cancelled_once_it_has_drained(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path) as client:
        engine = Engine.register(client)
        lanes.before["stream:save"] = gate.pass_through
        ticket = client.publish(engine.instance, numbered(8).items())
        gate.await_arrival()
        ticket.cancel()
        with pytest.raises(TimeoutError):
            ticket.result(0.05)
        gate.open()
        outcome = ticket.result(WAIT_S)
        assert isinstance(outcome, Failed)
        assert isinstance(outcome.error, Cancelled)


def test_a_save_cancelled_before_its_event_asks_the_daemon_nothing(client: Client) -> None:
    engine = Engine.register(client)
    ready = threading.Event()
    ticket = client.publish(engine.instance, numbered(8).items(), ready=ready)
    ticket.cancel()
    ready.set()
    outcome = ticket.result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert client.statistics().nodes["save"]["E"].batches == 0


class Broken:
    """An event that fails."""

    def wait(self) -> None:
        raise RuntimeError("a lost device")


@pytest.mark.parametrize("why", ["cancelled", "event failed"])
def test_a_restore_that_never_asks_the_daemon_gives_its_lease_back(
    client: Client, why: str
) -> None:
    engine = Engine.register(client)
    engine.save(numbered(4))
    lease = client.query(engine.instance, list(numbered(4)))
    ready = threading.Event()
    event = ready if why == "cancelled" else Broken()
    ticket = client.restore(lease, numbered(4), ready=event)
    if why == "cancelled":
        ticket.cancel()
        ready.set()
    outcome = ticket.result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled if why == "cancelled" else EngineFault)
    assert settled(client.leaks) == []


def test_unregister_returns_once_everything_has_drained(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path) as client:
        engine = Engine.register(client)
        lanes.before["stream:save"] = gate.pass_through
        ticket = client.publish(engine.instance, numbered(8).items())
        lease = client.query(engine.instance, [])
        gate.await_arrival()
        with ThreadPoolExecutor(1) as thread:
            gone = thread.submit(client.unregister, engine.instance)
            time.sleep(0.05)
            assert not gone.done()
            gate.open()
            gone.result(WAIT_S)
        assert ticket.done
        assert lease.spent
        assert client.status().instances == 0
        with pytest.raises(Closed):
            client.query(engine.instance, [])


def test_close_lets_what_was_submitted_end(serve: ServedFactory) -> None:
    lanes = Lanes()
    served = serve(lanes=lanes)
    client = Client(served.path)
    engine = Engine.register(client)
    lanes.before["stream:save"] = lambda: time.sleep(0.05)
    ticket = client.publish(engine.instance, numbered(8).items())
    client.close()
    assert isinstance(ticket.result(0), Saved)
    with pytest.raises(Closed):
        client.statistics()
    client.close()


# A session's end -------------------------------------------------------------------------------


def test_a_vanished_client_takes_its_leases_and_registration_along(served: Served) -> None:
    client = Client(served.path)
    engine = Engine.register(client)
    engine.save(numbered(8))
    client.query(engine.instance, list(numbered(8)))
    assert served.status().leases == 1
    vanish(client)
    assert served.rest() == []
    with pytest.raises(SessionLost):
        client.query(engine.instance, [])
    client.close()


@pytest.mark.parametrize("lane", ["stream:save", "stream:restore"])
def test_a_vanished_clients_memory_is_kept_until_its_work_has_drained(
    serve: ServedFactory, lane: str
) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    client, other = Client(served.path), Client(served.path)
    engine, bystander = shared_engine(client), Engine.register(other, name="other")
    bystander.save(numbered(2))
    engine.save(numbered(4))
    lanes.before[lane] = gate.pass_through
    if lane == "stream:save":
        ticket = client.publish(engine.instance, numbered(4, first=4).items())
    else:
        lease = client.query(engine.instance, list(numbered(4)))
        ticket = client.restore(lease, numbered(4))
    gate.await_arrival()
    vanish(client)
    outcome = ticket.result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, SessionLost)
    time.sleep(0.05)
    assert served.status().instances == 2, "the lane may still touch its pages"
    gate.open()
    assert settled(lambda: ["held"] * (served.status().instances - 1)) == []
    wanted = [bystander.page(index) for index in range(2)]
    bystander.clear()
    assert len(bystander.restored(numbered(2))) == 2
    assert [bystander.page(index) for index in range(2)] == wanted
    client.close()
    other.close()


def test_sessions_that_come_and_go_leave_nothing(served: Served) -> None:
    with Client(served.path) as other:
        engine = Engine.register(other)
        engine.save(numbered(8))
        before = descriptors()
        began_s = time.monotonic()
        for _ in range(100):
            with raw_session(served.path, hello=False):
                pass
        assert time.monotonic() - began_s < 1.0, "100 connects and disconnects a second"
        for _ in range(20):
            client = Client(served.path)
            Engine.register(client)
            vanish(client)
            client.close()
        del client
        assert served.rest(sessions=1) == []
        assert descriptors() <= before
        assert engine.hits(list(numbered(8))) == 8


def test_a_client_that_stops_reading_is_left_behind(served: Served) -> None:
    with Client(served.path) as other, raw_session(served.path) as sock:
        engine = Engine.register(other)
        ask = bytes(wire.encode(wire.GetStatus(1))) * 1000

        def ask_on() -> None:
            for _ in range(1000):
                sock.sendall(ask)
                assert len(engine.save(numbered(8)).dropped) == 0

        with pytest.raises(ConnectionError):
            ask_on()
        assert engine.hits(list(numbered(8))) == 8
        assert settled(lambda: ["open"] * (served.status().sessions - 1)) == []


def test_a_client_that_asks_without_end_lets_others_have_their_turn(served: Served) -> None:
    with Client(served.path) as other, raw_session(served.path) as sock:
        engine = Engine.register(other)
        engine.save(numbered(8))
        stop = threading.Event()

        def flood() -> None:
            pings = bytes(wire.encode(wire.Release(1, 1))) * 10_000
            while not stop.is_set():
                sock.sendall(pings)

        flooding = threading.Thread(target=flood, daemon=True)
        flooding.start()
        slowest_s = 0.0
        for _ in range(50):
            began_s = time.monotonic()
            assert engine.hits(list(numbered(8))) == 8
            slowest_s = max(slowest_s, time.monotonic() - began_s)
        stop.set()
        flooding.join(WAIT_S)
        assert slowest_s < 0.5


# Who may come ----------------------------------------------------------------------------------


def test_another_user_is_refused(serve: ServedFactory) -> None:
    served = serve(credentials=lambda sock: (1, os.geteuid() + 1, 0))
    wanted = rf"user {os.geteuid() + 1} may not use this daemon"
    with pytest.raises(SessionLost, match=wanted):
        Client(served.path)
    assert served.status().refused_sessions == 1


def test_another_version_is_refused(served: Served) -> None:
    with raw_session(served.path, hello=False) as sock:
        sock.sendall(wire.encode(wire.Hello(1, wire.VERSION + 1)))
        refused = last_reply(sock)
        assert isinstance(refused, wire.Refused)
        assert refused.fault.message == "the client speaks version 2; the daemon speaks 1"


def test_the_first_message_must_be_a_hello(served: Served) -> None:
    with raw_session(served.path, hello=False) as sock:
        sock.sendall(wire.encode(wire.Ping(1)))
        assert "no hello" in last_reply(sock).fault.message


def test_a_second_hello_ends_the_session(served: Served) -> None:
    with raw_session(served.path) as sock:
        sock.sendall(wire.encode(wire.Hello(2, wire.VERSION)))
        assert "hello in the middle" in last_reply(sock).fault.message


def test_sessions_are_bounded(serve: ServedFactory) -> None:
    served = serve(max_sessions=2)
    with (
        Client(served.path),
        Client(served.path),
        pytest.raises(SessionLost, match="2 sessions are open; accepted: 2"),
    ):
        Client(served.path)
    assert served.rest() == []
    Client(served.path).close()


def test_nobody_at_the_socket_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(SessionLost, match=r"no daemon at .*orbitkv-cache-manager --socket"):
        Client(tmp_path / "nothing")


def test_a_daemon_that_does_not_greet_is_told_within_the_deadline(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(tmp_path / "deaf"))
        deaf.listen()
        with pytest.raises(DeadlineMissed, match=r"no answer to hello in 0\.1 s"):
            Client(tmp_path / "deaf", deadline_s=0.1)


# Bounds of one session -------------------------------------------------------------------------


def test_more_tickets_than_the_daemon_takes_wait_in_the_client(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path) as client:
        engine = Engine.register(client, pages=2)
        lanes.before["stream:save"] = gate.pass_through
        tickets = [
            client.publish(engine.instance, [(page_hash(n), n % 2)])
            for n in range(MAX_IN_FLIGHT + 50)
        ]
        gate.await_arrival()
        assert settled(lambda: ["less"] * (served.status().tickets < MAX_IN_FLIGHT)) == []
        gate.open()
        outcomes = [ticket.result(WAIT_S) for ticket in tickets]
        assert all(isinstance(outcome, Saved) for outcome in outcomes)


def test_tickets_beyond_the_bound_are_refused(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path) as client:
        engine = Engine.register(client, pages=2)
        lanes.before["stream:save"] = gate.pass_through
        client.core._calls._tickets = asyncio.Semaphore(2 * MAX_IN_FLIGHT)
        tickets = [
            client.publish(engine.instance, [(page_hash(n), n % 2)])
            for n in range(MAX_IN_FLIGHT + 1)
        ]
        refused = tickets[-1].result(WAIT_S)
        assert isinstance(refused, Failed)
        assert f"more than {MAX_IN_FLIGHT} requests without an answer" in str(refused.error)
        gate.open()
        assert all(isinstance(ticket.result(WAIT_S), Saved) for ticket in tickets[:-1])


def test_leases_of_a_session_are_bounded(client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(1))
    leases = [client.query(engine.instance, [page_hash(0)]) for _ in range(MAX_LEASES)]
    with pytest.raises(ImpossibleRequest, match=f"more than {MAX_LEASES} leases"):
        client.query(engine.instance, [page_hash(0)])
    for lease in leases:
        lease.release()
    assert engine.hits([page_hash(0)]) == 1


def test_misses_that_nobody_releases_hold_nothing(client: Client, served: Served) -> None:
    engine = Engine.register(client)
    lease = client.query(engine.instance, [page_hash("none")])
    client.prepare(engine.instance, [page_hash("none")]).preparation.result(WAIT_S)
    assert served.status().leases == 0
    (session,) = served.sessions.live
    assert session.leases == {}
    assert client.core._leases == set()
    assert settled(client.leaks) == []
    assert client.restore(lease, {}).result(WAIT_S) == Miss(())


def test_an_expired_lease_is_told_at_the_call_and_forgotten(serve: ServedFactory) -> None:
    served = serve(lease_ttl_s=0.05)
    with Client(served.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(4))
        lease = client.query(engine.instance, list(numbered(4)))
        assert settled(lambda: ["stands"] * (not lease.expired)) == []
        with pytest.raises(Closed, match="has expired"):
            client.restore(lease, numbered(4))
        assert client.core._leases == set()
        (session,) = served.sessions.live
        assert settled(lambda: list(session.leases)) == []


def test_expired_leases_are_not_counted_as_held(served: Served, client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(4))
    client.query(engine.instance, list(numbered(4)))

    async def expire() -> None:
        served.core.leases.release_all()

    assert served.status().leases == 1
    served.call(expire())
    assert served.status().leases == 0


def test_more_hashes_than_one_request_may_name_are_refused_on_both_sides(client: Client) -> None:
    engine = Engine.register(client)
    many = [page_hash(n) for n in range(wire.MAX_HASHES + 1)]
    refusal = r"16385 page hashes in one request; the daemon accepts: 16384"
    for call in (client.query, client.prepare, client.warm):
        with pytest.raises(ImpossibleRequest, match=refusal):
            call(engine.instance, many)
    with pytest.raises(ImpossibleRequest, match=refusal):
        client.publish(engine.instance, [(page, 0) for page in many[:1]] * len(many))
    number = engine.instance.number  # type: ignore[attr-defined]
    told = r"16385 page hashes in one request; accepted: 16384"
    with pytest.raises(ImpossibleRequest, match=told):
        ask(client, lambda n: wire.Query(n, number, tuple(many)))
    with pytest.raises(ImpossibleRequest, match=told):
        ask(client, lambda n: wire.Warm(n, number, tuple(many)), wire.Ended)
    assert engine.hits(many[:-1]) == 0


def test_a_page_that_is_named_twice_is_claimed_once(serve: ServedFactory) -> None:
    served = serve(query_budget_nbytes=2 * 4096)
    with Client(served.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(2))
        with client.query(engine.instance, [page_hash(0)] * 100) as lease:
            assert len(lease.hashes) == 100
            assert served.status().statistics.query_used_nbytes == 4096
        assert settled(lambda: ["held"] * served.status().statistics.query_used_nbytes) == []


def test_prepares_at_once_do_not_wait_for_each_other(client: Client) -> None:
    engine = Engine.register(client)
    engine.save(numbered(2))
    client.core._calls._set_slots(2)

    async def main() -> None:
        async def one() -> None:
            lease = await client.prepare_async(engine.instance, list(numbered(2)))
            assert isinstance(await lease.preparation, Warmed)
            lease.release()

        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*(one() for _ in range(20)))

    asyncio.run(main())
    assert settled(client.leaks) == []


def test_a_prepare_that_is_refused_gives_both_its_slots_back(client: Client) -> None:
    engine = Engine.register(client)
    client.core._calls._set_slots(1)
    client.core._calls.welcome = msgspec.structs.replace(
        client.core._calls.welcome, max_hashes=2**20
    )
    many = [page_hash(n) for n in range(wire.MAX_HASHES + 1)]
    for _ in range(3):
        with pytest.raises(ImpossibleRequest):
            client.prepare(engine.instance, many)
    lease = client.prepare(engine.instance, many[:1])
    assert lease.preparation.result(WAIT_S) == Warmed((), ())
    assert settled(client.leaks) == []


def test_a_call_does_not_wait_for_tickets(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path, deadline_s=5.0) as client:
        engine = Engine.register(client, pages=2)
        lanes.before["stream:save"] = gate.pass_through
        client.core._calls._set_slots(1)
        tickets = [client.publish(engine.instance, [(page_hash(n), n)]) for n in range(2)]
        gate.await_arrival()
        assert engine.hits([page_hash(0)]) == 0
        gate.open()
        assert all(isinstance(ticket.result(WAIT_S), Saved) for ticket in tickets)


def test_a_deadline_includes_the_wait_for_a_slot(served: Served) -> None:
    with Client(served.path, deadline_s=0.3) as client:
        engine = Engine.register(client)
        client.core._calls._set_slots(0)
        for call in (client.query, client.prepare):
            with pytest.raises(DeadlineMissed, match=r"no answer to \w+ in 0\.3 s"):
                call(engine.instance, [page_hash(0)])
        client.core._calls._set_slots(1)
        assert engine.hits([page_hash(0)]) == 0
        assert settled(client.leaks) == []


def test_flushes_without_an_answer_are_bounded(serve: ServedFactory, ssd_path: Path) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes, ssd_cache_paths=ssd_path)
    with Client(served.path) as client, raw_session(served.path) as sock:
        engine = Engine.register(client)
        lanes.before["ring:write"] = gate.pass_through
        engine.save(numbered(1))
        gate.await_arrival()
        flushes = [wire.Flush(n, evict_dram=False) for n in range(MAX_IN_FLIGHT + 2)]
        sock.sendall(b"".join(bytes(wire.encode(flush)) for flush in flushes))
        for _ in range(2):
            refused = read_reply(sock)
            assert isinstance(refused, wire.Refused)
            assert "requests without an answer" in refused.fault.message
        gate.open()


def test_shared_memories_of_a_session_are_bounded(client: Client, served: Served) -> None:
    served.sessions.host.max_memories = 3
    before = descriptors()
    memory = SharedMemory(4096)
    named = (wire.Memory("shared", 4096),) * 2
    assert isinstance(register_raw(client, named, [memory.descriptor] * 2), wire.Registered)
    with pytest.raises(ImpossibleRequest, match=r"2 shared memories.*2 more; accepted: 3"):
        register_raw(client, named, [memory.descriptor] * 2)
    (session,) = served.sessions.live
    (handle,) = session.instances
    ask(client, lambda n: wire.Unregister(n, handle), wire.Done)
    assert isinstance(register_raw(client, named, [memory.descriptor] * 2), wire.Registered)
    (handle,) = session.instances
    ask(client, lambda n: wire.Unregister(n, handle), wire.Done)
    assert session._memories == 0
    memory.close()
    del memory
    assert settled(lambda: ["open"] * (descriptors() > before)) == []


def test_registrations_at_once_may_have_many_descriptors_each(client: Client) -> None:
    geometry = toy_geometry_of_slots(*(slot(f"k{n}", n, "k") for n in range(30)))

    def register(number: int) -> object:
        tensors = {}
        for item in geometry.slots:
            one = toy_geometry_of_slots(slot(item.name, 0, "k"))
            tensors |= client.allocate(one, 2)
        barrier.wait(WAIT_S)
        return client.register(geometry, tensors, model=model(str(number)))

    barrier = threading.Barrier(6)
    with ThreadPoolExecutor(6) as threads:
        instances = list(threads.map(register, range(6)))
    assert all(instance.mirror is None for instance in instances)  # type: ignore[attr-defined]
    assert client.status().instances == 6


def test_a_mapping_is_published_as_its_pairs(client: Client) -> None:
    engine = Engine.register(client)
    saved = client.publish(engine.instance, numbered(4)).result(WAIT_S)
    assert isinstance(saved, Saved)
    assert set(saved.stored) == set(numbered(4))


def test_leases_that_ended_by_themselves_do_not_count(client: Client, served: Served) -> None:
    engine = Engine.register(client)
    engine.save(numbered(1))
    leases = [client.query(engine.instance, [page_hash(0)]) for _ in range(MAX_LEASES)]

    async def expire() -> None:
        served.core.leases.release_all()

    served.call(expire())
    assert engine.hits([page_hash(0)]) == 1
    assert not leases[0].spent, "the client has not heard of it"
    outcome = client.restore(leases[0], {}).result(WAIT_S)
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Closed)


def test_several_ranks_of_one_instance_are_refused_for_now(client: Client) -> None:
    async def register() -> None:
        await client.core._calls.ask(
            lambda n: wire.Register(n, toy_geometry(), model(), (), (), 1, 2), wire.Registered, 5.0
        )

    with pytest.raises(ImpossibleRequest, match="rank 1 of 2 of one instance; accepted: rank 0"):
        client._call(register())


# Handles ---------------------------------------------------------------------------------------


def ask(
    client: Client, make: Callable[[int], wire.Request], answer: object = wire.Leased
) -> object:
    return client._call(client.core._calls.ask(make, answer, WAIT_S))


def test_a_handle_of_another_start_is_told_apart(client: Client, served: Served) -> None:
    old = served.sessions.host.incarnation + 1 << 32 | 1
    with pytest.raises(Closed, match=r"instance is of another start of the daemon .* register"):
        ask(client, lambda n: wire.Query(n, old, ()))
    with pytest.raises(Closed, match="lease is of another start"):
        ask(client, lambda n: wire.Restore(n, old, (), ()), wire.Ended)


def test_a_handle_of_another_session_is_refused(served: Served) -> None:
    with Client(served.path) as first, Client(served.path) as second:
        engine = Engine.register(first)
        number = engine.instance.number  # type: ignore[attr-defined]
        with pytest.raises(Closed, match="not of this session"):
            ask(second, lambda n: wire.Query(n, number, ()))
        with pytest.raises(Closed, match="not of this session"):
            ask(second, lambda n: wire.Unregister(n, number), wire.Done)
        assert engine.hits([]) == 0


def test_hashes_and_indices_must_be_as_many(client: Client) -> None:
    number = Engine.register(client).instance.number  # type: ignore[attr-defined]
    with pytest.raises(DestinationError, match="1 hashes, 2 page indices; accepted: as many"):
        ask(client, lambda n: wire.Publish(n, number, (b"x",), (0, 1)), wire.Ended)


def test_an_event_of_a_gpu_is_refused_for_host_tensors(client: Client) -> None:
    number = Engine.register(client).instance.number  # type: ignore[attr-defined]
    with pytest.raises(Exception, match="event of a GPU for tensors in host memory"):
        ask(client, lambda n: wire.Publish(n, number, (b"x",), (0,), bytes(64)), wire.Ended)


# Deadlines -------------------------------------------------------------------------------------


def test_an_answer_that_comes_too_late_is_given_back(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(served.path, deadline_s=0.2) as client:
        engine = Engine.register(client)
        engine.save(numbered(8))
        stuck = threading.Event()
        served.loop.call_soon_threadsafe(stuck.wait, WAIT_S)
        with pytest.raises(DeadlineMissed, match=r"no answer to query in 0\.2 s"):
            client.query(engine.instance, list(numbered(8)))
        stuck.set()
        assert settled(client.leaks) == [], "the lease was released"
        assert engine.hits(list(numbered(8))) == 8


def test_a_daemon_that_hangs_ends_the_session_and_its_tickets(served: Served) -> None:
    with Client(served.path, deadline_s=0.2) as client:
        engine = Engine.register(client)
        stuck = threading.Event()
        served.loop.call_soon_threadsafe(stuck.wait, WAIT_S)
        began_s = time.monotonic()
        outcome = client.publish(engine.instance, numbered(8).items()).result(WAIT_S)
        assert isinstance(outcome, Failed)
        assert "no sign of life in 0.2 s" in str(outcome.error)
        assert time.monotonic() - began_s < 2.0
        stuck.set()


def test_a_slow_save_is_no_dead_daemon(serve: ServedFactory) -> None:
    gate, lanes = Gate(), Lanes()
    served = serve(lanes=lanes)
    with Client(served.path, deadline_s=0.1) as client:
        engine = Engine.register(client)
        lanes.before["stream:save"] = gate.pass_through
        ticket = client.publish(engine.instance, numbered(8).items())
        time.sleep(0.6)
        assert not ticket.done
        gate.open()
        assert isinstance(ticket.result(WAIT_S), Saved)


# Memory ----------------------------------------------------------------------------------------


def register_raw(
    client: Client, memories: tuple[wire.Memory, ...], descriptors: list[int], **changes: object
) -> object:
    """Register one slot of 8 pages as a client that lies might."""
    geometry = toy_geometry_of_slots(slot("k0", 0, "k"))
    tensor = {"memory": 0, "offset": 0, "shape": (8, 2, 1, 8), "strides": (32, 16, 16, 2)} | changes
    tensors = (wire.Tensor("k0", **tensor),)

    async def register() -> object:
        return await client.core._calls.ask(
            lambda n: wire.Register(n, geometry, model(), memories, tensors),
            wire.Registered,
            WAIT_S,
            descriptors,
        )

    return client._call(register())


def test_memory_that_may_shrink_is_refused(client: Client) -> None:
    file = os.memfd_create("test")
    os.ftruncate(file, 4096)
    with pytest.raises(Exception, match="may shrink; accepted: a memfd sealed against it"):
        register_raw(client, (wire.Memory("shared", 4096),), [file])
    os.close(file)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"offset": 4096 - 254}, "ends at byte 4098 of a memory of 4096"),
        ({"strides": (1024, 16, 16, 2)}, "ends at byte 7200 of a memory of 4096"),
        ({"strides": (-32, 16, 16, 2)}, "none negative"),
        ({"offset": 1}, "multiples of 2 bytes"),
        ({"shape": (8, 2, 8), "strides": (32, 16, 2)}, "shape"),
        ({"shape": (0, 2, 1, 8)}, "shape"),
        ({"shape": (2**62, 2, 1, 8)}, "ends at byte"),
        ({"memory": 1}, "no memory 1"),
        ({"shape": (8, 1, 2, 8)}, "declared"),
    ],
)
def test_tensors_outside_their_memory_are_refused(
    client: Client, changes: dict[str, Any], refusal: str
) -> None:
    before = descriptors()
    memory = SharedMemory(4096)
    with pytest.raises(Exception, match=refusal):
        register_raw(client, (wire.Memory("shared", 4096),), [memory.descriptor], **changes)
    memory.close()
    del memory
    assert client.status().instances == 0
    assert descriptors() <= before


def test_memory_that_is_shorter_than_named_is_refused(client: Client) -> None:
    memory = SharedMemory(4096)
    with pytest.raises(Exception, match="has 4096 bytes; 8192 are named"):
        register_raw(client, (wire.Memory("shared", 8192),), [memory.descriptor])
    memory.close()


def test_memory_without_its_descriptor_is_refused(client: Client) -> None:
    with pytest.raises(Exception, match="0 descriptors came; 1 are named"):
        register_raw(client, (wire.Memory("shared", 4096),), [])


def test_gpu_memory_where_there_is_no_gpu_is_unavailable(client: Client) -> None:
    with pytest.raises(Unavailable, match="tensors on a GPU"):
        register_raw(client, (wire.Memory("cuda", 4096, bytes(64), "0000:01:00.0"),), [])


def test_registrations_that_come_and_go_leave_no_mapping(client: Client) -> None:
    def mappings() -> int:
        descriptors()  # collects
        return Path("/proc/self/maps").read_text().count("memfd:orbitkv")

    before = mappings(), descriptors()
    for _ in range(10):
        engine = Engine.register(client)
        engine.save(numbered(2))
        client.unregister(engine.instance)
    del engine
    assert settled(lambda: ["mapped"] * (mappings() > before[0])) == []
    assert descriptors() <= before[1]
