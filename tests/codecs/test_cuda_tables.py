"""The CRC kernels' arithmetic, step by step on the CPU from the tables that the GPU is given."""

from __future__ import annotations

import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.codecs.cuda import crc_tables, kernels
from orbitkv.codecs.cuda.tasks import SLOT, TASK

CUDA = Path(kernels.__file__).parent
WORDS = crc_tables.device_tables()
MAPS = WORDS[: crc_tables.MAPS * crc_tables.FIELDS * 32].reshape(crc_tables.MAPS, -1, 32)
MATRICES = WORDS[MAPS.size :].reshape(-1, 32)
NEAR, MIDDLE, FAR, TAILS = np.split(
    MATRICES,
    np.cumsum([crc_tables.NEAR, crc_tables.MIDDLE, crc_tables.FAR]),
)

Array = npt.NDArray[Any]


def mapped(index: int, words: Array) -> Array:
    """Words times x^(32 * 2^index), each field of bits looked up."""
    found = MAPS[index, 0, words & 3]
    for field in range(1, crc_tables.FIELDS):
        found = found ^ MAPS[index, field, words >> (5 * field - 3) & 31]
    return found


def times_matrix(words: Array, matrices: Array) -> Array:
    """Words times a matrix each."""
    bits = words[:, None] >> np.arange(32, dtype=np.uint32) & 1
    return np.bitwise_xor.reduce(np.where(bits == 1, matrices, 0), axis=1)


def sum_of_wide_lines(sums: Array) -> Array:
    """Sums of uint32[shares, lanes, 4]: 16 bytes of a lane."""
    total = sums[:, :, 0]
    for word in (1, 2, 3):
        total = mapped(0, total) ^ sums[:, :, word]
    for level in range(5):
        total = mapped(2 + level, total) ^ np.roll(total, -(1 << level), axis=1)
    return total[:, 0]


def sum_of_split_lines(sums: Array) -> Array:
    """Sums of uint32[shares, lanes, 4]: 8 bytes of a line's first half and 8 of its second."""
    first = mapped(0, sums[:, :, 0]) ^ sums[:, :, 1]
    second = mapped(0, sums[:, :, 2]) ^ sums[:, :, 3]
    total = mapped(6, first) ^ second
    for level in range(5):
        total = mapped(1 + level, total) ^ np.roll(total, -(1 << level), axis=1)
    return total[:, 0]


