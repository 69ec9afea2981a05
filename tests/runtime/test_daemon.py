"""The daemon as a process: how it starts, is found, drains and dies, and what its engines see."""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from rich.console import Console
from rich.screen import Screen

from orbitkv import Client, Config
from orbitkv.errors import ConfigError, OrbitError, SessionLost
from orbitkv.runtime.daemon import DaemonSettings, listening, main
from orbitkv.runtime.flags import add_flags, build, read_file, settings_of, to_toml
from orbitkv.stages.ticket import Failed, Restored, Saved
from orbitkv.top import render
from tests.builders import WAIT_S, Engine, big_geometry, definition, numbered
from tests.serving import COMMAND, ROOT, DaemonProcess, settled

ORBITKV = (sys.executable, "-m", "orbitkv.cli")
DaemonFactory = Callable[..., DaemonProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[DaemonFactory]:
    """Start daemons; those that still run at the end must end as told, and hold nothing."""
    daemons: list[DaemonProcess] = []

    def start_one(*flags: str, **options: object) -> DaemonProcess:
        daemons.append(DaemonProcess.start(tmp_path / "s", *flags, **options))
        return daemons[-1]

    yield start_one
    for daemon in daemons:
        if daemon.process.poll() is None:
            daemon.send(signal.SIGCONT)
            code, said = daemon.end()
            assert code == 0, said
            assert "leaks=[]" in said, said


ENGINE = """
import sys, time
import numpy as np
from orbitkv import Client, Config
from tests.builders import Engine, big_geometry, numbered
path, what = sys.argv[1:]
client = Client(path)
engine = Engine.register(client, pages=64, geometry=big_geometry(2**16), seed=3, name="victim")
engine.save(numbered(32))
print("ready", flush=True)
while True:
    if what == "save":
        engine.manager.publish(engine.instance, numbered(32, first=int(time.time() * 1e6)).items())
    elif what == "restore":
        lease = client.query(engine.instance, list(numbered(32)))
        client.restore(lease, {page: numbered(32)[page] for page in lease.hashes})
    else:
        client.query(engine.instance, list(numbered(32)))
    time.sleep(0.001)
"""


# Engines that die ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["save", "restore", "lease"])
def test_a_killed_engine_is_noticed_by_nobody(start: DaemonFactory, what: str) -> None:
    daemon = start()
    with Client(daemon.path) as client:
        engine = Engine.register(client)
        wanted = [engine.page(index) for index in range(8)]
        victim = subprocess.Popen(
            [sys.executable, "-c", ENGINE, str(daemon.path), what],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        assert victim.stdout
        assert victim.stdout.readline() == "ready\n"
        time.sleep(0.1)
        assert client.status().sessions == 2
        victim.kill()
        victim.communicate()
        assert settled(lambda: ["open"] * (client.status().sessions - 1)) == []
        assert settled(client.leaks) == []
        assert len(engine.save(numbered(8)).dropped) == 0
        for tensor in engine.tensors.values():
            tensor[...] = 0
        assert len(engine.restored(numbered(8))) == 8
        assert [engine.page(index) for index in range(8)] == wanted


# Daemons that die ------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["save", "restore", "lease"])
def test_a_killed_daemon_is_told_at_once_and_its_successor_starts_clean(
    start: DaemonFactory, what: str
) -> None:
    daemon = start()
    client = Client(daemon.path)
    engine = Engine.register(client, pages=64, geometry=big_geometry(2**16))
    wanted = [engine.page(index) for index in range(32)]
    engine.save(numbered(32))
    incarnation = client.status().incarnation
    lease = client.query(engine.instance, list(numbered(32)))
    tickets = []
    if what == "save":
        tickets = [client.publish(engine.instance, numbered(64, first=32).items())]
    elif what == "restore":
        tickets = [client.restore(lease, numbered(32))]
    daemon.kill()
    began_s = time.monotonic()
    outcomes = [ticket.result(WAIT_S) for ticket in tickets]

    def query_on() -> None:
        while True:
            client.query(engine.instance, list(numbered(32)))

    with pytest.raises(SessionLost, match="register again in a new session"):
        query_on()
    assert time.monotonic() - began_s < 1.0
    assert all(
        isinstance(outcome, Saved | Restored)
        or (isinstance(outcome, Failed) and isinstance(outcome.error, SessionLost))
        for outcome in outcomes
    )
    with pytest.raises(SessionLost):
        client.restore(lease, numbered(32))
    lease.release()
    client.close()
    assert daemon.path.exists(), "a killed daemon leaves its socket"
    start()
    with Client(daemon.path) as again:
        assert again.status().incarnation != incarnation
        fresh = Engine.register(again, pages=64, geometry=big_geometry(2**16))
        assert fresh.hits(list(numbered(32))) == 0, "a new start is cold"
        fresh.save(numbered(32))
        fresh.clear()
        assert len(fresh.restored(numbered(32))) == 32
        assert [fresh.page(index) for index in range(32)] == wanted


def test_a_stopped_daemon_is_told_by_the_deadline(start: DaemonFactory) -> None:
    daemon = start()
    with Client(daemon.path, deadline_s=0.3) as client:
        engine = Engine.register(client)
        daemon.send(signal.SIGSTOP)
        began_s = time.monotonic()
        with pytest.raises(OrbitError, match=r"no answer to query in 0\.3 s"):
            client.query(engine.instance, [])
        outcome = client.publish(engine.instance, numbered(2).items()).result(WAIT_S)
        assert isinstance(outcome, Failed)
        assert time.monotonic() - began_s < 3.0
        daemon.send(signal.SIGCONT)


# Ending ----------------------------------------------------------------------------------------


def test_sigterm_drains_what_is_under_way_and_exits_0(start: DaemonFactory) -> None:
    daemon = start("--log-format", "json")
    client = Client(daemon.path)
    engine = Engine.register(client, pages=64, geometry=big_geometry(2**17))
    ticket = client.publish(engine.instance, numbered(64).items())
    while not client.status().tickets and not ticket.done:
        pass
    code, said = daemon.end()
    assert code == 0
    assert isinstance(ticket.result(WAIT_S), Saved)
    assert not daemon.path.exists()
    with pytest.raises(SessionLost, match="the daemon has ended"):
        client.query(engine.instance, [])
    client.close()
    events = [json.loads(line) for line in said.splitlines()]
    by_name = {event["event"]: event for event in events}
    assert by_name["ending"]["within_s"] == 30.0
    assert by_name["drained"]["leaks"] == []
    assert {"timestamp", "level"} <= by_name["serving"].keys()


def test_an_idle_client_does_not_hold_up_the_end(start: DaemonFactory) -> None:
    daemon = start()
    with Client(daemon.path) as client:
        Engine.register(client)
        began_s = time.monotonic()
        code, _ = daemon.end()
        assert code == 0
        assert time.monotonic() - began_s < 3.0


@pytest.fixture
def stuck(start: DaemonFactory, tmp_path: Path) -> Callable[..., tuple[DaemonProcess, Client]]:
    """Start a daemon whose saves never end, and have a client begin one."""
    (tmp_path / "holding.py").write_text(
        textwrap.dedent("""
        import asyncio
        from tests.builders import PlannedEncode

        class Holding(PlannedEncode):
            def __init__(self):
                super().__init__("none")

            async def run(self, batch, ctx):
                await asyncio.sleep(3600)
        """)
    )
    edit = ('stages = ["encode", "crc32"]', 'stages = ["encode", "holding:Holding", "crc32"]')
    paths = os.pathsep.join((str(tmp_path), str(ROOT)))

    def begin(*flags: str) -> tuple[DaemonProcess, Client]:
        held = definition(tmp_path, "save", edit)
        daemon = start("--save-pipeline", held, *flags, env={**os.environ, "PYTHONPATH": paths})
        client = Client(daemon.path)
        engine = Engine.register(client)
        client.publish(engine.instance, numbered(8).items())
        assert settled(lambda: ["none"] * (not client.status().tickets)) == []
        return daemon, client

    return begin


def test_a_second_signal_is_obeyed_at_once(
    stuck: Callable[..., tuple[DaemonProcess, Client]],
) -> None:
    daemon, client = stuck()
    daemon.send(signal.SIGTERM)
    time.sleep(0.2)
    assert daemon.process.poll() is None, "it drains"
    began_s = time.monotonic()
    daemon.send(signal.SIGTERM)
    daemon.process.communicate(timeout=WAIT_S)
    assert daemon.process.returncode == -signal.SIGTERM
    assert time.monotonic() - began_s < 1.0
    assert not daemon.path.exists()
    client.close()


def test_a_daemon_that_cannot_drain_ends_in_the_time_it_stated(
    stuck: Callable[..., tuple[DaemonProcess, Client]],
) -> None:
    daemon, client = stuck("--drain-s", "0.6")
    began_s = time.monotonic()
    code, said = daemon.end()
    assert code == 1
    assert 0.5 < time.monotonic() - began_s < 3.0
    assert "drain_cut_short" in said
    assert "drain_failed" in said
    assert not daemon.path.exists()
    client.close()


# The socket ------------------------------------------------------------------------------------


def test_the_socket_is_for_its_user_alone(start: DaemonFactory) -> None:
    daemon = start()
    assert stat.S_IMODE(daemon.path.stat().st_mode) == 0o600


def test_a_second_daemon_is_refused_with_the_firsts_pid(start: DaemonFactory) -> None:
    daemon = start()
    command = [*COMMAND, "--socket", str(daemon.path), "--pool-size", "1mb", "--http-addr", "off"]
    second = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert second.returncode == 2
    pid = daemon.process.pid
    assert second.stderr == (
        f"orbitkv-cache-manager: --socket: {daemon.path}: the daemon with pid {pid} serves it; "
        "accepted: one of its own\n"
    )
    with Client(daemon.path) as client:
        assert client.status().pid == pid


def test_a_socket_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    with listening(path) as listener:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))
        assert listener.fileno() >= 0
    assert not path.exists()


