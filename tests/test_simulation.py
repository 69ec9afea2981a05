"""orbitkv simulate: one JSON object or one table, plots, and every refusal in one line."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orbitkv import cli, simulation
from orbitkv.runtime.simulate import Simulation, cut, simulate
from orbitkv.runtime.traces import read_trace
from tests.builders import BLOCK
from tests.runtime.traffic import conversations, trace_of, written

ROOT = Path(__file__).parents[1]
FILES = ["hit_rate.png", "simulate.json", "ssd_writes.png"]
SMALL = ("--bytes-per-token", "8", "--pool-size", f"{60 * BLOCK}")


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return written(tmp_path / "trace.jsonl", conversations(requests=80))


def simulated(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    code = cli.main(["simulate", *map(str, argv)])
    told = capsys.readouterr()
    return code, told.out, told.err


def reported(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, Any]:
    code, out, err = simulated(capsys, *argv, "--json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def refused(capsys: pytest.CaptureFixture[str], *argv: object) -> str:
    code, out, err = simulated(capsys, *argv)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    return err


def needs_matplotlib() -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")


def test_json_has_the_figures_of_the_simulation(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    ssd = ("--ssd-cache-capacity", "600 KiB", "--cache-protected-percent", 80, "--gpu-pages", 20)
    policies = ("--enable-lfu-admission", "--ssd-write-policy", "reuse", "--recency", "tail-first")
    found = reported(capsys, trace, *SMALL, *ssd, *policies)
    made = Simulation(
        pool_nbytes=60 * BLOCK,
        ssd_cache_capacity_nbytes=150 * BLOCK,
        cache_protected_percent=80,
        enable_lfu_admission=True,
        ssd_write_policy="reuse",
        gpu_pages=20,
        bytes_per_token=8,
        recency="tail-first",
    )
    wanted = simulate(cut(read_trace(trace), 512), made)
    assert found["trace"] == "trace.jsonl"
    assert found["settings"]["ssd_write_policy"] == "reuse"
    for key in (
        *("blocks", "unique_blocks", "unlimited_prefix_hit_rate", "prefix_hit_rate"),
        *("ssd_write_bytes", "ssd_read_bytes", "recomputed_tokens", "write_amplification"),
        *("evicted_reclaimable", "evicted_probationary", "evicted_protected", "unique_bytes"),
    ):
        assert found[key] == getattr(wanted, key)
    assert found["blocks"] > found["unique_blocks"] > 0
    assert found["ssd_write_bytes"] == found["ssd_write_blocks"] * BLOCK > 0


def test_every_key_is_documented(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    text = (ROOT / "docs" / "simulation.md").read_text(encoding="utf-8")
    found = reported(capsys, trace, *SMALL)
    assert [key for key in found if f"`{key}`" not in text] == []


def test_same_inputs_print_the_same_bytes(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    sweep = (trace, *SMALL, "--sweep", "ssd-cache-capacity=40kb,400kb", "--json")
    assert simulated(capsys, *sweep) == simulated(capsys, *sweep)


def test_table_names_every_figure_once(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, err = simulated(capsys, trace, *SMALL, "--storage-codec", "fp8")
    assert code == 0
    for heading in ("bound", "hits", "recomputed tokens", "amplification", "evicted: protected"):
        assert len(re.findall(rf"^ *{heading} ", out, re.MULTILINE)) == 1
    assert "without codec" in out
    assert "blocks simulated in" in err


def test_sweep_simulates_the_grid(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    sweeps = ("--sweep", "pool-size=120kb,240 KiB", "--sweep", "enable-lfu-admission=false,true")
    found = reported(capsys, trace, "--bytes-per-token", 8, *sweeps)
    assert found["swept"] == ["pool-size", "enable-lfu-admission"]
    settings = [point["settings"] for point in found["points"]]
    assert [(each["pool_nbytes"], each["enable_lfu_admission"]) for each in settings] == [
        (30 * BLOCK, False),
        (30 * BLOCK, True),
        (60 * BLOCK, False),
        (60 * BLOCK, True),
    ]
    for point in found["points"]:
        made = Simulation(**point["settings"])
        wanted = simulate(cut(read_trace(trace), 512), made)
        assert point["prefix_hit_rate"] == wanted.prefix_hit_rate


def test_sweep_of_page_lengths_cuts_the_trace_anew(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    found = reported(capsys, trace, *SMALL[:2], "--sweep", "page-tokens=512,1024,128,512")
    blocks = [point["blocks"] for point in found["points"]]
    assert blocks[0] == blocks[3]
    assert blocks[1] < blocks[0] < blocks[2] <= 4 * blocks[0]


def test_sweep_prints_a_row_a_point(capsys: pytest.CaptureFixture[str], trace: Path) -> None:
    code, out, _ = simulated(capsys, trace, *SMALL, "--sweep", "ssd-cache-capacity=0,40kb,4mb")
    assert code == 0
    first = [line.split()[0] for line in out.splitlines() if line.strip()]
    assert first[-3:] == ["0", "40kb", "4mb"]
    assert "GPU" not in out  # which no point has


def test_plots_and_report_are_written(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path
) -> None:
    needs_matplotlib()
    sweeps = ("--sweep", "pool-size=120kb,240kb", "--sweep", "ssd-write-policy=all,reuse")
    argv = (trace, "--bytes-per-token", 8, "--ssd-cache-capacity", "1mb", *sweeps)
    found = reported(capsys, *argv, "--out", tmp_path / "new" / "out")
    assert sorted(path.name for path in (tmp_path / "new" / "out").iterdir()) == FILES
    assert json.loads((tmp_path / "new" / "out" / "simulate.json").read_text()) == found
    for name in ("hit_rate.png", "ssd_writes.png"):
        assert (tmp_path / "new" / "out" / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    "sweeps",
    [
        (),
        ("ssd-cache-capacity=0,40kb",),
        ("gpu-pages=0,5",),
        ("pool-size=40kb,400kb", "page-tokens=512,256"),
    ],
    ids=["one point", "no SSD at first", "no capacity", "two bounds"],
)
def test_anything_that_is_swept_is_drawn(
    capsys: pytest.CaptureFixture[str], trace: Path, tmp_path: Path, sweeps: tuple[str, ...]
) -> None:
    needs_matplotlib()
    asked = [text for sweep in sweeps for text in ("--sweep", sweep)]
    pool = () if any("pool-size" in sweep for sweep in sweeps) else SMALL[2:]
    code, _, _ = simulated(capsys, trace, *SMALL[:2], *pool, *asked, "--out", tmp_path / "out")
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES


def test_series_are_policies_by_capacity() -> None:
    pages = cut(trace_of([[0, 1, 2], [0, 1], [0, 3]]), 512)
    made = {
        (pool, policy): Simulation(
            pool_nbytes=pool * BLOCK,
            bytes_per_token=8,
            ssd_write_policy=policy,  # type: ignore[arg-type]
        )
        for pool in (4, 1, 2)
        for policy in ("all", "reuse")
    }
    points = [
        simulation.Point(
            {"pool-size": f"{pool}", "ssd-write-policy": policy}, each, simulate(pages, each)
        )
        for (pool, policy), each in made.items()
    ]
    tier, series = simulation._series(points)
    assert tier == "DRAM"
    assert {name: [nbytes for nbytes, _ in line] for name, line in series.items()} == {
        "ssd-write-policy all": [BLOCK, 2 * BLOCK, 4 * BLOCK],
        "ssd-write-policy reuse": [BLOCK, 2 * BLOCK, 4 * BLOCK],
    }


def test_plots_without_matplotlib_are_refused_before_anything_is_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )
    told = refused(capsys, tmp_path / "none.jsonl", "--out", tmp_path / "out")
    assert "--out: the plots need matplotlib, which is not installed; accepted: " in told
    assert "pip install 'orbitkv[transformers]'" in told


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--pool-size", "much"), "--pool-size: 'much' is not a size; accepted: a number of bytes"),
        (("--pool-size", "1kb"), "--pool-size: 1024; accepted: 75497472 (one page) to"),
        (("--page-tokens", "100"), "--page-tokens: 100; accepted: a divisor or a multiple of 512"),
        (("--page-tokens", "x"), "--page-tokens: 'x'; accepted: a whole number"),
        (("--ssd-write-policy", "some"), "--ssd-write-policy: 'some'; accepted: all, reuse"),
        (
            ("--cache-protected-percent", "101"),
            "--cache-protected-percent: 101; accepted: 0 to 100",
        ),
        (
            ("--sweep", "pool-size"),
            "--sweep: 'pool-size'; accepted: KEY=V1,V2,... where KEY is pool",
        ),
        (("--sweep", "size=1gb"), "--sweep: 'size=1gb'; accepted: KEY=V1,V2,... where KEY is pool"),
        (("--sweep", "pool-size=1gb,"), "--sweep: --pool-size: '' is not a size; accepted: "),
        (("--sweep", "enable-lfu-admission=yes"), "'yes'; accepted: true or false"),
        (("--sweep", "storage-codec=none,zip"), "--storage-codec: 'zip'; accepted: none, fp8"),
        (
            ("--pool-size", "1gb", "--sweep", "pool-size=1gb,2gb"),
            "--sweep: pool-size for the second time; accepted: once",
        ),
        (
            (
                "--sweep",
                f"gpu-pages={','.join(['1'] * 101)}",
                "--sweep",
                f"cache-protected-percent={','.join(['1'] * 100)}",
            ),
            "--sweep: 10100 points; accepted: up to 10000",
        ),
    ],
)
def test_bad_argument_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], trace: Path, argv: tuple[str, ...], message: str
) -> None:
    assert message in refused(capsys, trace, *argv)


def test_bad_trace_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"timestamp": 0, "input_length": -1, "output_length": 1, "hash_ids": []}\n')
    wanted = f"orbitkv: {bad}, line 1: input_length: -1; accepted: a whole number of tokens, 0 to"
    assert refused(capsys, bad).startswith(wanted)
    none = tmp_path / "none.jsonl"
    wanted = f"orbitkv: {none}: No such file or directory; accepted: a file of requests\n"
    assert refused(capsys, none) == wanted
    assert "Is a directory; accepted: a file of requests" in refused(capsys, tmp_path)


def test_file_in_the_place_of_the_directory_is_refused(
    capsys: pytest.CaptureFixture[str], trace: Path
) -> None:
    needs_matplotlib()
    told = refused(capsys, trace, *SMALL, "--out", trace, "--json")
    assert told.endswith("accepted: a directory to write files in\n")


def test_command_imports_neither_torch_nor_matplotlib(trace: Path) -> None:
    code = (
        "import sys; from orbitkv.cli import main\n"
        f"main(['simulate', {str(trace)!r}, '--json'])\n"
        "print(sorted({'torch', 'matplotlib', 'cupy', 'transformers'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout.endswith("\n[]\n")
