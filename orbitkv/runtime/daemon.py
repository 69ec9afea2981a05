"""The daemon ``orbitkv-cache-manager``: one a host, many engines."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import fcntl
import gc
import logging
import os
import re
import resource
import signal
import socket
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, NoReturn, cast, get_args

import structlog
import uvloop

from orbitkv.config import Config
from orbitkv.errors import ConfigError, GraphError, OrbitError
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime.client import default_socket
from orbitkv.runtime.core import Core
from orbitkv.runtime.flags import add_flags, build, read_file, settings_of, to_toml
from orbitkv.runtime.http import Health, make_app, parse_address, start_http
from orbitkv.runtime.metrics import Metrics
from orbitkv.runtime.sessions import Sessions

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]

EXIT_FAILED, EXIT_REFUSED = 1, 2
_BACKLOG = 512
_PID_LINE, _PID_NBYTES = re.compile(rb"(\d{1,10}\n)?"), 32


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """What a daemon is told besides its manager's settings.

    Attributes:
        socket: Unix socket on which engines come, mode 0600.
        http_addr: host:port of health and metrics, or off. It asks nobody who he is.
        devices: Ordinals of the GPUs whose pages are served, as 0,1; or all.
        max_sessions: Most engines' sessions at once.
        drain_s: How long SIGTERM waits for work under way before the daemon ends.
        log_level: Least level of the events that are logged.
        log_format: For people, or one JSON object a line.
    """

    socket: Path = field(default_factory=default_socket)
    http_addr: str = "127.0.0.1:9477"
    devices: str = "all"
    max_sessions: int = 256
    drain_s: float = 30.0
    log_level: LogLevel = "info"
    log_format: LogFormat = "console"

    def __post_init__(self) -> None:
        levels, formats = get_args(LogLevel), get_args(LogFormat)
        http_stands = self.http_addr == "off" or parse_address(self.http_addr) is not None
        for setting, stands, accepted in (
            ("socket", bool(self.socket.name), "the path of a socket"),
            ("http_addr", http_stands, "host:port, or off"),
            ("devices", self.ordinals is None or min(self.ordinals, default=0) >= 0, "all, or 0,1"),
            ("max_sessions", 1 <= self.max_sessions <= 2**16, "1 to 65536"),
            ("drain_s", 0 < self.drain_s < 2**31, "more than zero seconds"),
            ("log_level", self.log_level in levels, ", ".join(levels)),
            ("log_format", self.log_format in formats, ", ".join(formats)),
        ):
            if not stands:
                seen = getattr(self, setting)
                shown = str(seen) if isinstance(seen, Path) else seen
                raise ConfigError(f"{setting}: {shown!r}; accepted: {accepted}")

    @property
    def ordinals(self) -> frozenset[int] | None:
        """Of the GPUs that are served; None: all."""
        if self.devices == "all":
            return None
        try:
            return frozenset(int(ordinal) for ordinal in self.devices.split(","))
        except ValueError:
            return frozenset({-1})


class _Parser(argparse.ArgumentParser):
    """Says in one line what was wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(
    argv: Sequence[str] | None = None,
    *,
    notify_socket: str | None = None,
    nvcomp_library: str | None = None,
) -> int:
    """Run the daemon until it is told to end.

    Args:
        notify_socket: Where systemd wants to be told that the daemon is ready.
        nvcomp_library: ``Config.nvcomp_library`` where neither flag nor file says.

    Returns:
        0 where it ended as told, 1 where it failed, 2 where it could not start.
    """
    daemon_settings, manager_settings = settings_of(DaemonSettings), settings_of(Config)
    settings = (*daemon_settings, *manager_settings)
    parser = _Parser(
        prog="orbitkv-cache-manager", description="Keeps the KV cache of this host's engines."
    )
    parser.add_argument("--version", action="version", version=version("orbitkv"))
    parser.add_argument("--config", type=Path, metavar="FILE.toml", help="settings; flags win")
    parser.add_argument(
        "--print-config", action="store_true", help="print all settings as TOML, and end"
    )
    # A daemon has the time to compile its policies; an engine's process may not.
    defaults = {"nvcomp_library": nvcomp_library, "compile_policies": True}
    add_flags(parser.add_argument_group("the daemon"), daemon_settings, defaults)
    add_flags(parser.add_argument_group("its manager"), manager_settings, defaults)
    given = vars(parser.parse_args(argv))
    path, printed = given.pop("config"), given.pop("print_config")
    try:
        values: dict[str, Any] = dict(defaults)
        if path is not None:
            values |= read_file(path, settings)
        by_field = {setting.field: setting for setting in settings}
        values |= {name: by_field[name].parse(value) for name, value in given.items()}
        daemon = build(DaemonSettings, daemon_settings, values)
        config = build(Config, manager_settings, values)
        if printed:
            sys.stdout.write(to_toml(daemon, config) + "\n")
            return 0
        for source in (config.save_pipeline, config.restore_pipeline):
            load_pipeline(source)
        _raise_descriptor_limit()
        return run(daemon, config, notify=_notifier(notify_socket))
    except GraphError as error:
        sys.stderr.write(f"{parser.prog}: pipeline {error.name!r}: {'; '.join(error.faults)}\n")
        return EXIT_REFUSED
    except OrbitError as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return EXIT_REFUSED


