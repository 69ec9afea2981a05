"""Golden vectors: what is stored today can be read for as long as the format's version stands."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from orbitkv.codecs import SegmentSpec
from orbitkv.segment import Role
from tests.codecs.reference import bound

FOLDER = Path(__file__).parents[1] / "golden" / "codecs"


def maker() -> ModuleType:
    found = importlib.util.spec_from_file_location("golden_codecs", FOLDER / "vectors.py")
    assert found
    assert found.loader
    module = importlib.util.module_from_spec(found)
    sys.modules["golden_codecs"] = module
    found.loader.exec_module(module)
    return module


VECTORS = list(maker().stored())


def label(vector: tuple[dict[str, object], bytes, bytes, bytes]) -> str:
    return "-".join(str(vector[0][name]) for name in ("codec", "dtype", "role", "head_dim"))


@pytest.mark.parametrize("vector", VECTORS, ids=label)
def test_vectors_encode_and_decode_to_the_stored_bytes(
    vector: tuple[dict[str, object], bytes, bytes, bytes],
) -> None:
    fields, source, payload, back = vector
    shape = {name: int(str(fields[name])) for name in ("tokens", "heads", "head_dim")}
    of = SegmentSpec(dtype=str(fields["dtype"]), role=Role(str(fields["role"])), **shape)
    codec = bound(str(fields["codec"]), of, seed=int(str(fields["seed"])))
    out = np.zeros(codec.encoded_nbytes, np.uint8)
    assert codec.encode(np.frombuffer(source, np.uint16), out) == len(payload)
    assert out.tobytes() == payload
    words = np.zeros(of.elements, np.uint16)
    codec.decode(np.frombuffer(payload, np.uint8), words)
    assert words.tobytes() == back


def test_every_format_dtype_role_and_dimension_has_its_vector() -> None:
    assert len({label(vector) for vector in VECTORS}) == len(VECTORS) == 3 * 2 * 3 * 4


def test_the_maker_writes_the_same_again() -> None:
    files, index = maker().made()
    assert {name: (FOLDER / name).read_bytes() for name in files} == files
    assert [fields for fields, *_ in VECTORS] == index
