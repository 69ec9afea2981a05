"""Compiled: one source of a policy's loops, run by the interpreter or compiled by numba.

Loops that may be compiled are plain functions over flat arrays of integers. Compiled they are 10 to
100 times as fast; numba costs a process 0.4 s and about 120 MiB, which an engine may not want.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, MutableSequence
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any, cast

import numpy.typing as npt

Words = MutableSequence[int]
"""What loops take: an array of integers where they are compiled, else a memoryview of one."""


def loops(functions: tuple[Callable[..., Any], ...], *, compiled: bool) -> SimpleNamespace:
    """Functions by name, as they are or compiled. A later one may call an earlier.

    Those of several modules have different names, and a module imports by name what it calls of
    another. Compiled code is kept on disk where there is a place for it, and releases the GIL.
    """
    return (
        _compile(functions) if compiled else SimpleNamespace(**{f.__name__: f for f in functions})
    )


@functools.cache
def _compile(functions: tuple[Callable[..., Any], ...]) -> SimpleNamespace:
    import numba  # noqa: PLC0415 - only where something is compiled

    # Names are resolved in these namespaces, so that compiled code calls compiled code.
    spaces = {id(f.__globals__): dict(f.__globals__) for f in functions}
    files: dict[str, None] = {}
    made = SimpleNamespace()
    for function in functions:
        name = function.__name__
        bare = FunctionType(function.__code__, spaces[id(function.__globals__)], name)
        files[function.__code__.co_filename] = None
        if len(files) > 1:
            # numba holds what it kept against the function's own file alone.
            bare.__qualname__ = f"{name}_{_stamp(tuple(files))}"
        options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
        try:
            dispatcher = numba.njit(cache=True, **options)(bare)
        except RuntimeError:  # nowhere to write: neither beside the file nor in the user's cache
            dispatcher = numba.njit(**options)(bare)
        for space in spaces.values():
            if space.get(name) is function:
                space[name] = dispatcher
        setattr(made, name, dispatcher)
    return made


def _stamp(files: tuple[str, ...]) -> str:
    """A short name for the present text of several files."""
    text = b"".join(Path(file).read_bytes() for file in files)
    return hashlib.sha256(text).hexdigest()[:16]


def view(words: npt.NDArray[Any], *, compiled: bool) -> Words:
    """An array as loops take it."""
    return cast("Words", words if compiled else words.data)