def contributions(payload: bytes, lines: int, *, split: bool) -> Array:
    """What the warps of one payload add to its CRC: uint32[shares]."""
    piece_nbytes = 8 if split else 16
    tail_nbytes = len(payload) % piece_nbytes
    whole, tail = payload[: len(payload) - tail_nbytes], payload[len(payload) - tail_nbytes :]
    share_nbytes = lines * crc_tables.LINE_NBYTES
    shares = max(-(-len(whole) // share_nbytes), 1 if tail else 0)
    padded = bytes(shares * share_nbytes - len(whole)) + whole
    words = np.frombuffer(padded, "<u4").reshape(shares, lines, 128)
    if split:
        words = words.reshape(shares, lines, 2, 32, 2).transpose(0, 1, 3, 2, 4)
    words = words.reshape(shares, lines, 32, 4)
    sums = np.zeros((shares, 32, 4), np.uint32)
    for line in range(lines):
        sums = mapped(7, sums) ^ words[:, line]
    found = sum_of_split_lines(sums) if split else sum_of_wide_lines(sums)
    lines_after = np.arange(shares)[::-1] * lines
    found = times_matrix(found, NEAR[lines_after % crc_tables.NEAR])
    found = times_matrix(found, MIDDLE[lines_after // crc_tables.NEAR % crc_tables.MIDDLE])
    found = times_matrix(found, FAR[lines_after // (crc_tables.NEAR * crc_tables.MIDDLE)])
    found = times_matrix(found, np.broadcast_to(TAILS[tail_nbytes], (shares, 32)))
    if tail:
        found[-1] ^= zlib.crc32(tail) ^ zlib.crc32(bytes(len(tail)))
    return found


def summed(payload: bytes, lines: int, *, split: bool) -> int:
    """The CRC that the kernels leave, from its preset."""
    found = np.bitwise_xor.reduce(contributions(payload, lines, split=split))
    return int(found) ^ crc_tables.zeros_crc32(len(payload))


def noise(nbytes: int) -> bytes:
    return np.random.default_rng(nbytes).bytes(nbytes)


wide_and_split = pytest.mark.parametrize("split", [False, True], ids=["wide", "split"])


@wide_and_split
def test_every_short_payload_has_the_crc_of_zlib(*, split: bool) -> None:
    for nbytes in range(2001):
        payload = noise(nbytes)
        assert summed(payload, 8, split=split) == zlib.crc32(payload), nbytes


@wide_and_split
@pytest.mark.parametrize("lines", [8, 16, 32])
@pytest.mark.parametrize(
    "nbytes",
    [
        *(8192 * shares + more for shares in (1, 2, 3, 8) for more in (-1, 0, 1)),
        *(2**16, 2**18, 2**20 + 5),
    ],
)
def test_shares_of_a_payload_add_up_to_the_crc_of_zlib(
    nbytes: int, lines: int, *, split: bool
) -> None:
    payload = noise(nbytes)
    assert summed(payload, lines, split=split) == zlib.crc32(payload)


def test_a_payload_of_many_lines_needs_the_far_matrices() -> None:
    lines_after = crc_tables.NEAR * crc_tables.MIDDLE + 5 * crc_tables.NEAR + 3
    one = np.array([1], np.uint32)
    found = times_matrix(times_matrix(times_matrix(one, NEAR[3:4]), MIDDLE[5:6]), FAR[1:2])
    factor = crc_tables.power(32 + 8 * crc_tables.LINE_NBYTES * lines_after)
    assert found[0] == crc_tables.times(1, factor)


@pytest.mark.parametrize("nbytes", [0, 1, 511, 4096, 65537, 10**7])
def test_the_preset_is_the_crc_of_zeros(nbytes: int) -> None:
    assert crc_tables.zeros_crc32(nbytes) == zlib.crc32(bytes(nbytes))


def test_entries_of_a_map_lie_in_as_many_banks() -> None:
    assert MAPS.shape == (crc_tables.MAPS, crc_tables.FIELDS, 32)
    assert (MAPS[:, 0] == np.tile(MAPS[:, 0, :4], 8)).all()
    assert len(np.unique(MAPS[:, 1:].reshape(-1, 32), axis=0)) == crc_tables.MAPS * 6


def constants(header: str) -> dict[str, int]:
    text = (CUDA / header).read_text(encoding="utf-8")
    found = {}
    for declared in re.findall(r"^constexpr unsigned (.*?);", text, re.MULTILINE):
        for name, value in re.findall(r"(\w+) = (0x[0-9a-f]+|\d+)u?(?:,|$)", declared):
            found[name] = int(value, 0)
    return found


def test_headers_and_python_agree() -> None:
    crc, pages = constants("crc32.cuh"), constants("pages.cuh")
    assert crc == {
        "CRC_POLYNOMIAL": crc_tables.POLYNOMIAL,
        "CRC_MAPS": crc_tables.MAPS,
        "CRC_FIELDS": crc_tables.FIELDS,
        "CRC_NEAR": crc_tables.NEAR,
        "CRC_MIDDLE": crc_tables.MIDDLE,
        "CRC_FAR": crc_tables.FAR,
    }
    assert pages["BLOCK_WARPS"] == kernels._BLOCK_WARPS
    assert pages["SM_BLOCKS"] == kernels._SM_BLOCKS
    batches = {**constants("segments.cu"), **constants("fp8.cu"), **constants("crc32.cu")}
    lines = [value for name, value in batches.items() if name.endswith("BATCH_LINES")]
    assert lines
    assert all(kernels._FEWEST_LINES % value == 0 for value in lines)


@pytest.mark.parametrize(("name", "dtype"), [("Slot", SLOT), ("Task", TASK)])
def test_structures_are_laid_out_as_the_dtypes(name: str, dtype: np.dtype[Any]) -> None:
    nbytes = {"unsigned": 4, "unsigned long long": 8, "long long": 8}
    text = (CUDA / "common.cuh").read_text(encoding="utf-8")
    (body,) = re.findall(rf"struct {name} {{(.*?)}};", text, re.DOTALL)
    fields = re.findall(r"^ +([a-z ]+?) (\w+);", body, re.MULTILINE)
    assert [field for _, field in fields] == list(dtype.names or ())
    offset = 0
    for kind, field in fields:
        assert (dtype[field].itemsize, dtype.fields[field][1]) == (nbytes[kind], offset)
        offset += nbytes[kind]
    assert offset == dtype.itemsize


def test_a_source_holds_each_header_once_and_includes_nothing() -> None:
    for file in CUDA.glob("*.cu"):
        text = kernels.source(file.name)
        assert '#include "' not in text
        assert text.count("struct Slot {") <= 1
