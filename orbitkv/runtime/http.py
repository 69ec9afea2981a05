"""HTTP: what people and Prometheus ask of a daemon. On loopback unless told otherwise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from aiohttp import web

from orbitkv.cache.catalogue import Tier
from orbitkv.errors import ConfigError, SessionLost
from orbitkv.graph import Chart
from orbitkv.runtime.core import Core
from orbitkv.runtime.metrics import Metrics
from orbitkv.runtime.sessions import Sessions

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

# Counters of what should not happen; while one of them has risen lately, health is degraded.
FAULTS: Mapping[str, str] = {
    "ssd_write_faults": "writes to SSD failed",
    "ssd_read_faults": "reads from SSD failed",
    "corrupt_dram": "objects in DRAM were found damaged",
    "corrupt_ssd": "objects on SSD were found damaged",
    "ssd_checkpoint_faults": "checkpoints of the SSD index failed",
    "undecodable": "objects could not be decoded",
}
_RECENT_S = 60.0
_SAMPLE_S = 5.0
_SHUTDOWN_S = 1.0  # for requests that have not come whole


class Health:
    """Whether a daemon is well: no pipeline has stopped, and nothing has failed lately."""

    def __init__(self, core: Core, sessions: Sessions) -> None:
        self._core = core
        self._sessions = sessions
        self._seen: dict[str, int] = {}
        self._risen_s: dict[str, float] = {}

    async def watch(self) -> None:
        """Look at the counters now and then, so that what has risen has a time."""
        while True:
            await self.reasons()
            await asyncio.sleep(_SAMPLE_S)

    async def reasons(self) -> list[str]:
        """Why health is degraded; empty where all is well."""
        counters = (await self._core.statistics()).counters
        now_s = time.monotonic()
        for name in FAULTS:
            count = counters.get(name, 0)
            if count > self._seen.get(name, 0):
                self._risen_s[name] = now_s
            self._seen[name] = count
        found = self._core.faults()
        found += [
            f"{FAULTS[name]} in the last {_RECENT_S:.0f} s ({self._seen[name]} in all)"
            for name, risen_s in self._risen_s.items()
            if now_s - risen_s < _RECENT_S
        ]
        if self._sessions.host.draining:
            found.append("the daemon is ending")
        return found


def make_app(core: Core, sessions: Sessions, health: Health, metrics: Metrics) -> web.Application:
    """Make the application; every answer but ``/metrics`` and ``/pipeline`` is JSON."""
    pages = _Pages(core, sessions, health, metrics)
    app = web.Application(middlewares=[_refuse_browsers], client_max_size=64 * 2**10)
    app.add_routes(
        [
            web.get("/health", pages.health),
            web.get("/metrics", pages.metrics),
            web.get("/pipeline", pages.pipeline),
            web.get("/instances", pages.instances),
            web.post("/instances/cleanup", pages.clean_instances),
            web.post("/cache/memory/cleanup", pages.clean_memory),
            web.post("/cache/sync", pages.sync),
            web.get("/debug/leaks", pages.leaks),
        ]
    )
    return app


def parse_address(address: str) -> tuple[str, int] | None:
    """Host and port of ``host:port``; None where it is no such thing."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) >= 2**16:
        return None
    return host.strip("[]"), int(port)


async def start_http(app: web.Application, address: str) -> web.AppRunner:
    """Serve on ``host:port``; ``runner.cleanup()`` ends it.

    Raises:
        ConfigError: the address cannot be used.
    """
    place = parse_address(address)
    if place is None:
        raise ConfigError(f"--http-addr: {address!r}; accepted: host:port, or off")
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=_SHUTDOWN_S)
    await runner.setup()
    try:
        await web.TCPSite(runner, *place).start()
    except OSError as error:
        await runner.cleanup()
        raise ConfigError(f"--http-addr: {address!r}: {error.strerror or error}") from error
    return runner


@web.middleware
async def _refuse_browsers(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Refuse to change anything for a page that a browser has open: it may be anybody's."""
    if request.method != "GET" and "Origin" in request.headers:
        raise web.HTTPForbidden(text="requests of web pages are not accepted")
    return await handler(request)


class _Pages:
    """One method an address."""

    def __init__(self, core: Core, sessions: Sessions, health: Health, metrics: Metrics) -> None:
        self._core = core
        self._sessions = sessions
        self._health = health
        self._metrics = metrics

    async def health(self, _: web.Request) -> web.Response:
        """``ok``, or ``degraded`` with reasons, and then status 503."""
        reasons = await self._health.reasons()
        answer = {"status": "degraded" if reasons else "ok", "reasons": reasons}
        return web.json_response(answer, status=503 if reasons else 200)

    async def metrics(self, _: web.Request) -> web.Response:
        """Prometheus' text format."""
        reasons = await self._health.reasons()
        body = self._metrics.render(await self._sessions.status(), len(reasons))
        return web.Response(body=body, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def pipeline(self, _: web.Request) -> web.Response:
        """The chart as Mermaid; what is off here is dashed."""
        chart, dashed, notes = Chart({}, ()), set(), []
        for graph, off in self._core.graphs():
            chart |= graph.chart
            dashed |= {(e.src, e.dst) for e in graph.edges if e.src in off or e.dst in off}
            notes += [f"%% {graph.name}: {node_id} is off: {why}" for node_id, why in off.items()]
        return web.Response(text="\n".join([chart.to_mermaid(dashed=frozenset(dashed)), *notes]))

    async def instances(self, _: web.Request) -> web.Response:
        """Every registration."""
        return web.json_response(
            [
                {
                    "instance": str(handle),
                    "pid": served.pid,
                    "namespace": served.instance.namespace,
                    "pages": served.instance.tensors.pages,
                    "page_nbytes": served.instance.geometry.page_nbytes,
                    "device": served.instance.tensors.device,
                    "tickets": len(served.instance.tickets),
                    "leases": sum(
                        lease.instance is served.instance and not lease.spent
                        for lease in session.leases.values()
                    ),
                }
                for session in self._sessions.live
                for handle, served in session.instances.items()
            ]
        )

    async def clean_instances(self, _: web.Request) -> web.Response:
        """End the sessions of processes that are gone, though somebody holds their socket."""
        gone = [session for session in self._sessions.live if not _is_alive(session.pid)]
        instances = sum(len(session.instances) for session in gone)
        for session in gone:
            session.end(SessionLost("its process has gone"))
        return web.json_response({"sessions": len(gone), "instances": instances})

    async def clean_memory(self, _: web.Request) -> web.Response:
        """Evict all of DRAM that nobody reads.

        Reclaimed is what is free afterwards and was not: less, where requests waited for it.
        """
        catalogue = self._core.catalogue
        used_nbytes = catalogue.pool.used_nbytes
        evicted_nbytes = catalogue.evict_unpinned(Tier.DRAM)
        reclaimed_nbytes = max(0, used_nbytes - catalogue.pool.used_nbytes)
        return web.json_response(
            {"evicted_nbytes": evicted_nbytes, "reclaimed_nbytes": reclaimed_nbytes}
        )

    async def sync(self, _: web.Request) -> web.Response:
        """Write to SSD what it lacks, and wait for that."""
        flushed = await self._core.flush(evict_dram=False)
        return web.json_response({"unwritten": flushed.unwritten})

    async def leaks(self, _: web.Request) -> web.Response:
        """What is not as it must be at rest."""
        found: list[Any] = await self._core.leaks()
        return web.json_response({"leaks": found})


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
