"""HTTP: what Prometheus and people are told, and what they may change."""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from orbitkv import Client
from orbitkv.cache.catalogue import Tier
from orbitkv.errors import ConfigError
from orbitkv.runtime.core import ArenaStatistics
from orbitkv.runtime.http import make_app, start_http
from orbitkv.runtime.metrics import COUNTERS, METRICS, metric_names
from orbitkv.stages.ticket import Saved
from tests.builders import BLOCK, WAIT_S, Engine, Gate, Lanes, numbered
from tests.serving import ROOT, Served


class Site:
    """A daemon's HTTP on a port of its own."""

    def __init__(self, served: Served) -> None:
        self.served = served

        async def start() -> tuple[object, str]:
            runner = await start_http(served.app, "127.0.0.1:0")
            host, port = runner.addresses[0][:2]
            return runner, f"http://{host}:{port}"

        self.runner, self.url = served.call(start())

    def ask(self, method: str, path: str, **options: object) -> tuple[int, object]:
        async def main() -> tuple[int, object]:
            async with (
                aiohttp.ClientSession() as session,
                session.request(method, self.url + path, **options) as answer,
            ):
                if answer.content_type == "application/json":
                    return answer.status, await answer.json()
                return answer.status, await answer.text()

        return asyncio.run(main())

    def get(self, path: str) -> object:
        return self.ask("GET", path)[1]

    def samples(self) -> dict[str, float]:
        """Values by name and labels, as Prometheus reads them."""
        return {
            ",".join([s.name, *(f"{k}={v}" for k, v in sorted(s.labels.items()))]): s.value
            for family in text_string_to_metric_families(self.get("/metrics"))
            for s in family.samples
        }


@pytest.fixture
def lanes() -> Lanes:
    return Lanes()


@pytest.fixture
def site(tmp_path: Path, lanes: Lanes) -> Iterator[Site]:
    served = Served(tmp_path / "s", lanes=lanes, ssd_cache_paths=tmp_path / "kv.ssd")
    site = Site(served)
    yield site
    while Gate.built:
        Gate.built.pop().open()
    served.call(site.runner.cleanup())
    assert served.rest() == []
    assert served.stop()


@pytest.fixture
def engine(site: Site) -> Iterator[Engine]:
    with Client(site.served.path) as client:
        yield Engine.register(client)


def test_a_daemon_that_is_well_says_so(site: Site) -> None:
    assert site.ask("GET", "/health") == (200, {"status": "ok", "reasons": []})


def test_a_failed_write_degrades_health_for_a_while(
    site: Site, engine: Engine, lanes: Lanes
) -> None:
    lanes.on_write = lambda transfer: OSError(5, "Input/output error")
    engine.save(numbered(8))
    engine.manager.flush()
    status, answer = site.ask("GET", "/health")
    assert (status, answer["status"]) == (503, "degraded")
    assert answer["reasons"][0].startswith("writes to SSD failed in the last 60 s (")
    assert site.samples()["orbitkv_degraded_reasons"] == 1
    site.served.health._risen_s = dict.fromkeys(site.served.health._risen_s, 0.0)
    assert site.ask("GET", "/health")[0] == 200


def test_a_pipeline_that_stopped_degrades_health(site: Site) -> None:
    async def stop() -> None:
        site.served.core._save._stopping.fault = ConfigError("node C failed")

    site.served.call(stop())
    assert site.get("/health")["reasons"] == ["node C failed"]


