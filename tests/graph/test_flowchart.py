"""The flowchart is the contract: what the packaged definitions draw is what is documented."""

from __future__ import annotations

from pathlib import Path

import pytest

from orbitkv.errors import GraphError
from orbitkv.graph import Chart
from orbitkv.pipeline import load_pipeline, packaged_names

GOLDEN = Path(__file__).parents[1] / "golden"


def test_save_and_restore_draw_the_documented_flowchart() -> None:
    chart = load_pipeline("save").graph.chart | load_pipeline("restore").graph.chart
    drawn = chart.to_mermaid() + "\n"
    assert drawn.encode() == (GOLDEN / "flowchart.mmd").read_bytes()


def test_the_flowchart_has_nine_boxes_and_thirteen_arrows() -> None:
    save, restore = (load_pipeline(name).graph.chart for name in ("save", "restore"))
    chart = save | restore
    assert (len(save.arrows), len(restore.arrows), len(chart.arrows)) == (6, 7, 13)
    assert len(chart.labels) == 9


def test_the_packaged_definitions_are_save_and_restore() -> None:
    assert packaged_names() == ("restore", "save")


def test_a_definition_draws_its_own_half_alone() -> None:
    assert load_pipeline("save").graph.chart.to_mermaid().splitlines() == [
        "flowchart LR",
        "    E[Engine GPU pages] --> C[GPU encode]",
        "    C --> D[Encoded pinned DRAM]",
        "    C --> G[Registered GPU staging]",
        "    G --> S[SSD via cuFile]",
        "    D --> U[SSD via io_uring]",
        "    D --> P[Peer via Mooncake]",
    ]


def test_a_chart_may_be_cyclic_and_shows_each_label_once() -> None:
    chart = Chart({"A": "one", "B": "two"}, (("A", "B"), ("B", "A")))
    assert chart.to_mermaid() == "flowchart LR\n    A[one] --> B[two]\n    B --> A"


def test_an_arm_that_is_switched_off_is_drawn_dashed() -> None:
    chart = Chart({"A": "one", "B": "two", "C": "three"}, (("A", "B"), ("A", "C")))
    drawn = chart.to_mermaid(dashed=frozenset({("A", "C")}))
    assert drawn == "flowchart LR\n    A[one] --> B[two]\n    A -.-> C[three]"


def test_charts_that_label_one_box_in_two_ways_do_not_join() -> None:
    first = Chart({"A": "one", "B": "two", "C": "three"}, (("A", "B"),))
    second = Chart({"A": "uno", "B": "two", "C": "tre"}, (("A", "B"),))
    with pytest.raises(GraphError) as caught:
        first | second
    assert caught.value.faults == (
        "box A is labelled 'one' and 'uno'",
        "box C is labelled 'three' and 'tre'",
    )


def test_a_box_without_arrows_is_drawn() -> None:
    chart = Chart({"A": "one", "B": "two", "C": "alone"}, (("A", "B"),))
    assert "C[alone]" in chart.to_mermaid()
