"""How fast are the codecs on one core, beside what else could do the same?

GiB/s of logical bytes, which are those of the engine's dtype, in both directions. Buffers are
reused, so no page is touched for the first time. A peer does no more than its name says: only
OrbitKV's FP8 checks for NaN and range too. ``np.copyto`` copies the logical bytes.
"""

from __future__ import annotations

import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
import scipy.linalg
import torch
from isal import isal_zlib
from measure import interleaved, parser, report

from orbitkv.codecs import SegmentCodec, SegmentSpec, copy_with_crc32, open_codec, tables
from orbitkv.config import GIB, KIB, MIB, format_nbytes
from orbitkv.segment import Role

SIZES = (4 * KIB, 256 * KIB, 16 * MIB)
HEAD_DIM = 128
SEED = 7
SAMPLE_S = 0.02  # long enough for the clock, short enough for a shared machine
TORCH = {"bfloat16": torch.bfloat16, "float16": torch.float16}
NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}

# Of the Rust program that these codecs follow, AVX-512 on an Intel Xeon Platinum 8457C, 16 MiB.
ORIGINAL = {
    ("bfloat16", "encode"): 4.9,
    ("bfloat16", "decode"): 8.9,
    ("float16", "encode"): 4.5,
    ("float16", "decode"): 9.9,
}
TARGETS = {
    ("bfloat16", "encode"): 9.0,
    ("bfloat16", "decode"): 15.0,
    ("float16", "encode"): 7.0,
    ("float16", "decode"): 17.0,
}

Work = Callable[[], object]
Rows = list[tuple[object, ...]]


@dataclass
class Contest:
    """Several ways to do one thing to ``nbytes`` logical bytes."""

    nbytes: int
    ways: dict[str, Work] = field(default_factory=dict)

    def run(self, rounds: int) -> Mapping[str, float]:
        """Median GiB/s of each, taken in turn."""
        return interleaved(rounds, {name: self._timed(work) for name, work in self.ways.items()})

    def _timed(self, work: Work) -> Callable[[], float]:
        work()
        started_s = time.perf_counter()
        work()
        once_s = time.perf_counter() - started_s
        times = max(1, round(SAMPLE_S / max(once_s, 1e-9)))

        def measure() -> float:
            started_s = time.perf_counter()
            for _ in range(times):
                work()
            return times * self.nbytes / GIB / (time.perf_counter() - started_s)

        return measure


def bound(name: str, spec: SegmentSpec) -> SegmentCodec:
    """Open and bind a codec; what it tells goes to stderr."""

    def tell(message: str) -> None:
        print(message, file=sys.stderr)

    codec = open_codec(name, rotation_seed=SEED, on_compile=tell).bind(spec)
    assert not isinstance(codec, int), codec.name
    return codec