def test_what_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="no socket; accepted: a new path"), listening(path):
        pass
    assert path.read_text() == "mine"


@pytest.mark.parametrize("kind", ["symlink", "notes", "fifo"])
def test_a_lock_that_is_not_ours_is_left_alone(tmp_path: Path, kind: str) -> None:
    lock, notes = tmp_path / "s.lock", tmp_path / "notes.txt"
    notes.write_text("mine")
    if kind == "symlink":
        lock.symlink_to(notes)
    elif kind == "notes":
        lock.write_text("mine")
    else:
        os.mkfifo(lock)
    with (
        pytest.raises(ConfigError, match=r"--socket: .*accepted: a path"),
        listening(tmp_path / "s"),
    ):
        pass
    assert notes.read_text() == "mine"
    assert kind != "notes" or lock.read_text() == "mine"


def test_a_lock_left_behind_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "s.lock").write_text("123456\n")
    with listening(tmp_path / "s"):
        assert (tmp_path / "s.lock").read_text() == f"{os.getpid()}\n"


def test_as_many_descriptors_are_allowed_as_can_be(start: DaemonFactory) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    def lower() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(512, hard), hard))

    daemon = start(preexec_fn=lower)
    assert resource.prlimit(daemon.process.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_half_a_request_over_http_does_not_hold_up_the_end(start: DaemonFactory) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    daemon = start("--http-addr", f"127.0.0.1:{port}", "--drain-s", "5")
    with socket.create_connection(("127.0.0.1", port)) as sock:
        sock.sendall(b"POST /cache/sync HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
        assert sock.recv(1)
        code, said = daemon.end()
    assert code == 0, said


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 120)
    with pytest.raises(ConfigError, match=r"--socket: .*path too long"), listening(path):
        pass


def test_systemd_is_told_when_clients_are_taken(start: DaemonFactory, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(WAIT_S)
        daemon = start(env={**os.environ, "NOTIFY_SOCKET": str(tmp_path / "notify")})
        assert systemd.recv(64) == b"READY=1"
        daemon.end()
        assert systemd.recv(64) == b"STOPPING=1"


# Flags and files -------------------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    code: object
    try:
        code = main(argv)
    except SystemExit as stopped:
        code = stopped.code
    assert code == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1, "one line"
    return said.removeprefix("orbitkv-cache-manager: ").rstrip("\n")


def test_every_setting_is_a_flag_with_a_help_of_its_own() -> None:
    settings = (*settings_of(DaemonSettings), *settings_of(Config))
    flags = [setting.flag for setting in settings]
    assert len(set(flags)) == len(flags)
    assert [setting.flag for setting in settings if not setting.help] == []
    wanted = {
        "--pool-size",
        "--storage-codec",
        "--storage-codec-budget",
        "--ssd-cache-path",
        "--ssd-cache-capacity",
        "--ssd-backend",
        "--devices",
        "--socket",
        "--http-addr",
        "--log-level",
        "--log-format",
        "--save-pipeline",
        "--restore-pipeline",
    }
    assert wanted <= set(flags)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--pool-size", "many"), "--pool-size: 'many' is not a size; accepted: a number of bytes"),
        (("--pool-size", "0"), "--pool-size: 0; accepted: a positive number of bytes"),
        (
            ("--pool-size", "4kb", "--query-budget", "8kb"),
            "--query-budget: 8192; accepted: no more than the pool, which is 4096",
        ),
        (("--storage-codec", "zip"), "--storage-codec: 'zip'; accepted: none, fp8"),
        (("--max-sessions", "few"), "--max-sessions: 'few'; accepted: a whole number"),
        (("--devices", "0,x"), "--devices: '0,x'; accepted: all, or 0,1"),
        (("--log-format", "xml"), "--log-format: 'xml'; accepted: console, json"),
        (("--drain-s", "0"), "--drain-s: 0.0; accepted: more than zero seconds"),
        (("--socket", ""), "--socket: '.'; accepted: the path of a socket"),
        (("--http-addr", "foo"), "--http-addr: 'foo'; accepted: host:port, or off"),
        (
            ("--save-pipeline", "nonexist"),
            "pipeline 'nonexist': No such file or directory; accepted: a file, or one of restore",
        ),
        (
            ("--query-budget", "1mb", "--query-instance-budget", "2mb"),
            "--query-instance-budget: 2097152; accepted: no more than that of all instances",
        ),
        (("--ssd-persist",), "--ssd-persist: True without ssd_cache_paths"),
        (("--no-such-flag",), "unrecognized arguments: --no-such-flag"),
        (("--config", "/nonexistent.toml"), "--config: /nonexistent.toml: [Errno 2]"),
    ],
    ids=lambda value: value[0].removeprefix("--") if isinstance(value, tuple) else None,
)
def test_a_wrong_flag_is_one_line(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], said: str
) -> None:
    assert refusal(capsys, *argv).startswith(said)


