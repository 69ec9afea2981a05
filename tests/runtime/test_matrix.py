"""Every combination of the policies, a codec and SSD, through a daemon and its clients."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from orbitkv import Client
from orbitkv.cache.catalogue import Tier
from orbitkv.errors import Closed, ImpossibleRequest
from orbitkv.stages.ticket import Failed, Miss, Restored, Saved, Warmed
from tests.builders import (
    BLOCK,
    REST_S,
    WAIT_S,
    Engine,
    big_geometry,
    flip_file,
    model,
    numbered,
    page_hash,
    toy_geometry,
)
from tests.serving import DaemonProcess, settled

GEOMETRY = toy_geometry(page_tokens=256)
OBJECT_NBYTES = sum(GEOMETRY.object_nbytes.values())
POOL_PAGES, PAGES, PART = 10, 24, 8
POOL_NBYTES = POOL_PAGES * OBJECT_NBYTES
SSD_NBYTES = 8 * PAGES * OBJECT_NBYTES


@dataclass
class CodedEngine(Engine):
    """An engine that knows what each of its pages is once it was stored.

    Attributes:
        expected: Bytes of each page as its codec gives them back.
    """

    expected: tuple[bytes, ...] = ()

    @classmethod
    def open(cls, client: Client, name: str, codec: str, *, shared: bool) -> CodedEngine:
        """Twice ``PAGES`` pages: those to save, and as many to restore into."""
        pages = 2 * PAGES
        if shared:
            tensors = client.allocate(GEOMETRY, pages)
        else:
            tensors = {s.name: np.zeros(GEOMETRY.shape(s, pages), s.dtype) for s in GEOMETRY.slots}
        rng = np.random.default_rng(len(name))
        drawn = {n: rng.normal(0, 20, t.shape).astype(t.dtype) for n, t in tensors.items()}
        engine = cls(client, GEOMETRY, drawn, client.register(GEOMETRY, tensors, model=model(name)))
        if codec == "fp8":  # by another implementation than ours
            engine.tensors = {n: _cast(tensor) for n, tensor in drawn.items()}
        engine.expected = tuple(engine.page(index) for index in range(PAGES))
        for slot, tensor in tensors.items():
            tensor[...] = drawn[slot]
        engine.tensors = tensors
        engine.clear()
        return engine

    def clear(self) -> None:
        """Zero the pages to restore into, which are the latter half."""
        for item in self.geometry.slots:
            axis = item.axes.index("page")
            np.moveaxis(self.tensors[item.name], axis, 0)[PAGES:] = 0

    def names(self) -> dict[bytes, int]:
        return numbered(PAGES)

    def check(self, asked: Mapping[bytes, int]) -> tuple[bytes, ...]:
        """Restore into the cleared half; nothing but what was restored, whole, may be there."""
        self.clear()
        restored = self.restored({page: PAGES + index for page, index in asked.items()})
        for page, index in self.names().items():
            wanted = self.expected[index] if page in restored else bytes(len(self.expected[index]))
            assert self.page(PAGES + index) == wanted, index
        return restored


def _cast(tensor: np.ndarray) -> np.ndarray:
    return torch.from_numpy(tensor).to(torch.float8_e4m3fn).to(torch.float16).numpy()


def names_of(indices: Iterable[int]) -> dict[bytes, int]:
    return {page_hash(index): index for index in indices}


@dataclass
class Bench:
    """A daemon, and two clients with an engine each."""

    daemon: DaemonProcess
    engines: tuple[CodedEngine, ...]

    def counters(self) -> Mapping[str, int]:
        """Once everything has come to rest."""
        client = self.engines[0].manager
        assert settled(client.leaks) == []
        return client.statistics().counters

    def flush(self, *, evict_dram: bool) -> None:
        assert self.engines[0].manager.flush(evict_dram=evict_dram).unwritten == 0

    def save_all(self) -> None:
        """More than the pool holds, in turns; what SSD is to have is written before the next."""
        for first in range(0, PAGES, PART):
            for engine in self.engines:
                outcome = engine.save(names_of(range(first, first + PART)))
                assert outcome.dropped == ()
                assert not set(outcome.stored) & set(outcome.resident)
                self.flush(evict_dram=False)


@pytest.fixture(params=[False, True], ids=["dram", "ssd"])
def ssd(request: pytest.FixtureRequest, tmp_path: Path) -> Path | None:
    return tmp_path / "ssd" if request.param else None


@pytest.fixture(params=["none", "fp8"])
def codec(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=["all", "reuse"])
def policy(request: pytest.FixtureRequest) -> str:
    chosen: str = request.param
    return chosen


@pytest.fixture(params=[0, 80])
def protected(request: pytest.FixtureRequest) -> int:
    percent: int = request.param
    return percent


@pytest.fixture
def bench(
    tmp_path: Path, protected: int, policy: str, codec: str, ssd: Path | None
) -> Iterator[Bench]:
    flags = [
        *("--pool-size", str(POOL_NBYTES), "--cache-protected-percent", str(protected)),
        *("--ssd-write-policy", policy, "--storage-codec", codec),
    ]
    if ssd:
        flags += ["--ssd-cache-path", str(ssd), "--ssd-cache-capacity", str(SSD_NBYTES)]
    daemon = DaemonProcess.start(tmp_path / "s", *flags)
    try:
        with Client(daemon.path) as one, Client(daemon.path) as other:
            yield Bench(
                daemon,
                (
                    CodedEngine.open(one, "one", codec, shared=False),
                    CodedEngine.open(other, "other", codec, shared=True),
                ),
            )
            assert settled(one.leaks) == []
    finally:
        code, said = daemon.end()
    assert code == 0, said
    assert "leaks=[]" in said, said


def test_every_combination_gives_back_what_its_codec_makes_of_each_page(
    bench: Bench, protected: int, policy: str, codec: str, ssd: Path | None
) -> None:
    saved_and_asked_for_again(bench, protected, policy, ssd)
    if ssd:
        restored_from_ssd(bench)
        repaired(bench, ssd)
    warmed_and_prepared(bench, protected, ssd)
    cancelled(bench)
    counters = bench.counters()
    assert (counters.get("encoded_segments", 0) > 0) == (codec == "fp8")
    consistent(bench, protected, policy, ssd)


def saved_and_asked_for_again(bench: Bench, protected: int, policy: str, ssd: Path | None) -> None:
    for engine in bench.engines:  # without a wait for SSD: what queues for it may be dropped
        outcome = engine.save(engine.names())
        assert outcome.dropped == ()
    counters = bench.counters()
    new = 2 * PAGES if ssd else 0
    assert counters["evicted_probationary"] > 0, "no more than the pool holds"
    ended = [f"ssd_writes{end}" for end in ("", "_dropped", "_dead", "_resident", "_no_room")]
    admitted = sum(counters.get(name, 0) for name in ended)
    assert counters["ssd_writes_admitted"] == (0 if policy == "reuse" else new)
    assert counters["ssd_skips_cold"] == (new if policy == "reuse" else 0)
    assert admitted == counters["ssd_writes_admitted"], "each was written, or is counted as lost"
    found = [
        [page for page, index in engine.names().items() if engine.check({page: index})]
        for engine in bench.engines
    ]
    assert found[-1], "of what was saved last, a part is in DRAM"
    assert len(found[0]) + len(found[-1]) < 2 * PAGES or ssd
    assert bench.engines[-1].hits(found[-1][-1:]) == 1, "it has just been restored"
    promoted = bench.counters()["promotions"]
    assert (promoted > 0) == (protected > 0)


def restored_from_ssd(bench: Bench) -> None:
    bench.save_all()
    bench.flush(evict_dram=True)
    for engine in bench.engines:
        with engine.manager.query(engine.instance, list(engine.names())) as lease:
            assert lease.tiers() == {Tier.DRAM: 0, Tier.SSD: PAGES}
        assert engine.check(engine.names()) == tuple(engine.names())


def repaired(bench: Bench, ssd: Path) -> None:
    bench.flush(evict_dram=True)
    engine, victim = bench.engines[0], page_hash(PART)
    text = ssd.read_bytes()
    digest = engine.instance.digests[0][victim]
    at = text.find(digest)
    assert at >= 0
    while at >= 0:  # an older version may lie there too
        flip_file(ssd, at + 700, 3)
        at = text.find(digest, at + 1)
    before = bench.counters().get("corrupt_ssd", 0)
    assert set(engine.check(engine.names())) == set(engine.names()) - {victim}
    assert bench.counters()["corrupt_ssd"] == before + 1
    index = engine.names()[victim]
    assert engine.save({victim: index}).stored == (victim,)
    bench.flush(evict_dram=True)
    assert engine.check(engine.names()) == tuple(engine.names())


def warmed_and_prepared(bench: Bench, protected: int, ssd: Path | None) -> None:
    bench.flush(evict_dram=True)
    engine = bench.engines[1]
    some = numbered(4)
    if not ssd:
        engine.save(some)
    promoted = bench.counters()["promotions"]
    ticket = engine.manager.warm(engine.instance, [*some, page_hash("nowhere")])
    assert ticket.result(WAIT_S) == Warmed(tuple(some), (page_hash("nowhere"),))
    lease = engine.manager.prepare(engine.instance, list(numbered(8)))
    assert len(lease.hashes) == (8 if ssd else 4)
    assert lease.preparation
    assert lease.preparation.result(WAIT_S) == Warmed(lease.hashes, ())
    counters = engine.manager.statistics().counters
    assert counters["promotions"] == promoted, "neither is demand"
    engine.clear()
    places = {page: PAGES + index for index, page in enumerate(lease.hashes)}
    outcome = engine.manager.restore(lease, places).result(WAIT_S)
    assert isinstance(outcome, Restored)
    assert outcome.restored == tuple(places)
    for index in range(len(places)):
        assert engine.page(PAGES + index) == engine.expected[index]
    assert engine.check(some) == tuple(some)
    assert (bench.counters()["promotions"] > promoted) == (protected > 0)


def cancelled(bench: Bench) -> None:
    """What is cancelled ends, and leaves of each page nothing or all."""
    engine = bench.engines[1]
    client = engine.manager
    fresh = {page_hash(("fresh", index)): index for index in range(PAGES)}
    save = client.publish(engine.instance, fresh.items())
    save.cancel()
    assert isinstance(save.result(WAIT_S), Saved | Failed)
    engine.clear()
    lease = client.query(engine.instance, list(numbered(4)))
    restore = client.restore(lease, {page: PAGES + numbered(4)[page] for page in lease.hashes})
    restore.cancel()
    assert isinstance(restore.result(WAIT_S), Restored | Miss | Failed)
    for index in range(PAGES):
        page = engine.page(PAGES + index)
        assert page in (engine.expected[index], bytes(len(page)))


def consistent(bench: Bench, protected: int, policy: str, ssd: Path | None) -> None:
    counters = bench.counters()
    statistics = bench.engines[0].manager.statistics()
    assert statistics.pool_used_nbytes <= statistics.pool_capacity_nbytes == POOL_NBYTES
    assert counters["protected_nbytes"] <= POOL_NBYTES * protected // 100
    assert counters["promotions"] >= counters["demotions"]
    if not protected:
        assert counters["promotions"] == counters["evicted_protected"] == 0
    classes = [counters[f"evicted_{kind}"] for kind in ("reclaimable", "probationary", "protected")]
    assert sum(classes) == counters["evicted_dram"]
    if policy == "all":
        assert counters["ssd_skips_cold"] == 0
    if not ssd:
        assert not any(name.startswith("ssd_writes_d") and n for name, n in counters.items())
        assert statistics.ssd_used_nbytes == 0
    assert counters.get("corrupt_dram", 0) == counters.get("undecodable", 0) == 0


# Query budgets and leases ----------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> Iterator[DaemonProcess]:
    """A daemon whose queries may hold three pages of 4 KiB, for a second."""
    flags = (
        "--pool-size",
        str(8 * BLOCK),
        "--query-budget",
        str(3 * BLOCK),
        "--lease-ttl-s",
        "1",
    )
    daemon = DaemonProcess.start(tmp_path / "small", *flags)
    try:
        yield daemon
    finally:
        code, said = daemon.end()
    assert code == 0, said
    assert "leaks=[]" in said, said


def test_a_lease_that_nobody_restores_ends_without_anybody_asking(small: DaemonProcess) -> None:
    with Client(small.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(3))
        lease = client.query(engine.instance, list(numbered(3)))
        assert len(lease.hashes) == 3
        assert engine.hits([page_hash(0)]) == 0, "the budget is spent"
        time.sleep(1.5)
        assert client.leaks() == [], "at the first look"
        assert engine.hits(list(numbered(3))) == 3
        with pytest.raises(Closed, match="the lease has expired"):
            client.restore(lease, numbered(3))
        seen = client.statistics().counters
        assert (seen["leases_expired"], seen["query_budget_full"]) == (1, 1)
        assert engine.restored(numbered(3)) == tuple(numbered(3))


def test_a_query_over_the_budget_is_a_miss_at_once_and_is_counted(small: DaemonProcess) -> None:
    with Client(small.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(5))
        lease = client.query(engine.instance, list(numbered(4)))
        assert (lease.hashes, sum(lease.tiers().values())) == ((), 0)
        lease.release()
        assert client.restore(client.query(engine.instance, []), {}).result(WAIT_S) == Miss(())
        assert engine.hits(list(numbered(3))) == 3
        seen = client.statistics().counters
        assert (seen["query_oversized"], seen.get("query_budget_full", 0)) == (1, 0)
        assert settled(client.leaks) == []


def test_a_client_that_goes_gives_back_what_its_queries_held(small: DaemonProcess) -> None:
    with Client(small.path) as other:
        engine = Engine.register(other)
        engine.save(numbered(3))
        client = Client(small.path)
        gone = Engine.register(client)
        assert len(client.query(gone.instance, list(numbered(3))).hashes) == 3
        assert engine.hits(list(numbered(3))) == 0
        calls = client.core._calls
        client.core._loop.call_soon_threadsafe(calls._connection.close)
        began_s = time.monotonic()
        while engine.hits(list(numbered(3))) == 0:
            assert time.monotonic() < began_s + REST_S
        assert other.statistics().counters.get("leases_expired", 0) == 0, "it was not the time"
        assert engine.restored(numbered(3)) == tuple(numbered(3))
        client.close()


def test_a_pool_smaller_than_one_page_refuses_that_engine_alone(small: DaemonProcess) -> None:
    with Client(small.path) as client, Client(small.path) as other:
        engine = Engine.register(other)
        wanted = [engine.page(index) for index in range(3)]
        engine.save(numbered(3))
        said = f"one page of group 'attention' takes {9 * BLOCK} bytes; .* pool: {8 * BLOCK}"
        with pytest.raises(ImpossibleRequest, match=said):
            Engine.register(client, geometry=big_geometry(8 * BLOCK))
        engine.clear()
        assert engine.restored(numbered(3)) == tuple(numbered(3))
        assert [engine.page(index) for index in range(3)] == wanted
        assert settled(other.leaks) == []
