"""The doctor: every finding about this machine, as a table or as JSON.

``orbitkv doctor`` prints it. What is missing is never an error here: OrbitKV runs without, and the
table says what is slower or switched off and how to change that.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from orbitkv import probe
from orbitkv.probe import Finding
from orbitkv.runtime.liburing import probe_io_uring

# Compiling CuPy's first kernel takes seconds where the disk is slow; a hung driver takes for ever.
CHILD_LIMIT_S = 30.0


def examine(
    path: Path, *, nvcomp_library: str | None = None, limit_s: float = CHILD_LIMIT_S
) -> list[Finding]:
    """Look at this machine. Never raises, and never hangs.

    Args:
        path: Where the SSD tier would be: a directory, or a file in one.
        nvcomp_library: The nvCOMP library to use, or None to look for it.
        limit_s: How long one child that tries something may take.
    """
    return [
        probe.python(),
        probe.torch(),
        probe.gpu(limit_s=limit_s),
        probe.cuda(limit_s=limit_s),
        probe.cufile(path, limit_s=limit_s),
        io_uring(),
        ssd_route(path),
        probe.nvcomp(nvcomp_library, limit_s=limit_s),
        probe.mooncake(),
        probe.huge_pages(),
        probe.memlock(),
        *probe.disk(path, limit_s=limit_s),
    ]


def io_uring() -> Finding:
    """Find whether the SSD tier has io_uring, or falls back to threads."""
    reason = probe_io_uring()
    return Finding(
        "io_uring",
        available=reason is None,
        verdict="permitted" if reason is None else "no: SSD files are read and written by threads",
        evidence=reason or "liburing.so.2 set up a ring",
        remedy=None
        if reason is None
        else "apt-get install liburing2; sysctl kernel.io_uring_disabled=0; in a container, "
        "a seccomp profile that permits io_uring",
    )


def ssd_route(path: Path) -> Finding:
    """Find which way ``ssd_backend='auto'`` takes for pages on a GPU."""
    reason = probe.direct_unavailable((path,), "auto")
    return Finding(
        "SSD route",
        available=True,
        verdict="auto takes cuFile, past the host" if reason is None else "auto goes by DRAM",
        evidence=reason or "native cuFile",
    )


def render(
    findings: Sequence[Finding], console: Console, nodes: Mapping[str, str] | None = None
) -> None:
    """Print the findings, then the nodes that are switched off here.

    Args:
        findings: What ``examine`` returned.
        console: Where to.
        nodes: Id of each unavailable node of the pipelines, and why.
    """
    table = Table("", "what", title="This machine", title_justify="left")
    table.add_column("found", overflow="fold")  # a path or a command must not be cut short
    table.add_column("how to get it", overflow="fold")
    for finding in findings:
        found = Text(finding.verdict)
        found.append(f"\n{finding.evidence}", style="dim")
        # Text, not str: rich would read the brackets of orbitkv[cuda13] as markup.
        table.add_row(_mark(finding), Text(finding.name), found, Text(finding.remedy or ""))
    console.print(table)
    if nodes:
        table = Table("node", "why it is off", title="Switched off here", title_justify="left")
        for node, reason in nodes.items():
            table.add_row(Text(node), Text(reason))
        console.print(table)


def to_json(findings: Sequence[Finding], nodes: Mapping[str, str] | None = None) -> str:
    """Render ``{"findings": [{"name", "available", ...}, ...], "nodes": {id: why it is off}}``."""
    described = [dataclasses.asdict(finding) for finding in findings]
    return json.dumps({"findings": described, "nodes": dict(nodes or {})}, indent=2)


def _mark(finding: Finding) -> Text:
    return Text("yes", style="green") if finding.available else Text("no", style="yellow")