def test_help_is_in_the_words_of_a_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "``" not in said
    assert "None" not in said
    assert "Not given: as --ssd-backend." in said
    assert "driver. (default: on)" in said, "a daemon compiles its policies"
    assert "whole 4 KiB blocks. (default: 1 GiB)" in said


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('pool = "1gb"\ncolour = 1', "unknown colour, pool; accepted: socket, "),
        ("pool_size = true", "--pool-size: True is not a size"),
        ("pool_size = -1", "--pool-size: -1 is not a size"),
        ("lock_memory = 1", "--lock-memory: 1; accepted: true or false"),
        ("max_sessions = 1.5", "--max-sessions: 1.5; accepted: a whole number"),
        ("socket = 3", "--socket: 3; accepted: text"),
        ("pool_size =", "Invalid value"),
    ],
)
def test_a_wrong_file_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "d.toml"
    path.write_text(text)
    assert said in refusal(capsys, "--config", str(path))


def test_flags_win_over_the_file_and_all_is_printed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "d.toml"
    path.write_text(
        'pool_size = "8gb"\nstorage_codec = "fp8"\nssd_cache_path = ["/a/x", "/b/y"]\ndrain_s = 3\n'
    )
    assert main(["--config", str(path), "--pool-size", "2gb", "--print-config"]) == 0
    printed = capsys.readouterr().out
    assert 'pool_size = "2 GiB"' in printed
    assert 'storage_codec = "fp8"' in printed
    again = tmp_path / "again.toml"
    again.write_text(printed)
    assert main(["--config", str(again), "--print-config"]) == 0
    assert capsys.readouterr().out == printed