def _raise_descriptor_limit() -> None:
    """Allow as many descriptors as this process may have: sessions and their memories take some."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # above what the kernel takes
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def run(daemon: DaemonSettings, config: Config, *, notify: Callable[[str], None]) -> int:
    """Serve until SIGTERM or SIGINT, and drain."""
    log = make_log(daemon)
    # A full collection walks all that the catalogue knows, and clients wait meanwhile.
    gc.set_threshold(50_000, 50, 100)
    with (
        listening(daemon.socket) as listener,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        return runner.run(_serve(daemon, config, listener, log, notify))


async def _serve(
    daemon: DaemonSettings,
    config: Config,
    listener: socket.socket,
    log: structlog.stdlib.BoundLogger,
    notify: Callable[[str], None],
) -> int:
    loop, told = asyncio.get_running_loop(), asyncio.Event()

    def end(number: int) -> None:
        name = signal.Signals(number).name
        if told.is_set():
            log.warning("ending_at_once", signal=name)
            daemon.socket.unlink(missing_ok=True)
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        log.info("ending", signal=name, within_s=daemon.drain_s)
        told.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end, number)
    async with AsyncExitStack() as opened:
        core = await opened.enter_async_context(Core(config, log=log))
        metrics = Metrics()
        sessions = Sessions(
            core,
            max_sessions=daemon.max_sessions,
            devices=daemon.ordinals,
            log=log,
            observe=metrics.observe,
        )
        health = Health(core, sessions)
        watching = asyncio.create_task(health.watch())
        opened.callback(watching.cancel)
        if daemon.http_addr != "off":
            app = make_app(core, sessions, health, metrics)
            http = await start_http(app, daemon.http_addr)
            opened.push_async_callback(http.cleanup)
        sessions.listen(listener)
        log.info(
            "serving",
            socket=str(daemon.socket),
            http=daemon.http_addr,
            pid=os.getpid(),
            incarnation=f"{sessions.host.incarnation:08x}",
        )
        notify("READY=1")
        await told.wait()
        notify("STOPPING=1")
        limit = loop.call_later(daemon.drain_s, _give_up, daemon, log)
        await sessions.stop_accepting()
        if not await sessions.drain(daemon.drain_s / 2):
            log.warning("drain_cut_short", after_s=daemon.drain_s / 2)
        await sessions.close("the daemon has ended")
        log.info("drained", leaks=await core.leaks())
    limit.cancel()
    return 0


def _give_up(daemon: DaemonSettings, log: structlog.stdlib.BoundLogger) -> None:
    """End although something under way has not: whoever waits for us was told how long."""
    log.error("drain_failed", after_s=daemon.drain_s)
    daemon.socket.unlink(missing_ok=True)
    os._exit(EXIT_FAILED)


@contextmanager
def listening(path: Path) -> Iterator[socket.socket]:
    """A listening socket at ``path`` for this user alone; removed in the end.

    A lock beside it tells a living daemon from one that left its socket behind.

    Raises:
        ConfigError: another daemon has it, or it cannot be made.
    """
    lock_path = path.with_name(f"{path.name}.lock")
    with contextlib.ExitStack() as opened:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
            lock = os.open(lock_path, flags, 0o600)
            opened.callback(os.close, lock)
            if not stat.S_ISREG(os.fstat(lock).st_mode) or not _PID_LINE.fullmatch(
                os.pread(lock, _PID_NBYTES, 0)
            ):
                raise ConfigError(
                    f"--socket: {path}: beside it, {lock_path.name} is no lock of a daemon's; "
                    "accepted: a path of its own"
                )
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                pid = os.pread(lock, _PID_NBYTES, 0).decode().strip() or "unknown"
                taken = f"the daemon with pid {pid} serves it"
                raise ConfigError(f"--socket: {path}: {taken}; accepted: one of its own") from None
            os.ftruncate(lock, 0)
            os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
            listener = opened.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            if path.exists() and not stat.S_ISSOCK(path.lstat().st_mode):
                raise ConfigError(
                    f"--socket: {path}: is there, and no socket; accepted: a new path"
                )
            path.unlink(missing_ok=True)  # of a daemon that was killed
            before = os.umask(0o177)
            try:
                listener.bind(str(path))
            finally:
                os.umask(before)
            opened.callback(path.unlink, missing_ok=True)
            listener.setblocking(False)  # noqa: FBT003 - the socket module's own signature
            listener.listen(_BACKLOG)
        except OSError as error:
            raise ConfigError(
                f"--socket: {path}: {error.strerror or error}; accepted: a path that can be made"
            ) from error
        yield listener


def make_log(daemon: DaemonSettings) -> structlog.stdlib.BoundLogger:
    """Log to standard error, what libraries say too."""
    before: list[Any] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
        structlog.processors.format_exc_info,
    ]
    renderer: Any = structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())
    if daemon.log_format == "json":
        renderer = structlog.processors.JSONRenderer(default=str)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(foreign_pre_chain=before, processor=renderer)
    )
    ours = logging.getLogger("orbitkv")
    ours.setLevel(daemon.log_level.upper())
    logging.basicConfig(level=logging.WARNING, handlers=[handler])
    return cast(
        "structlog.stdlib.BoundLogger",
        structlog.wrap_logger(
            ours,
            wrapper_class=structlog.stdlib.BoundLogger,
            processors=[
                structlog.stdlib.filter_by_level,
                *before,
                structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
            ],
        ),
    )


def _notifier(address: str | None) -> Callable[[str], None]:
    """Tells systemd of a change of state; nobody where it has not asked."""

    def notify(state: str) -> None:
        if not address:
            return
        name = f"\0{address[1:]}" if address.startswith("@") else address
        with (
            contextlib.suppress(OSError),
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sock,
        ):
            sock.sendto(state.encode(), name)

    return notify