def gaussian(nbytes: int, dtype: str) -> np.ndarray:
    """Words of N(0, 1): in range, and mostly normal numbers."""
    values = np.random.default_rng(0).standard_normal(nbytes // 2, np.float32)
    return values.astype(NUMPY[dtype]).view(np.uint16)


def many(codec: SegmentCodec, source: np.ndarray, payload: np.ndarray) -> tuple[Work, Work]:
    """The forms that stages call, over as many segments as fill 1 MiB, or one larger one."""
    count = max(1, MIB // source.nbytes)
    sources = np.tile(source, (count, 1))
    payloads = np.tile(payload, (count, 1))
    back = np.zeros_like(sources)
    at = [np.array([row.ctypes.data for row in rows]) for rows in (sources, payloads, back)]

    def encode() -> None:
        # Keeps what the addresses lead to.
        assert not codec.encode_many(at[0], at[1]), sources.shape

    def decode() -> None:
        codec.decode_many(at[1], at[2])
        assert back.size, payloads.shape

    return encode, decode


def fp8(nbytes: int, dtype: str, rounds: int) -> Rows:
    """FP8 beside torch, ml_dtypes, lookup tables and a copy."""
    words = gaussian(nbytes, dtype)
    spec = SegmentSpec(dtype=dtype, role=Role.K, tokens=nbytes // 256, heads=1, head_dim=128)
    codec = bound("fp8", spec)
    codes, back = np.zeros(nbytes // 2, np.uint8), np.zeros_like(words)
    assert codec.encode(words, codes) == len(codes)
    encode_many, decode_many = many(codec, words, codes)
    count = max(1, MIB // nbytes)
    source_t = torch.from_numpy(words.view(np.int16)).view(TORCH[dtype])
    code_t = torch.from_numpy(codes.copy()).view(torch.float8_e4m3fn)
    back_t = torch.from_numpy(back.view(np.int16)).view(TORCH[dtype])
    source_m, code_m = words.view(NUMPY[dtype]), codes.copy().view(ml_dtypes.float8_e4m3fn)
    every = np.arange(2**16, dtype=np.uint16).view(NUMPY[dtype])
    with np.errstate(all="ignore"):
        narrow = every.astype(np.float32).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    widened = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(NUMPY[dtype])
    wide = widened.view(np.uint16)

    def through_ml_dtypes(source: np.ndarray, target: np.ndarray) -> Work:
        return lambda: np.copyto(target, source, casting="unsafe")

    def through_table(table: np.ndarray, source: np.ndarray, target: np.ndarray) -> Work:
        return lambda: np.take(table, source, out=target, mode="wrap")

    batches = Contest(nbytes * count, {"encode": encode_many, "decode": decode_many}).run(rounds)
    ways: dict[str, dict[str, Work]] = {
        "encode": {
            "OrbitKV": lambda: codec.encode(words, codes),
            "torch": lambda: code_t.copy_(source_t),
            "ml_dtypes": through_ml_dtypes(source_m, code_m),
            "64 Ki table": through_table(narrow, words, np.zeros_like(codes)),
            "np.copyto": lambda: np.copyto(back, words),
        },
        "decode": {
            "OrbitKV": lambda: codec.decode(codes, back),
            "torch": lambda: back_t.copy_(code_t),
            "ml_dtypes": through_ml_dtypes(codes.view(code_m.dtype), np.zeros_like(source_m)),
            "64 Ki table": through_table(wide, codes, np.zeros_like(back)),
            "np.copyto": lambda: np.copyto(back, words),
        },
    }
    rows: Rows = []
    for direction, contest in ways.items():
        found = Contest(nbytes, contest).run(rounds)
        arrow = f"{dtype} > fp8" if direction == "encode" else f"fp8 > {dtype}"
        key, largest = (dtype, direction), nbytes == SIZES[-1]
        row = (arrow, format_nbytes(nbytes), TARGETS[key] if largest else "")
        row += (found.pop("OrbitKV"), batches[direction], *found.values())
        rows.append((*row, ORIGINAL[key] if largest else ""))
    return rows


class TorchTurboQuant:
    """The same formulas with torch's matrix products, over blocks that stay in the cache."""

    BLOCK = 1024

    def __init__(self, bits: int) -> None:
        self.bits = bits
        signs = np.where(tables.rotation_signs(SEED, HEAD_DIM) == 0, 1.0, -1.0)
        rotation = scipy.linalg.hadamard(HEAD_DIM) * signs / np.sqrt(HEAD_DIM)
        self.rotation = torch.from_numpy(rotation.astype(np.float32))
        half = tables.CENTROIDS[bits] / np.float32(np.sqrt(HEAD_DIM))
        self.centroids = torch.from_numpy(np.concatenate([-half[::-1], half]))
        self.edges = (self.centroids[1:] + self.centroids[:-1]) / 2

    def pack(self, codes: torch.Tensor) -> torch.Tensor:
        """Two codes a byte; of three bits, left unpacked."""
        if self.bits == 3:
            return codes
        low, high = codes.chunk(2, 1)
        return low | high << 4

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Undo ``pack``."""
        return packed if self.bits == 3 else torch.cat([packed & 15, packed >> 4], 1)

    def encode_k(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes and norms."""
        wide = x.float()
        norms = wide.norm(dim=1, keepdim=True).half()
        rotated = (wide / norms.float()) @ self.rotation.T
        codes = torch.zeros(rotated.shape, dtype=torch.uint8)
        for edge in self.edges.tolist():  # twice as fast as torch.bucketize
            codes += rotated >= edge
        return self.pack(codes), norms

    def decode_k(self, packed: torch.Tensor, norms: torch.Tensor) -> torch.Tensor:
        """Undo ``encode_k``."""
        c = self.centroids[self.unpack(packed).int()]
        c = c * (norms.float() / c.norm(dim=1, keepdim=True))
        return (c @ self.rotation).bfloat16()

    def encode_v(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Codes, scales and minima."""
        wide, levels = x.float(), 2**self.bits - 1
        least, greatest = wide.aminmax(dim=1, keepdim=True)
        scales = ((greatest - least) / levels).clamp(min=2.0**-24).half()
        minima = least.half()
        steps = (wide - minima.float()) / scales.float() + 0.5
        return self.pack(steps.clamp(0, levels).to(torch.uint8)), scales, minima

    def decode_v(
        self, packed: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor
    ) -> torch.Tensor:
        """Undo ``encode_v``."""
        return (self.unpack(packed) * scales.float() + minima.float()).bfloat16()


def turboquant(nbytes: int, bits: int, role: Role, rounds: int) -> Rows:
    """TurboQuant at D = 128 beside torch."""
    vectors = nbytes // 2 // HEAD_DIM
    words = gaussian(nbytes, "bfloat16")
    spec = SegmentSpec(dtype="bfloat16", role=role, tokens=vectors, heads=1, head_dim=HEAD_DIM)
    codec = bound(f"turboquant-{bits}", spec)
    payload, back = np.zeros(codec.encoded_nbytes, np.uint8), np.zeros_like(words)
    assert codec.encode(words, payload) == len(payload)
    encode_many, decode_many = many(codec, words, payload)
    batches = Contest(
        nbytes * max(1, MIB // nbytes), {"encode": encode_many, "decode": decode_many}
    ).run(rounds)
    peer = TorchTurboQuant(bits)
    x = torch.from_numpy(words.view(np.int16)).view(torch.bfloat16).reshape(vectors, HEAD_DIM)
    encode_t, decode_t = (
        (peer.encode_k, peer.decode_k) if role is Role.K else (peer.encode_v, peer.decode_v)
    )
    blocks_t = x.split(TorchTurboQuant.BLOCK)
    encoded_t = [encode_t(block) for block in blocks_t]
    ways: dict[str, dict[str, Work]] = {
        "encode": {
            "OrbitKV": lambda: codec.encode(words, payload),
            "torch": lambda: [encode_t(block) for block in blocks_t],
            "np.copyto": lambda: np.copyto(back, words),
        },
        "decode": {
            "OrbitKV": lambda: codec.decode(payload, back),
            "torch": lambda: [decode_t(*block) for block in encoded_t],
            "np.copyto": lambda: np.copyto(back, words),
        },
    }
    rows: Rows = []
    for direction, contest in ways.items():
        found = Contest(nbytes, contest).run(rounds)
        target = (1.0 if direction == "encode" else 1.5) if bits == 4 else ""
        what = f"turboquant-{bits} {direction} {role.upper()}"
        row = (what, format_nbytes(nbytes), target if nbytes == SIZES[-1] else "")
        rows.append(
            (*row, found["OrbitKV"], batches[direction], found["torch"], found["np.copyto"])
        )
    return rows


def aligned(nbytes: int) -> np.ndarray:
    """Memory on 64-byte boundaries, as engines and the pool have it.

    numpy's has 16, and a target 16 bytes past its source, modulo 4 KiB, halves a copy's speed.
    """
    return torch.zeros(nbytes, dtype=torch.uint8).numpy()


def raw(nbytes: int, rounds: int) -> Rows:
    """A copy with its CRC-32, beside the copy alone and other CRCs behind a copy."""
    source, target = aligned(nbytes), aligned(nbytes)
    source[:] = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def with_crc(crc32: Callable[[np.ndarray], int]) -> Work:
        def work() -> None:
            np.copyto(target, source)
            crc32(target)

        return work

    found = Contest(
        nbytes,
        {
            "OrbitKV": lambda: copy_with_crc32(source, target),
            "copy, then isal": with_crc(isal_zlib.crc32),
            "copy, then zlib": with_crc(zlib.crc32),
            "np.copyto": lambda: np.copyto(target, source),
        },
    ).run(rounds)
    return [(format_nbytes(nbytes), *found.values(), found["OrbitKV"] / found["np.copyto"] * 100)]


def main() -> int:
    """Pin to one core, measure, print three tables."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--rounds", type=int, default=5)
    args = arguments.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    rows = [row for size in SIZES for dtype in NUMPY for row in fp8(size, dtype, args.rounds)]
    columns = ("what", "logical", "target", "OrbitKV", "OrbitKV, 1 MiB a call", "torch")
    columns += ("ml_dtypes", "64 Ki table", "np.copyto", "Rust AVX-512, Xeon 8457C")
    report("FP8, GiB/s of logical bytes, medians", columns, rows, as_json=args.json)
    rows = [
        row
        for bits in (4, 3)
        for size in SIZES
        for role in (Role.K, Role.V)
        for row in turboquant(size, bits, role, args.rounds)
    ]
    columns = ("what", "logical", "target", "OrbitKV", "OrbitKV, 1 MiB a call", "torch")
    columns += ("np.copyto",)
    title = "TurboQuant, D = 128, bfloat16, GiB/s of logical bytes, medians"
    report(title, columns, rows, as_json=args.json)
    rows = [row for size in SIZES for row in raw(size, args.rounds)]
    columns = ("logical", "OrbitKV", "copy, then isal", "copy, then zlib", "np.copyto")
    columns += ("OrbitKV, % of np.copyto (target 70)",)
    report("Raw with CRC-32, GiB/s, medians", columns, rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