def test_a_field_that_is_added_is_a_flag_by_itself() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Settings:
        """What may come.

        Attributes:
            query_budget_nbytes: Most bytes that leases pin.
            cache_protected_percent, other_percent: Share of the pool, 0 to 100;
                zero: none.
            enable_lfu_admission: Whether.
            ssd_write_policy: Which.
        """

        query_budget_nbytes: int | None = None
        cache_protected_percent: int = 0
        other_percent: float = 1.5
        enable_lfu_admission: bool = False
        ssd_write_policy: Literal["all", "reuse"] = "all"

    settings = settings_of(Settings)
    parser = argparse.ArgumentParser()
    add_flags(parser.add_argument_group("all"), settings)
    given = vars(
        parser.parse_args(
            ["--query-budget", "3gb", "--cache-protected-percent", "80", "--enable-lfu-admission"]
        )
    )
    by_field = {setting.field: setting for setting in settings}
    values = {name: by_field[name].parse(value) for name, value in given.items()}
    wanted = Settings(
        query_budget_nbytes=3 * 2**30, cache_protected_percent=80, enable_lfu_admission=True
    )
    assert build(Settings, settings, values) == wanted
    assert by_field["other_percent"].help == "Share of the pool, 0 to 100; zero: none."
    assert 'ssd_write_policy = "all"' in to_toml(wanted)
    assert "--ssd-write-policy all|reuse" in parser.format_help()


