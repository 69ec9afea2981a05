"""docs/pipelines.md shows nothing that is not so: every block and table is compared or run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from orbitkv.cli import main
from orbitkv.graph import LANE_KINDS, Port
from orbitkv.pipeline import _EDGE_KEYS, _NODE_KEYS, _TOP_KEYS
from orbitkv.stages import STAGES

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "pipelines" / "examples"
DOCUMENT = (ROOT / "docs" / "pipelines.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", DOCUMENT, re.MULTILINE | re.DOTALL)
FILES = [
    path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "pipelines").rglob("*"))
    if path.suffix in (".toml", ".py")
]


def blocks(language: str) -> list[str]:
    return [block for kind, block in BLOCKS if kind == language]


def rows(first: str) -> list[list[str]]:
    """Cells of the table under the heading row that starts with these cells."""
    table = re.search(rf"^\| {re.escape(first)}.*\n\|[-|]+\n((?:\|.*\n)+)", DOCUMENT, re.MULTILINE)
    assert table, first
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table[1].splitlines()]


def section(heading: str) -> str:
    start = DOCUMENT.index(f"\n{heading}\n") + len(heading) + 2
    return re.split(r"^##", DOCUMENT[start:], maxsplit=1, flags=re.MULTILINE)[0]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the current directory on the path; take it off again."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def test_every_block_is_of_a_kind_that_is_checked() -> None:
    assert {kind for kind, _ in BLOCKS} == {"toml", "python", "console", "sh"}
    assert DOCUMENT.count("```") == 2 * len(BLOCKS)


def test_every_toml_block_stands_in_a_definition_or_is_shown_to_be_broken() -> None:
    loose = [block for block in blocks("toml") if not any(block in text for text in FILES)]
    assert [block.splitlines()[0] for block in loose] == ['name = "broken"']
    assert (EXAMPLES / "dram-only.save.toml").read_text(encoding="utf-8") in blocks("toml")


def test_the_stage_written_from_scratch_is_the_example() -> None:
    assert (EXAMPLES / "zstd_stage.py").read_text(encoding="utf-8") in blocks("python")


def test_the_python_that_chooses_definitions_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    (choosing,) = (block for block in blocks("python") if "Config(" in block)
    exec(compile(choosing, "docs/pipelines.md", "exec"), {})
    assert "'save', 'restore'" in capsys.readouterr().out


@pytest.mark.parametrize("block", blocks("console"), ids=lambda block: block.splitlines()[0])
def test_commands_say_what_is_shown(
    block: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    command, _, shown = block.partition("\n")
    directory = EXAMPLES
    if "broken.toml" in command:
        directory = tmp_path
        (broken,) = (each for each in blocks("toml") if 'name = "broken"' in each)
        (tmp_path / "broken.toml").write_text(broken)
    monkeypatch.chdir(directory)
    code = main(command.removeprefix("$ orbitkv ").split())
    said = capsys.readouterr()
    assert said.out + said.err == shown
    assert code == (2 if "broken" in command else 0)


def test_commands_to_try_succeed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (lines,) = blocks("sh")
    first, *commands = lines.splitlines()
    monkeypatch.chdir(ROOT / first.removeprefix("cd "))
    assert len(commands) == 2
    for command in commands:
        assert main(command.removeprefix("orbitkv ").split()) == 0
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("heading", "keys"),
    [
        ("### Of the definition", _TOP_KEYS),
        ("### Of an edge", _EDGE_KEYS),
        ("### Of a node", _NODE_KEYS),
    ],
)
def test_every_key_is_explained(heading: str, keys: tuple[str, ...]) -> None:
    explained = re.findall(r"^\| `(\w+)` \|", section(heading), re.MULTILINE)
    assert explained == list(keys)


def test_every_lane_is_explained() -> None:
    assert rows("kind | what") == [[f"`{kind}`", what] for kind, what in LANE_KINDS.items()]


def ports(of: dict[str, Port]) -> str:
    return "; ".join(
        f"`{name}`: {port.payload.__name__}" + ", entry" * port.entry + ", optional" * port.optional
        for name, port in of.items()
    )


def test_every_stage_is_listed_with_its_ports_and_lanes() -> None:
    assert rows("name | inputs | outputs | lanes") == [
        [
            f"`{name}`",
            ports(dict(stage.inputs)) or "none",
            ports(dict(stage.outputs)) or "none",
            ", ".join(sorted(stage.lanes)),
        ]
        for name, stage in STAGES.items()
    ]


def test_every_example_is_listed() -> None:
    listed = " ".join(re.findall(r"`pipelines/examples/([^`]+)`", section("## A whole definition")))
    for path in EXAMPLES.glob("*.toml"):
        assert path.name.split(".")[0] in listed
