"""Traces of requests: read whole or refused in one line, and cut into pages of any length."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orbitkv.errors import TraceError
from orbitkv.runtime.traces import MOST_BLOCKS, MOST_ID, RequestTrace, cut_pages, read_trace
from tests.runtime.traffic import conversations, trace_of, written

GOOD = '{"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [3, 8]}\n'


def read(tmp_path: Path, text: str | bytes) -> RequestTrace:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


def test_fields_become_arrays(tmp_path: Path) -> None:
    trace = read(tmp_path, GOOD + GOOD.replace("[3, 8]", "[]") + GOOD.replace("[3, 8]", "[3, 5]"))
    assert trace.starts.tolist() == [0, 2, 2, 4]
    assert trace.blocks.tolist() == [0, 2, 0, 1]
    assert trace.blocks.dtype == np.int32
    assert trace.unique_blocks == 3
    assert trace.timestamps_ms.tolist() == [5.0, 5.0, 5.0]
    assert trace.input_tokens.tolist() == [700] * 3
    assert trace.output_tokens.tolist() == [9] * 3


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace("5,", "5.25,", 1),
        GOOD.replace('"timestamp"', '"more": {"x": [1]}, "timestamp"'),
        f"\n{GOOD}\n \n",
        GOOD.replace("\n", "\r\n"),
        GOOD.rstrip("\n"),
    ],
    ids=["fractions of ms", "other fields", "empty lines", "CRLF", "no newline at the end"],
)
def test_what_says_the_same_is_read_the_same(tmp_path: Path, text: str) -> None:
    trace = read(tmp_path, text)
    assert trace.blocks.tolist() == [0, 1]
    assert trace.input_tokens.tolist() == [700]


REFUSED = {
    "no line": ("", r"trace\.jsonl: no request; accepted: one JSON object a line"),
    "empty lines alone": ("\n\n", r"trace\.jsonl: no request; accepted: one JSON object a line"),
    "cut line": (GOOD + GOOD[:30], r"line 2: '\{\"timestamp.*'; accepted: one JSON object a line"),
    "not an object": (GOOD + "[1]\n", r"line 2: '\[1\]'; accepted: one JSON object a line"),
    "not text": (b"\xff\xfe\x00", r"line 1: '.*'; accepted: one JSON object a line"),
    "no timestamp": (
        GOOD.replace('"timestamp": 5, ', ""),
        r"line 1: fields: \[\"hash_ids\", \"input_length\", .*\]; accepted: timestamp too",
    ),
    "text for a time": (
        GOOD.replace("5,", '"5",', 1),
        r"line 1: timestamp: \"5\"; accepted: a number of ms, 0 to 9007199254740991",
    ),
    "time without end": (GOOD.replace("5,", "1e999,", 1), r"timestamp: Infinity; accepted: a num"),
    "time before the start": (GOOD.replace("5,", "-1,", 1), r"timestamp: -1; accepted: a number"),
    "negative": (
        GOOD.replace("700", "-700"),
        r"line 1: input_length: -700; accepted: a whole number of tokens, 0 to 2147483647",
    ),
    "fraction": (GOOD.replace("9,", "9.5,"), r"output_length: 9\.5; accepted: a whole number"),
    "text": (GOOD.replace("9,", '"9",'), r"output_length: \"9\"; accepted: a whole number"),
    "truth value": (GOOD.replace("9,", "true,"), r"output_length: true; accepted: a whole number"),
    "huge number of tokens": (
        GOOD.replace("700", "9" * 100),
        r"input_length: 9{60}\.\.\. \(100 characters\); accepted: a whole number of tokens",
    ),
    "number of more digits than Python reads": (GOOD.replace("700", "9" * 5000), r"line 1: '"),
    "no list": (GOOD.replace("[3, 8]", "3"), r"hash_ids: 3; accepted: a list of whole numbers"),
    "negative id": (GOOD.replace("8]", "-8]"), r"hash_ids\[1\]: -8; accepted: a whole number, 0"),
    "huge id": (
        GOOD.replace("8]", f"{MOST_ID + 1}]"),
        rf"hash_ids\[1\]: {MOST_ID + 1}; accepted: a whole number, 0 to {MOST_ID}",
    ),
    "id of text": (GOOD.replace("8]", '"8"]'), r"hash_ids\[1\]: \"8\"; accepted: a whole number"),
    "id twice": (
        GOOD + GOOD.replace("8]", "8, 3]"),
        r"line 2: hash_ids\[2\]: 3 for the second time; accepted: each id once in a request",
    ),
    "deep": ('{"x": ' + "[" * 100_000 + "\n", r"line 1: '.*characters\); accepted: one JSON"),
}


@pytest.mark.parametrize(("text", "message"), REFUSED.values(), ids=REFUSED)
def test_bad_trace_is_refused_in_one_line(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(TraceError, match=message) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "trace.jsonl") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(tmp_path))


@given(
    cut=st.integers(0, 400),
    change=st.tuples(st.integers(0, 399), st.integers(0, 255)),
    is_cut=st.booleans(),
)
def test_trace_that_is_cut_or_changed_anywhere_is_read_or_refused(
    tmp_path_factory: pytest.TempPathFactory, cut: int, change: tuple[int, int], *, is_cut: bool
) -> None:
    whole = bytearray(
        "".join(json.dumps(each) + "\n" for each in conversations(requests=5)).encode()
    )
    if is_cut:
        del whole[cut:]
    else:
        whole[change[0]] = change[1]
    try:
        trace = read(tmp_path_factory.getbasetemp(), bytes(whole))
    except TraceError:
        return
    assert trace.starts[-1] == len(trace.blocks)


def test_progress_is_told_in_bytes(tmp_path: Path) -> None:
    path = written(tmp_path / "trace.jsonl", conversations(requests=20_000))
    told: list[int] = []
    read_trace(path, on_read=told.append)
    assert told == sorted(told)
    assert 0 < told[-1] <= path.stat().st_size < told[-1] + 2**21


@given(ids=st.lists(st.lists(st.integers(0, MOST_ID), max_size=5, unique=True), min_size=1))
def test_blocks_are_numbered_in_the_order_of_their_ids(
    tmp_path_factory: pytest.TempPathFactory, ids: list[list[int]]
) -> None:
    lines = [GOOD.replace("[3, 8]", json.dumps(each)) for each in ids]
    trace = read(tmp_path_factory.getbasetemp(), "".join(lines))
    flat = [block for each in ids for block in each]
    ranks = {block: rank for rank, block in enumerate(sorted(set(flat)))}
    assert trace.blocks.tolist() == [ranks[block] for block in flat]
    assert trace.unique_blocks == len(ranks)


@given(
    depths=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 511)), min_size=1
    ),
    page_tokens=st.sampled_from([16, 128, 512, 1024, 2048]),
)
def test_pages_hold_the_same_tokens_as_their_blocks(
    depths: list[tuple[int, int, int]], page_tokens: int
) -> None:
    # A block is its session and depth; one that is not full is another block than the full one.
    prompts, lengths = [], []
    for session, blocks, last in depths:
        tokens = blocks * 512 + last
        prompts.append(
            [
                session * 10**6 + at * 1000 + (last if at == blocks else 512)
                for at in range(-(-tokens // 512))
            ]
        )
        lengths.append(tokens)
    starts, pages, unique = cut_pages(trace_of(prompts, lengths), page_tokens)
    assert np.diff(starts).tolist() == [-(-tokens // page_tokens) for tokens in lengths]
    # Pages are one where they have the same place, and the same blocks up to their ends.
    meant: list[tuple[int, int]] = []
    for prompt, count in zip(prompts, np.diff(starts), strict=True):
        ends = [min((at + 1) * page_tokens, len(prompt) * 512) for at in range(count)]
        meant += [(at, prompt[-(-end // 512) - 1]) for at, end in enumerate(ends)]
    assert len(set(meant)) == unique
    named = dict(zip(pages.tolist(), meant, strict=True))
    assert [named[page] for page in pages.tolist()] == meant
    assert set(pages.tolist()) == set(range(unique))


def test_pages_that_no_number_of_32_bits_counts_are_refused() -> None:
    blocks = np.zeros(MOST_BLOCKS // 512 + 1, np.int32)
    trace = RequestTrace(
        np.arange(len(blocks) + 1), blocks, 1, *(np.zeros(len(blocks), np.int64) for _ in range(3))
    )
    with pytest.raises(TraceError, match=re.escape(f"; accepted: up to {MOST_BLOCKS} in a trace")):
        cut_pages(trace, 1)
