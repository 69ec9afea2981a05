"""Daemons for tests: one in a thread, whose lanes can be held up, and one as it is deployed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from orbitkv import Client, Config
from orbitkv.config import MIB
from orbitkv.runtime import wire
from orbitkv.runtime.connection import peer_credentials
from orbitkv.runtime.core import Core
from orbitkv.runtime.daemon import listening
from orbitkv.runtime.http import Health, make_app
from orbitkv.runtime.metrics import Metrics
from orbitkv.runtime.sessions import Sessions
from tests.builders import REST_S, WAIT_S, Lanes

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
COMMAND = (
    sys.executable,
    "-c",
    "import sys; from orbitkv.cli import cache_manager; sys.exit(cache_manager())",
)
Credentials = Callable[[socket.socket], tuple[int, int, int]]


class Served:
    """A daemon's inside, in a thread of the test's own process."""

    def __init__(
        self,
        path: Path,
        *,
        lanes: Lanes | None = None,
        max_sessions: int = 64,
        credentials: Credentials = peer_credentials,
        **settings: object,
    ) -> None:
        small = {"pool_nbytes": MIB, "ssd_cache_capacity_nbytes": MIB, "lock_memory": False}
        self.path = path
        self.config = Config(**{**small, **settings})  # type: ignore[arg-type]
        self._lanes = lanes
        self._max_sessions = max_sessions
        self._credentials = credentials
        self._started: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self._started.result(WAIT_S)

    def _run(self) -> None:
        try:
            with (
                listening(self.path) as listener,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(self._serve(listener))
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            if not self._started.done():
                self._started.set_exception(error)

    async def _serve(self, listener: socket.socket) -> None:
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        wrap = self._lanes.wrap if self._lanes else None
        async with Core(self.config, wrap_lane=wrap) as self.core:
            self.metrics = Metrics()
            self.sessions = Sessions(
                self.core,
                max_sessions=self._max_sessions,
                devices=None,
                log=self.core._log,
                credentials=self._credentials,
                observe=self.metrics.observe,
            )
            self.health = Health(self.core, self.sessions)
            self.app = make_app(self.core, self.sessions, self.health, self.metrics)
            self.sessions.listen(listener)
            self._started.set_result(None)
            await self._stop.wait()
            await self.sessions.stop_accepting()
            await self.sessions.close("the daemon has ended")

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the daemon's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(WAIT_S)

    def status(self) -> wire.DaemonStatus:
        return self.call(self.sessions.status())

    def leaks(self) -> list[str]:
        return self.call(self.core.leaks())

    def rest(self, *, sessions: int = 0) -> list[str]:
        """What the daemon holds once sessions have had the time to end."""

        def found() -> list[str]:
            status = self.status()
            held = [f"{status.sessions} sessions"] if status.sessions > sessions else []
            if not sessions and status.instances:
                held.append(f"{status.instances} instances")
            return held + self.leaks()

        return settled(found)

    def stop(self) -> bool:
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        return not self._thread.is_alive()


def settled(found: Callable[[], list[str]]) -> list[str]:
    """What is still found once it has had the time to go."""
    deadline = time.monotonic() + REST_S
    while (held := found()) and time.monotonic() < deadline:
        time.sleep(0.005)
    return held


@dataclass
class DaemonProcess:
    """``orbitkv-cache-manager`` as it is deployed."""

    path: Path
    process: subprocess.Popen[str]

    @classmethod
    def start(cls, path: Path, *flags: str, **options: object) -> DaemonProcess:
        """Start, and wait until clients are taken."""
        defaults = ("--pool-size", "16mb", "--no-lock-memory", "--http-addr", "off")
        process = subprocess.Popen(
            [*COMMAND, "--socket", str(path), *defaults, *flags],
            cwd=ROOT,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        daemon = cls(path, process)
        deadline = time.monotonic() + WAIT_S
        while not daemon.takes_clients():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                raise AssertionError(f"no daemon: {process.communicate()[1]}")
            time.sleep(0.02)
        return daemon

    def takes_clients(self) -> bool:
        try:
            Client(self.path).close()
        except Exception:  # noqa: BLE001 - any refusal means: not yet
            return False
        return True

    def send(self, number: int) -> None:
        self.process.send_signal(number)

    def kill(self) -> None:
        self.send(signal.SIGKILL)
        self.process.communicate(timeout=WAIT_S)

    def end(self) -> tuple[int, str]:
        """Exit code and standard error, once told to end."""
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
        _, said = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, said


@contextlib.contextmanager
def raw_session(path: Path, *, hello: bool = True) -> Iterator[socket.socket]:
    """A client's bare socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(WAIT_S)
        sock.connect(str(path))
        if hello:
            sock.sendall(wire.encode(wire.Hello(1, wire.VERSION)))
            assert isinstance(read_reply(sock), wire.Welcome)
        yield sock


def read_reply(sock: socket.socket) -> object:
    """The next message of the daemon; None once it has closed."""
    header = _read(sock, 4)
    if header is None:
        return None
    payload = _read(sock, struct.unpack("<I", header)[0])
    return None if payload is None else wire.REPLIES.decode(payload)


def last_reply(sock: socket.socket) -> object:
    """The last message before the daemon closes."""
    last = None
    while (reply := read_reply(sock)) is not None:
        last = reply
    return last


def _read(sock: socket.socket, nbytes: int) -> bytes | None:
    received = b""
    while len(received) < nbytes:
        try:
            more = sock.recv(nbytes - len(received))
        except ConnectionError:
            return None
        if not more:
            return None
        received += more
    return received


def descriptors() -> int:
    """How many this process has open; a mapping keeps one until its last array is gone."""
    gc.collect()
    return len(tuple(Path("/proc/self/fd").iterdir()))
