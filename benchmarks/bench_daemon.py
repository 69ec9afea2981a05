"""What does the daemon cost beside a manager in the engine's own process?

``query``: 256 hashes, all hits, from the call to the lease; one client, then 64 at once, each of
which gives the lease back and asks again as soon as it has its answer; these are sessions on the
loops of four processes, as 64 clients with a thread each would wait for one interpreter's lock.
``load``: eight engines save and restore pages of 2 MiB as fast as they can, by the daemon from
processes of their own, and by one embedded manager from eight threads; both in windows that take
turns.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from measure import parser, report

from orbitkv import Client, Config, Geometry, Instance, Manager, ModelIdentity, Role, Slot
from orbitkv.config import GIB, MIB
from orbitkv.runtime.client import Session
from orbitkv.stages.ticket import Restored, Saved

Asked = Client | Manager

HASHES = 256
CLIENTS, CLIENT_PROCESSES = 64, 4
ENGINES, PAGES = 8, 24
WARMUP = 200
HELD = 32  # leases at once
POOL_NBYTES = GIB
TARGETS = {
    "query p50 us": ("<=", 300.0),
    "query p99 us": ("<=", 2000.0),
    "64 clients p99 us": ("<=", 20_000.0),
    "load, of embedded": (">=", 0.8),
    "memory grown": ("<=", 16.0),
}
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from orbitkv.cli import cache_manager; sys.exit(cache_manager())",
)


def geometry(segment_nbytes: int, slots: int) -> Geometry:
    """Slots of one segment each."""
    head_dim = segment_nbytes // 2
    return Geometry(
        1,
        tuple(
            Slot(name=f"k{i}", layer=i, role=Role.K, dtype="float16", heads=1, head_dim=head_dim)
            for i in range(slots)
        ),
    )


SMALL, LARGE = geometry(128, 2), geometry(64 * 2**10, 32)


def hashes(first: int, count: int) -> list[bytes]:
    """Distinct page hashes of 32 bytes."""
    return [n.to_bytes(32, "little") for n in range(first, first + count)]


def private_tensors(described: Geometry, pages: int) -> dict[str, Any]:
    """Tensors of an embedded engine, page after page as ``Client.allocate`` has them."""
    nbytes = described.page_nbytes
    whole = np.zeros((pages, nbytes), np.uint8)
    starts = np.cumsum((0, *described.segment_nbytes))
    return {
        slot.name: whole[:, a:b].view(slot.dtype).reshape(described.shape(slot, pages))
        for slot, a, b in zip(described.slots, starts, starts[1:], strict=False)
    }


@contextmanager
def daemon(*flags: str) -> Iterator[tuple[Path, int]]:
    """A daemon of its own; gives its socket and pid."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "socket"
        size = ("--pool-size", str(POOL_NBYTES), "--http-addr", "off", "--log-level", "warning")
        process = subprocess.Popen([*COMMAND, "--socket", str(path), *size, *flags])
        try:
            while not path.exists():
                time.sleep(0.05)
                if process.poll() is not None:
                    sys.exit("the daemon did not start")
            time.sleep(0.5)
            yield path, process.pid
        finally:
            process.send_signal(signal.SIGTERM)
            if process.wait(60):
                sys.exit("the daemon did not end well")


def fill(manager: Asked, name: str) -> Instance:
    """Register small pages, and save those that queries will ask for."""
    allocate = getattr(manager, "allocate", private_tensors)
    instance = manager.register(SMALL, allocate(SMALL, HASHES), model=ModelIdentity(name))
    outcome = manager.publish(instance, zip(hashes(0, HASHES), range(HASHES), strict=True)).result()
    assert isinstance(outcome, Saved)
    return instance


