"""Traces of requests for tests, from a generator: sessions that share a system prompt and go on."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orbitkv.runtime.traces import BLOCK_TOKENS, RequestTrace

TRACES = Path(__file__).parents[3] / "shared" / "data" / "traces"
"""Where the public traces are that are no part of the repository."""


def conversations(
    *, requests: int = 400, sessions: int = 12, seed: int = 7
) -> list[dict[str, Any]]:
    """Requests of a trace. The same arguments make the same ones on every machine."""
    draw = random.Random(seed).random  # the one method whose numbers no release changes
    systems = [[number * 4 + block for block in range(4)] for number in range(3)]
    fresh = 100
    turns: list[list[int]] = [list(systems[int(draw() * 3)]) for _ in range(sessions)]
    made = []
    for number in range(requests):
        at = int(draw() * draw() * sessions)  # some go on more often than others
        if len(turns[at]) > 40 or draw() < 0.1:
            turns[at] = list(systems[int(draw() * 3)])
        grown = 1 + int(draw() * 5)
        turns[at] += range(fresh, fresh + grown)
        fresh += grown
        tokens = len(turns[at]) * BLOCK_TOKENS - int(draw() * BLOCK_TOKENS)
        made.append(
            {
                "timestamp": number * 100,
                "input_length": tokens,
                "output_length": 1 + int(draw() * 500),
                "hash_ids": list(turns[at]),
            }
        )
    return made


def written(path: Path, requests: Iterable[dict[str, Any]]) -> Path:
    """The file of a trace."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests), encoding="utf-8")
    return path


def trace_of(
    blocks: Sequence[Sequence[int]], input_tokens: Sequence[int] | None = None
) -> RequestTrace:
    """A trace of requests with these blocks, numbered already."""
    lengths = [len(each) for each in blocks]
    tokens = [length * BLOCK_TOKENS for length in lengths] if input_tokens is None else input_tokens
    numbers = [block for each in blocks for block in each]
    order = {block: number for number, block in enumerate(sorted(set(numbers)))}
    return RequestTrace(
        np.array([0, *np.cumsum(lengths)], np.int64),
        np.array([order[block] for block in numbers], np.int32),
        len(order),
        np.zeros(len(blocks)),
        np.array(tokens, np.int64),
        np.zeros(len(blocks), np.int64),
    )
