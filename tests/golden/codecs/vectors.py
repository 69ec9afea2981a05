"""docs/codecs.md in NumPy, one operation at a time: what it says, without OrbitKV.

Run it to write the vectors again; they come out the same. The tests compare them with what OrbitKV
encodes and decodes, so neither can change without the other and the document.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent

CENTROIDS = {
    3: "3e7add6e 3f41724a 3fabed88 40099f6e",
    4: "3e038342 3ec6bb0c 3f282a1d 3f71455e 3fa0cdac 3fcf1769 400461c3 402ec7b7",
}
SEED = 0x0123456789ABCDEF
HEAD_DIMS = (32, 64, 128, 256)
TOKENS, HEADS = 3, 2
ROLES = ("k", "v", "kv")
DTYPES = ("bfloat16", "float16")
CODECS = ("fp8", "turboquant-4", "turboquant-3")

f32 = np.float32


def centroids(bits: int) -> np.ndarray:
    """All of them, ascending, FP32."""
    half = np.array([int(word, 16) for word in CENTROIDS[bits].split()], np.uint32).view(f32)
    return np.concatenate([-half[::-1], half])


def edges(bits: int) -> np.ndarray:
    """Between neighbours, FP32; the middle one is zero."""
    wide = centroids(bits).astype(np.float64)
    return ((wide[1:] + wide[:-1]) / 2).astype(f32)


def signs(seed: int, head_dim: int) -> np.ndarray:
    """+1 or -1 for each element: FP32[head_dim]."""
    found = []
    for index in range(head_dim):
        z = (seed + (index + 1) * 0x9E3779B97F4A7C15) % 2**64
        z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        found.append(-1 if (z ^ (z >> 31)) >= 2**63 else 1)
    return np.array(found, f32)


def floats(words: np.ndarray, dtype: str) -> np.ndarray:
    """Elements as FP32: exact."""
    if dtype == "bfloat16":
        return (words.astype(np.uint32) << 16).view(f32)
    return words.view(np.float16).astype(f32)


def words_of(values: np.ndarray, dtype: str) -> np.ndarray:
    """Round FP32 to elements, to nearest even; FP16 is clamped to its finite range first."""
    if dtype == "float16":
        return np.clip(values, f32(-65504), f32(65504)).astype(np.float16).view(np.uint16)
    bits = values.view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def halving_sum(values: np.ndarray) -> np.float32:
    while len(values) > 1:
        half = len(values) // 2
        values = values[:half] + values[half:]
    return values[0]


def transform(values: np.ndarray) -> np.ndarray:
    step = len(values) // 2
    while step:
        pairs = values.reshape(-1, 2, step)
        values = np.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1).reshape(-1)
        step //= 2
    return values


def pack(codes: np.ndarray, bits: int) -> bytes:
    if bits == 4:
        low, high = codes.reshape(2, -1)
        return (low | high << 4).astype(np.uint8).tobytes()
    a, b, c, d = codes.reshape(4, -1)
    pairs = (a & 3) | (b & 3) << 2 | (c & 3) << 4 | (d & 3) << 6
    low, high = (a >> 2 | (b >> 2) << 1 | (c >> 2) << 2 | (d >> 2) << 3).reshape(2, -1)
    return pairs.astype(np.uint8).tobytes() + (low | high << 4).astype(np.uint8).tobytes()


def unpack(packed: bytes, bits: int) -> np.ndarray:
    found = np.frombuffer(packed, np.uint8).astype(np.int64)
    if bits == 4:
        return np.concatenate([found & 15, found >> 4])
    quarter = len(found) * 2 // 3
    pairs, nibbles = found[:quarter], np.concatenate([found[quarter:] & 15, found[quarter:] >> 4])
    return np.concatenate([pairs >> 2 * j & 3 | (nibbles >> j & 1) << 2 for j in range(4)])


def encode_key(x: np.ndarray, bits: int, sign: np.ndarray) -> tuple[bytes, np.float16]:
    norm = np.sqrt(halving_sum(x * x)).astype(np.float16)
    inverse = f32(1) / f32(norm) if norm else f32(0)
    z = transform(x * sign) * inverse
    codes = (z[:, None] >= edges(bits)[None, :]).sum(1)
    return pack(codes, bits), norm


def decode_key(packed: bytes, norm: np.float16, bits: int, sign: np.ndarray) -> np.ndarray:
    c = centroids(bits)[unpack(packed, bits)]
    factor = f32(norm) / np.sqrt(f32(len(c)) * halving_sum(c * c))
    return transform(c) * factor * sign + f32(0)


def encode_value(v: np.ndarray, bits: int) -> tuple[bytes, np.float16, np.float16]:
    levels = f32(2**bits - 1)
    least = v.min() + f32(0)
    scale = max((v.max() - least) / levels, f32(2.0**-24)).astype(np.float16)
    minimum = least.astype(np.float16)
    above = v - f32(minimum)
    middles = (np.arange(1, 2**bits).astype(f32) - f32(0.5)) * f32(scale)
    return pack((above[:, None] >= middles[None, :]).sum(1), bits), scale, minimum


def decode_value(packed: bytes, scale: np.float16, minimum: np.float16, bits: int) -> np.ndarray:
    return unpack(packed, bits).astype(f32) * f32(scale) + f32(minimum)


def turboquant_encode(words: np.ndarray, dtype: str, role: str, bits: int, dim: int) -> bytes:
    """Encode uint16[rows, width]."""
    sign = signs(SEED, dim)
    codes: list[bytes] = []
    norms, scales, minima = [], [], []
    for row in floats(words, dtype).reshape(len(words), len(role), dim):
        for part, vector in zip(role, row, strict=True):
            if part == "k":
                packed, norm = encode_key(vector, bits, sign)
                norms.append(norm)
            else:
                packed, scale, minimum = encode_value(vector, bits)
                scales.append(scale)
                minima.append(minimum)
            codes.append(packed)
    return b"".join(codes) + np.array(norms + scales + minima, "<f2").tobytes()


def turboquant_decode(payload: bytes, dtype: str, role: str, bits: int, dim: int) -> np.ndarray:
    """Decode to uint16[rows, width]."""
    sign = signs(SEED, dim)
    nbytes = dim * bits // 8
    rows = len(payload) // (nbytes * len(role) + 2 * role.count("k") + 4 * role.count("v"))
    scalars = np.frombuffer(payload[rows * len(role) * nbytes :], "<f2")
    norms, rest = scalars[: rows * role.count("k")], scalars[rows * role.count("k") :]
    scales, minima = rest[: len(rest) // 2], rest[len(rest) // 2 :]
    found = []
    for index in range(rows * len(role)):
        packed = payload[index * nbytes : (index + 1) * nbytes]
        row, part = divmod(index, len(role))
        if role[part] == "k":
            found.append(decode_key(packed, norms[row], bits, sign))
        else:
            found.append(decode_value(packed, scales[row], minima[row], bits))
    return words_of(np.concatenate(found), dtype).reshape(rows, -1)


# Ascending: 0 to 448. A code is its index; bit 7 is the sign.
FP8 = np.array(
    [(c % 8) * 2.0**-9 if c < 8 else (8 + c % 8) * 2.0 ** (c // 8 - 10) for c in range(127)]
)


def fp8_encode(words: np.ndarray, dtype: str) -> bytes:
    found = bytearray()
    for value in floats(words, dtype).reshape(-1).astype(np.float64):
        distances = np.abs(FP8 - abs(value))
        code, *tie = np.flatnonzero(distances == distances.min())
        if tie and code % 2:
            code = tie[0]
        found.append(int(code) | (128 if np.signbit(value) else 0))
    return bytes(found)


def fp8_decode(payload: bytes, dtype: str, width: int) -> np.ndarray:
    codes = np.frombuffer(payload, np.uint8)
    values = np.where(codes > 127, -FP8[codes & 127], FP8[codes & 127]).astype(f32)
    return words_of(values, dtype).reshape(-1, width)


def source(name: str, rows: int, width: int, dtype: str) -> np.ndarray:
    """Uint16[rows, width]: sums of eight bytes of noise, then a few rows of a special kind.

    Noise is SHA-256 of ``NAME/COUNTER``, counter from 0, joined and cut to length.
    """
    blocks = (hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(rows * width))
    noise = np.frombuffer(b"".join(blocks)[: rows * width * 8], np.uint8)
    values = (noise.reshape(rows, width, 8).sum(2, dtype=np.int64) - 1020).astype(f32) / f32(208)
    values[1] = 0
    values[2] = f32(-0.75)
    values[3, 5] = f32(300)
    values[4] *= f32(2.0**-18)  # FP16 subnormals
    values[5, ::3] = f32(-0.0)
    if dtype == "float16":
        return values.astype(np.float16).view(np.uint16)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


@dataclass(frozen=True)
class Case:
    """One segment: where its three parts lie in its file."""

    codec: str
    dtype: str
    role: str
    head_dim: int

    @property
    def file(self) -> str:
        return f"{self.codec}-{self.dtype}-{self.head_dim}.bin"

    @property
    def width(self) -> int:
        return self.head_dim * len(self.role)

    def words(self) -> np.ndarray:
        name = f"{self.dtype}-{self.head_dim}-{self.role}"
        return source(name, TOKENS * HEADS, self.width, self.dtype)

    def payload(self, words: np.ndarray) -> bytes:
        if self.codec == "fp8":
            return fp8_encode(words, self.dtype)
        return turboquant_encode(words, self.dtype, self.role, int(self.codec[-1]), self.head_dim)

    def decoded(self, payload: bytes) -> np.ndarray:
        if self.codec == "fp8":
            return fp8_decode(payload, self.dtype, self.width)
        return turboquant_decode(payload, self.dtype, self.role, int(self.codec[-1]), self.head_dim)


CASES = [Case(*fields) for fields in itertools.product(CODECS, DTYPES, ROLES, HEAD_DIMS)]


def made() -> tuple[dict[str, bytes], list[dict[str, object]]]:
    """Bytes of every file, and the index."""
    files: dict[str, bytes] = {}
    index: list[dict[str, object]] = []
    for case in CASES:
        words = case.words()
        payload = case.payload(words)
        parts = [words.tobytes(), payload, case.decoded(payload).tobytes()]
        offset = len(files.get(case.file, b""))
        files[case.file] = files.get(case.file, b"") + b"".join(parts)
        fields = {name: getattr(case, name) for name in ("codec", "dtype", "role", "head_dim")}
        where = {"file": case.file, "offset": offset, "nbytes": [len(part) for part in parts]}
        index.append(fields | {"tokens": TOKENS, "heads": HEADS, "seed": SEED} | where)
    return files, index


def stored() -> Iterator[tuple[dict[str, object], bytes, bytes, bytes]]:
    """Every case as the files hold it: fields, source, payload, decoded."""
    for entry in json.loads((HERE / "index.json").read_text(encoding="utf-8")):
        image = (HERE / entry["file"]).read_bytes()
        ends = list(itertools.accumulate([entry["offset"], *entry["nbytes"]]))
        source_, payload, decoded = (image[a:b] for a, b in itertools.pairwise(ends))
        yield entry, source_, payload, decoded


def main() -> None:
    files, index = made()
    for name, image in files.items():
        (HERE / name).write_bytes(image)
    text = ",\n".join(f" {json.dumps(entry)}" for entry in index)
    (HERE / "index.json").write_text(f"[\n{text}\n]\n", encoding="utf-8")


if __name__ == "__main__":
    main()