def query_times(manager: Asked, instance: Instance, count: int) -> list[float]:
    """Microseconds from each query's call to its lease; releases are waited for in between."""
    wanted, taken, held = hashes(0, HASHES), [], []
    for _ in range(count):
        began_s = time.perf_counter()
        lease = manager.query(instance, wanted)
        taken.append((time.perf_counter() - began_s) * 1e6)
        assert len(lease.hashes) == HASHES
        held.append(lease)
        if len(held) == HELD:
            while held:
                held.pop().release()
            manager.query(instance, []).release()  # behind all of them
    for lease in held:
        lease.release()
    return taken[min(WARMUP, count // 4) :]


def load(manager: Asked, instance: Instance, tensors: object, seconds: float) -> int:
    """Save new pages and restore them until the time is over; returns the bytes moved."""
    moved, first, until_s = 0, 0, time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        pages = dict(zip(hashes(first, PAGES), range(PAGES), strict=True))
        first += PAGES
        saved = manager.publish(instance, pages.items()).result()
        assert isinstance(saved, Saved), saved
        moved += len(saved.stored) * LARGE.page_nbytes
        lease = manager.query(instance, list(pages))
        outcome = manager.restore(lease, {page: pages[page] for page in lease.hashes}).result()
        if isinstance(outcome, Restored):
            moved += len(outcome.restored) * LARGE.page_nbytes
    assert tensors
    return moved


async def crowd_times(path: Path, clients: int, count: int) -> list[float]:
    """Microseconds of each query of as many sessions as clients, on this loop."""
    wanted, taken = tuple(hashes(0, HASHES)), []

    async def ask(session: Session, instance: Instance) -> None:
        for number in range(count):
            began_s = time.perf_counter()
            lease = await session.query(instance, wanted)
            if number >= min(WARMUP, count // 4):
                taken.append((time.perf_counter() - began_s) * 1e6)
            assert len(lease.hashes) == HASHES
            lease.release()

    async with AsyncExitStack() as opened:
        filled = []
        for index in range(clients):
            session = Session(path, deadline_s=10, long_deadline_s=60)
            await opened.enter_async_context(session)
            model = ModelIdentity(f"{os.getpid()}-{index}")
            instance = await session.register(SMALL, private_tensors(SMALL, HASHES), model)
            pages = tuple(zip(wanted, range(HASHES), strict=True))
            assert isinstance(await (await session.publish(instance, pages, None)), Saved)
            filled.append((session, instance))
        wait_for_start()
        await asyncio.gather(*(ask(*each) for each in filled))
    return taken


def wait_for_start() -> None:
    """Tell that this process is ready, and wait for all others."""
    print("ready", flush=True)
    sys.stdin.readline()


def work(args: argparse.Namespace) -> None:
    """Be one process of clients; print what it measured as JSON."""
    if args.count:
        print(json.dumps(uvloop.run(crowd_times(args.worker, args.clients, args.count))))
        return
    clients = [Client(args.worker) for _ in range(args.clients)]
    results: list[Any] = []

    def move(client: Client, name: str) -> None:
        tensors = client.allocate(LARGE, PAGES)
        for tensor in tensors.values():
            tensor[...] = 1
        instance = client.register(LARGE, tensors, model=ModelIdentity(name))
        for window_s in (1.0, args.seconds):
            wait_for_start()
            results.append(load(client, instance, tensors, window_s))

    threads = [
        threading.Thread(target=move, args=(client, f"{os.getpid()}-{index}"))
        for index, client in enumerate(clients)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for client in clients:
        client.close()
    print(json.dumps(results))


def workers(path: Path, count: int, *flags: str) -> list[subprocess.Popen[str]]:
    """Start processes of clients."""
    command = [sys.executable, __file__, "--worker", str(path), *flags]
    pipe = subprocess.PIPE
    return [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(count)]


def start_together(started: Sequence[subprocess.Popen[str]]) -> None:
    """Let processes go on once all of them are ready."""
    for process in started:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin
        process.stdin.write("\n")
        process.stdin.flush()


def many_clients(path: Path, queries: int) -> list[float]:
    """Query times of 64 clients at once."""
    flags = ("--clients", str(CLIENTS // CLIENT_PROCESSES), "--count", str(queries))
    started = workers(path, CLIENT_PROCESSES, *flags)
    start_together(started)
    return [t for process in started for t in json.loads(process.communicate()[0])]


def daemon_load(path: Path, pid: int, seconds: float) -> tuple[float, list[float]]:
    """GB/s of eight engines, and the daemon's own memory in MiB, once a second."""
    started = workers(path, ENGINES, "--seconds", str(seconds))
    memory: list[float] = []
    for _ in range(2):  # the first window warms up
        start_together(started)
        began_s = time.perf_counter()
        if memory or seconds < 1:
            break
        memory.append(own_memory_mib(pid))
    while time.perf_counter() - began_s < seconds:
        time.sleep(min(1.0, seconds / 4))
        memory.append(own_memory_mib(pid))
    moved = sum(json.loads(process.communicate()[0].splitlines()[-1])[-1] for process in started)
    return moved / (time.perf_counter() - began_s) / 1e9, memory[1:]


def embedded_load(seconds: float) -> float:
    """GB/s of eight threads with one manager."""
    with Manager(Config(pool_nbytes=POOL_NBYTES, compile_policies=True)) as manager:
        engines = []
        for index in range(ENGINES):
            tensors = private_tensors(LARGE, PAGES)
            model = ModelIdentity(f"engine-{index}")
            engines.append((manager.register(LARGE, tensors, model=model), tensors))
        for window_s in (1.0, seconds):
            moved: list[int] = []
            threads = [
                threading.Thread(target=_load_into, args=(moved, manager, *engine, window_s))
                for engine in engines
            ]
            began_s = time.perf_counter()
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        return sum(moved) / (time.perf_counter() - began_s) / 1e9


def _load_into(moved: list[int], *load_arguments: Any) -> None:  # noqa: ANN401 - of ``load``
    moved.append(load(*load_arguments))


def own_memory_mib(pid: int) -> float:
    """Anonymous resident memory, in which shared pages of engines are not counted."""
    text = Path(f"/proc/{pid}/status").read_text()
    line = next(line for line in text.splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) / 1024


def quantile(values: Sequence[float], share: float) -> float:
    """The value that ``share`` of all do not exceed."""
    return sorted(values)[min(len(values) - 1, int(len(values) * share))]


def main() -> None:
    """Measure, print, and exit 1 where a target is missed."""
    arguments = parser(__doc__)
    arguments.add_argument("--seconds", type=float, default=60.0, help="of each load (default: 60)")
    arguments.add_argument("--windows", type=int, default=1, help="of each load, in turns")
    arguments.add_argument("--queries", type=int, default=5000)
    arguments.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments.add_argument("--clients", type=int, default=1, help=argparse.SUPPRESS)
    arguments.add_argument("--count", type=int, default=0, help=argparse.SUPPRESS)
    args = arguments.parse_args()
    if args.worker:
        work(args)
        return
    found: dict[str, float] = {}
    with Manager(Config(pool_nbytes=64 * MIB, compile_policies=True)) as manager:
        instance = fill(manager, "embedded")
        embedded = query_times(manager, instance, args.queries)
    with daemon() as (path, _):
        with Client(path) as client:
            one = query_times(client, fill(client, "one"), args.queries)
        many = many_clients(path, max(10, args.queries // 50))
    rates, ratios, growth = [], [], []
    for _ in range(args.windows):
        with daemon() as (path, pid):
            rate, memory = daemon_load(path, pid, args.seconds)
        beside = embedded_load(args.seconds)
        rates.append((rate, beside))
        ratios.append(rate / beside)
        tenth = max(1, len(memory) // 10)
        growth.append(statistics.mean(memory[-tenth:]) - statistics.mean(memory[:tenth]))
    found["query p50 us"], found["query p99 us"] = quantile(one, 0.5), quantile(one, 0.99)
    found["64 clients p99 us"] = quantile(many, 0.99)
    found["load, of embedded"] = statistics.median(ratios)
    found["memory grown"] = max(growth)
    rows = [
        [
            name,
            found[name],
            f"{sign} {bound:g}",
            "yes" if _meets(found[name], sign, bound) else "no",
        ]
        for name, (sign, bound) in TARGETS.items()
    ]
    facts = {
        "embedded query p50 us": quantile(embedded, 0.5),
        "embedded query p99 us": quantile(embedded, 0.99),
        "64 clients p50 us": quantile(many, 0.5),
        "load GB/s, daemon and embedded": ", ".join(f"{a:.2f} and {b:.2f}" for a, b in rates),
        "memory grown": "MiB of RssAnon, the last tenth of the load less its first",
    }
    report(
        f"The daemon: queries of {HASHES} hashes, and {ENGINES} engines at full load",
        ("what", "measured", "target", "met"),
        rows,
        as_json=args.json,
        facts=facts,
    )
    if any(row[-1] == "no" for row in rows):
        sys.exit(1)


def _meets(value: float, sign: str, bound: float) -> bool:
    return value <= bound if sign == "<=" else value >= bound


if __name__ == "__main__":
    main()
