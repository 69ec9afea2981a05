"""Compiled: the same loops either way, numba only where it was asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
import pytest

from orbitkv.cache import compiled
from orbitkv.cache.compiled import Words, loops

ROOT = Path(__file__).parents[2]


def double(words: Words, at: int) -> int:
    words[at] *= 2
    return words[at]


def double_all(words: Words) -> int:
    total = 0
    for at in range(len(words)):
        total += double(words, at)
    return total


def test_interpreted_policies_import_no_numba() -> None:
    code = (
        "import sys\n"
        "from orbitkv.cache.admission import TinyLfu\n"
        "from orbitkv.cache.retention import Retention\n"
        "Retention(4096, 80, compiled=False), TinyLfu(1, compiled=False)\n"
        "print('numba' in sys.modules)"
    )
    command = [sys.executable, "-W", "error", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert run.stdout == "False\n"


@pytest.fixture
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def njit_without_cache(**options: object) -> Callable[..., object]:
        if options.pop("cache", False):
            raise RuntimeError("cannot cache function: no locator available")
        return njit(**options)

    monkeypatch.setattr(numba, "njit", njit_without_cache)


def test_compiled_loops_are_the_same_loops() -> None:
    made = loops((double, double_all), compiled=True)
    words = np.arange(4)
    assert made.double_all(words) == 12
    assert words.tolist() == [0, 2, 4, 6]


@pytest.mark.usefixtures("_nothing_is_kept")
def test_compiled_loops_call_compiled_loops_where_nothing_can_be_kept() -> None:
    made = compiled._compile.__wrapped__((double, double_all))
    assert made.double_all(np.arange(4)) == 12
    assert made.double.signatures


def test_what_was_kept_of_a_loop_is_not_used_once_one_that_it_calls_has_changed(
    tmp_path: Path,
) -> None:
    (tmp_path / "above.py").write_text(
        "from below import scaled\n\ndef scaled_twice(value):\n    return scaled(scaled(value))\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from above import scaled_twice; from below import scaled\n"
        "from orbitkv.cache.compiled import loops\n"
        "made = loops((scaled, scaled_twice), compiled=True)\n"
        "print(made.scaled_twice(1), sum(made.scaled_twice.stats.cache_hits.values()))"
    )
    printed = []
    for factor in (3, 3, 5):
        (tmp_path / "below.py").write_text(f"def scaled(value):\n    return value * {factor}\n")
        command = [sys.executable, "-B", "-W", "error", "-c", code, str(tmp_path)]
        run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
        printed.append(run.stdout)
    assert printed == ["9 0\n", "9 1\n", "25 0\n"]
