"""What a daemon holds and does, for a terminal: one look (``status``), or a live view (``top``)."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from orbitkv.config import format_nbytes
from orbitkv.runtime.channel import ChannelStatistics
from orbitkv.runtime.client import Client
from orbitkv.runtime.wire import DaemonStatus

_TIERS = ("pool", "ssd")


def to_json(status: DaemonStatus) -> str:
    """Render a snapshot as one JSON object."""
    return msgspec.json.encode(status).decode()


def render(status: DaemonStatus, before: DaemonStatus | None) -> RenderableType:
    """Render a snapshot.

    Args:
        before: An earlier one, for rates. None: what has passed since the start, and no rates.
    """
    since_s = status.up_s - before.up_s if before else status.up_s
    return Group(
        Text(
            f"orbitkv-cache-manager, pid {status.pid}, up {_duration(status.up_s)}: "
            f"{status.sessions} sessions, {status.instances} instances, {status.leases} leases, "
            f"{status.tickets} tickets"
        ),
        _hits(status, before),
        _tiers(status),
        _edges(status, before, since_s),
        *_off(status),
    )


def _table(*columns: str, title: str | None = None) -> Table:
    """A table in which a row is a line, so that all arrows fit a terminal of 24."""
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    for column in columns:
        table.add_column(column, no_wrap=True)
    return table


def watch(client: Client, console: Console, interval_s: float) -> None:
    """Show a live view until interrupted, on the terminal's other screen if it is a terminal."""
    status, before = client.status(), None
    screen = console.is_terminal
    with Live(render(status, None), console=console, auto_refresh=False, screen=screen) as live:
        while True:
            time.sleep(interval_s)
            status, before = client.status(), status
            live.update(render(status, before), refresh=True)


def _tiers(status: DaemonStatus) -> Table:
    table = _table("tier", "used", "capacity", "full")
    for tier in _TIERS:
        used = getattr(status.statistics, f"{tier}_used_nbytes")
        capacity = getattr(status.statistics, f"{tier}_capacity_nbytes")
        share = f"{used / capacity:.0%}" if capacity else "off"
        name = "dram" if tier == "pool" else tier
        table.add_row(name, format_nbytes(used), format_nbytes(capacity), share)
    return table


def _hits(status: DaemonStatus, before: DaemonStatus | None) -> Table:
    def passed(name: str) -> int:
        return status.counters.get(name, 0) - (before.counters.get(name, 0) if before else 0)

    asked, found = passed("queried_pages"), passed("found_pages")
    since = "" if before is None else "since the last look"
    table = _table("queries", "pages asked", "found", "hit rate", "dram", "ssd", since)
    table.add_row(
        str(passed("queries")),
        str(asked),
        str(found),
        f"{found / asked:.1%}" if asked else "-",
        str(passed("found_objects_dram")),
        str(passed("found_objects_ssd")),
    )
    return table


def _edges(status: DaemonStatus, before: DaemonStatus | None, since_s: float) -> Table:
    columns = ("pipeline", "arrow", "a second", "passed", "waiting", "blocked", "dropped")
    table = _table(*columns, title="Arrows")
    earlier = dict(_channels(before)) if before else {}
    # Between nodes first: what is cut off below are entries, which feed these.
    arrows = sorted(_channels(status), key=lambda found: found[0][1].startswith("entry of "))
    for (pipeline, name), channel in arrows:
        old = earlier.get((pipeline, name))
        moved = channel.passed_nbytes - (old.passed_nbytes if old else 0)
        table.add_row(
            pipeline,
            name,
            format_nbytes(round(moved / since_s)) if before and since_s > 0 else "-",
            format_nbytes(channel.passed_nbytes),
            f"{channel.items} ({format_nbytes(channel.nbytes)})",
            str(channel.senders_waiting),
            str(channel.dropped_items),
        )
    return table


def _channels(status: DaemonStatus) -> Iterator[tuple[tuple[str, str], ChannelStatistics]]:
    for pipeline, channels in status.statistics.channels.items():
        for channel in channels:
            yield (pipeline, channel.name), channel


def _off(status: DaemonStatus) -> list[Text]:
    return [
        Text(f"{pipeline} {node} is off: {why}")
        for pipeline, nodes in status.statistics.unavailable.items()
        for node, why in nodes.items()
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