def test_instances_are_listed_with_what_they_hold(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    with engine.manager.query(engine.instance, list(numbered(8))):
        (listed,) = site.get("/instances")
    assert listed["namespace"] == engine.instance.namespace
    assert (listed["pages"], listed["page_nbytes"], listed["device"]) == (8, 512, None)
    assert (listed["leases"], listed["tickets"]) == (1, 0)
    engine.manager.query(engine.instance, list(numbered(8)))

    async def expire() -> None:
        site.served.core.leases.release_all()

    site.served.call(expire())
    assert site.get("/instances")[0]["leases"] == 0


def test_cleanup_of_instances_ends_sessions_of_dead_processes_alone(
    site: Site, engine: Engine
) -> None:
    assert site.ask("POST", "/instances/cleanup") == (200, {"sessions": 0, "instances": 0})
    (session,) = site.served.sessions.live
    session.pid = 2**22 + 1  # above every pid of Linux
    assert site.ask("POST", "/instances/cleanup") == (200, {"sessions": 1, "instances": 1})
    assert site.served.rest() == []


def test_cleanup_of_memory_tells_evicted_and_reclaimed_bytes(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    engine.manager.flush()  # else a write may pin some
    with engine.manager.query(engine.instance, list(numbered(3))):
        answer = site.ask("POST", "/cache/memory/cleanup")[1]
    assert answer == {"evicted_nbytes": 5 * BLOCK, "reclaimed_nbytes": 5 * BLOCK}
    assert engine.hits(list(numbered(3))) == 3, "what is leased stays"


def test_what_cleanup_evicts_is_counted_by_tier_and_class(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    engine.manager.flush()
    site.ask("POST", "/cache/memory/cleanup")
    found = site.samples()
    assert found["orbitkv_evicted_objects_total,tier=dram"] == 8
    assert found["orbitkv_evicted_class_total,class=probationary"] == 8


def test_cleanup_never_tells_less_than_nothing_reclaimed(
    site: Site, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    catalogue = site.served.core.catalogue
    engine.save(numbered(1))
    engine.manager.flush()
    evict = catalogue.evict_unpinned

    def evict_and_grant(tier: Tier) -> int:
        nbytes = evict(tier)
        assert catalogue.pool.allocate(2 * BLOCK) is not None  # as for a request that waited
        return nbytes

    monkeypatch.setattr(catalogue, "evict_unpinned", evict_and_grant)
    answer = site.ask("POST", "/cache/memory/cleanup")[1]
    assert answer == {"evicted_nbytes": BLOCK, "reclaimed_nbytes": 0}

    async def give_back() -> None:
        catalogue.pool.free(0, 2 * BLOCK)

    site.served.call(give_back())


def test_sync_returns_once_all_is_on_ssd(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    assert site.ask("POST", "/cache/sync") == (200, {"unwritten": 0})
    assert site.served.status().statistics.ssd_used_nbytes == 8 * BLOCK


def test_leaks_are_told_while_something_is_held(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    engine.manager.flush()
    with engine.manager.query(engine.instance, list(numbered(8))):
        assert "1 leases" in site.get("/debug/leaks")["leaks"]
    assert engine.manager.leaks() == []
    assert site.get("/debug/leaks") == {"leaks": []}


def test_the_chart_dashes_what_is_off(site: Site) -> None:
    text = site.get("/pipeline")
    assert text.startswith("flowchart LR")
    assert "%% save: P is off: " in text


@pytest.mark.parametrize("path", ["/instances/cleanup", "/cache/memory/cleanup", "/cache/sync"])
def test_a_web_page_may_change_nothing(site: Site, path: str) -> None:
    headers = {"Origin": "http://elsewhere.example"}
    assert site.ask("POST", path, headers=headers)[0] == 403
    assert site.ask("GET", path)[0] == 405


def test_metrics_follow_what_happens(site: Site, engine: Engine) -> None:
    engine.save(numbered(8))
    engine.manager.flush()
    engine.hits([*numbered(8), b"none"])
    engine.restored(numbered(8))
    found = site.samples()
    assert found["orbitkv_pool_used_bytes"] == 8 * BLOCK
    assert found["orbitkv_ssd_used_bytes"] == 8 * BLOCK
    assert found["orbitkv_sessions"] == 1
    assert found["orbitkv_queried_pages_total"] == 17
    assert found["orbitkv_found_pages_total"] == 16
    assert found["orbitkv_found_objects_total,tier=dram"] == 16
    assert found["orbitkv_ssd_bytes_total,direction=write"] == 8 * BLOCK
    assert found["orbitkv_ssd_writes_total,result=written"] == 8
    assert found["orbitkv_request_seconds_count,outcome=saved"] == 1
    assert found["orbitkv_request_seconds_count,outcome=restored"] == 1
    assert found["orbitkv_edge_passed_bytes_total,edge=C.dram > D.in,pipeline=save"] > 0
    assert found["orbitkv_node_available,node=P,pipeline=save"] == 0
    assert "process_resident_memory_bytes" in found
    assert found["orbitkv_saved_bytes_total,kind=logical"] == 8 * 512
    assert found["orbitkv_saved_bytes_total,kind=stored"] == 8 * BLOCK
    assert found["orbitkv_restored_bytes_total,kind=logical"] == 8 * 512
    assert found["orbitkv_restored_bytes_total,kind=stored"] == 8 * BLOCK
    assert found["orbitkv_query_used_bytes"] == 0
    assert found["orbitkv_query_budget_bytes"] == math.inf
    with engine.manager.query(engine.instance, list(numbered(3))):
        assert site.samples()["orbitkv_query_used_bytes"] == 3 * BLOCK


def test_arenas_are_told_by_lane() -> None:
    def read(name: str) -> object:
        (metric,) = (metric for metric in METRICS if metric.name == name)
        return metric.read(status)

    arenas = {"stream:save on cuda:0": ArenaStatistics(4096, 512)}
    status = SimpleNamespace(statistics=SimpleNamespace(arenas=arenas))
    assert read("orbitkv_arena_capacity_bytes") == [(("stream:save on cuda:0",), 4096)]
    assert read("orbitkv_arena_used_bytes") == [(("stream:save on cuda:0",), 512)]


def test_counters_that_have_a_metric_are_there_from_the_start(site: Site) -> None:
    found = site.samples()
    for named in COUNTERS.values():
        labels = [f"{name}={value}" for name, value in sorted(named.labels.items())]
        assert found[",".join([f"{named.metric}_total", *labels])] == 0


def test_a_new_counter_is_a_metric_by_itself(site: Site) -> None:
    async def count() -> None:
        site.served.core.catalogue.counters["raw_oversized"] += 2
        site.served.core.catalogue.counters["something_new"] += 3

    site.served.call(count())
    found = site.samples()
    assert found["orbitkv_raw_segments_total,reason=oversized"] == 2
    assert found["orbitkv_events_total,event=something_new"] == 3


def test_every_metric_is_documented_and_no_other() -> None:
    text = (ROOT / "docs" / "metrics.md").read_text()
    documented = {
        word.strip("`").partition("{")[0]
        for line in text.splitlines()
        if line.startswith("| `orbitkv_")
        for word in [line.split("|")[1].strip()]
    }
    assert documented == set(metric_names())


def test_the_dashboard_shows_only_metrics_that_are_there() -> None:
    text = (ROOT / "docs" / "monitoring" / "dashboard.json").read_text()
    shown = {name.removesuffix("_bucket") for name in re.findall(r"orbitkv_\w+", text)}
    assert shown <= set(metric_names())
    assert len(shown) > 10
    assert json.loads(text)["uid"] == "orbitkv"


@pytest.mark.parametrize("address", ["9477", "localhost:", "localhost:http", "localhost:70000"])
def test_a_wrong_address_is_one_line(address: str, site: Site) -> None:
    with pytest.raises(ConfigError, match=r"--http-addr: .*accepted: host:port, or off"):
        site.served.call(start_http(site.served.app, address))


def test_an_address_in_use_is_one_line(site: Site) -> None:
    served = site.served
    app = make_app(served.core, served.sessions, served.health, served.metrics)
    with pytest.raises(ConfigError, match="in use"):
        served.call(start_http(app, site.url.removeprefix("http://")))


def test_http_waits_for_nothing_that_a_lane_does(site: Site, engine: Engine, lanes: Lanes) -> None:
    gate = Gate()
    lanes.before["stream:save"] = gate.pass_through
    ticket = engine.manager.publish(engine.instance, numbered(8).items())
    gate.await_arrival()
    assert site.get("/health")["status"] == "ok"
    assert "1 tickets" in site.get("/debug/leaks")["leaks"]
    gate.open()
    assert isinstance(ticket.result(WAIT_S), Saved)
