"""The text of the kernels, and how it is compiled."""

from __future__ import annotations

import re
from pathlib import Path

OPTIONS = ("--std=c++17", "--fmad=false")  # each operation rounds by itself, as docs/codecs.md says

_HERE = Path(__file__).parent
_INCLUDE = re.compile(r'^#include "(\w+\.cuh)"\n', re.MULTILINE)


def source(name: str) -> str:
    """A file of kernels with what it includes in its place, each header once.

    CuPy keeps compiled kernels by their text, so a changed header has to change the text.
    """
    seen: set[str] = set()

    def inlined(file: str) -> str:
        def include(match: re.Match[str]) -> str:
            header = match[1]
            if header in seen:
                return ""
            seen.add(header)
            return inlined(header)

        text = (_HERE / file).read_text(encoding="utf-8")
        return _INCLUDE.sub(include, text).replace("#pragma once\n", "")

    return inlined(name)