def test_printed_settings_read_back_as_the_same(tmp_path: Path) -> None:
    config = Config(pool_nbytes=12345, ssd_cache_paths=("/a/b", "/c/d"), pool_wait_s=0.25)
    daemon = DaemonSettings(devices="0,1", socket=Path("/x/y"))
    settings = (*settings_of(DaemonSettings), *settings_of(Config))
    path = tmp_path / "printed.toml"
    path.write_text(to_toml(daemon, config))
    values = read_file(path, settings)
    assert build(Config, settings, values) == config
    assert build(DaemonSettings, settings, values) == daemon
    assert daemon.ordinals == frozenset({0, 1})


# The commands ----------------------------------------------------------------------------------


def orbitkv(*argv: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ORBITKV, *argv], capture_output=True, text=True, cwd=ROOT, check=False)


def test_status_tells_what_the_daemon_holds(start: DaemonFactory) -> None:
    daemon = start()
    with Client(daemon.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(8))
        said = json.loads(orbitkv("status", "--json", "--socket", str(daemon.path)).stdout)
        assert (said["pid"], said["instances"]) == (daemon.process.pid, 1)
        assert said["statistics"]["pool_used_nbytes"] == 8 * 4096
        table = orbitkv("status", "--socket", str(daemon.path)).stdout
        assert f"pid {daemon.process.pid}" in table
        assert "C.dram > D.in" in table


def test_status_without_a_daemon_is_one_line(tmp_path: Path) -> None:
    said = orbitkv("status", "--socket", str(tmp_path / "none"))
    assert said.returncode == 2
    assert said.stderr.startswith("orbitkv: no daemon at ")


def test_top_shows_what_passes_until_interrupted(start: DaemonFactory) -> None:
    daemon = start()
    top = subprocess.Popen(
        [*ORBITKV, "top", "--interval-s", "0.1", "--socket", str(daemon.path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    with Client(daemon.path) as client:
        engine = Engine.register(client)
        assert settled(lambda: ["none"] * (client.status().sessions < 2)) == []
        engine.save(numbered(8))
        engine.hits(list(numbered(8)))
        time.sleep(0.5)
    top.send_signal(signal.SIGINT)
    said, _ = top.communicate(timeout=WAIT_S)
    assert top.returncode == 130
    assert "Arrows" in said


def test_top_shows_every_arrow_on_a_terminal_of_24_lines(
    start: DaemonFactory, tmp_path: Path
) -> None:
    daemon = start("--ssd-cache-path", str(tmp_path / "kv"), "--ssd-cache-capacity", "1mb")
    with Client(daemon.path) as client:
        status = client.status()
    console = Console(width=80, height=24, force_terminal=True, file=io.StringIO())
    with console.capture() as shown:
        console.print(Screen(render(status, None)))
    arrows = [c.name for channels in status.statistics.channels.values() for c in channels]
    assert len(arrows) >= 10
    assert [arrow for arrow in arrows if arrow not in shown.get()] == []


def test_a_hundred_connections_a_second_are_borne(start: DaemonFactory) -> None:
    daemon = start()
    with Client(daemon.path) as client:
        engine = Engine.register(client)
        engine.save(numbered(8))
        stop, made = threading.Event(), [0]

        def come_and_go() -> None:
            while not stop.is_set():
                with socket.socket(socket.AF_UNIX) as sock:
                    sock.connect(str(daemon.path))
                made[0] += 1
                time.sleep(0.002)

        threading.Thread(target=come_and_go, daemon=True).start()
        began_s = time.monotonic()
        while time.monotonic() - began_s < 1.0:
            assert engine.hits(list(numbered(8))) == 8
        stop.set()
        assert made[0] >= 100
        assert settled(lambda: ["open"] * (client.status().sessions - 1)) == []
