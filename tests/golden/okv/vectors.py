"""docs/okv.md in NumPy and the standard library: what it says, without OrbitKV.

Run it to write the files again; they come out the same. Each case is three files: what goes in
(``.in.safetensors``), the object, and what comes back (``.out.safetensors``).
"""

from __future__ import annotations

import json
import re
import runpy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np

HERE = Path(__file__).parent
objects = SimpleNamespace(**runpy.run_path(str(HERE.parent / "vectors.py")))
codecs = SimpleNamespace(**runpy.run_path(str(HERE.parent / "codecs" / "vectors.py")))

TOOL = "golden 1"
SEED = codecs.SEED
FORMATS = {"none": 0, "fp8": 2, "turboquant-4": 3, "turboquant-3": 4}
MANIFEST = 64
DTYPES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}  # widest first, as safetensors sorts
HALF = {"BF16": "bfloat16", "F16": "float16"}
METADATA = {"format": "pt", "model": "módel 😀"}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a case, and what becomes of it: 'encoded', or the number of its reason."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fate: str | int
    special: float | None = None  # put in place of its first element

    @property
    def role(self) -> str:
        return self.name.rpartition(".")[2]

    @property
    def head_dim(self) -> int:
        return self.shape[2] // len(self.role)

    def elements(self, case: str) -> bytes:
        """Noise: for the half dtypes numbers, for the others any bytes."""
        name, count = f"{case}/{self.name}", int(np.prod(self.shape))
        if self.dtype not in HALF:
            return objects.noise(name, count * DTYPES[self.dtype])
        rows = max(6, count // self.shape[2])
        words = codecs.source(name, rows, self.shape[2], HALF[self.dtype]).reshape(-1)[:count]
        if self.special is not None:
            special = np.array([self.special], np.float32)
            words[0] = codecs.words_of(special, HALF[self.dtype])[0]
        return words.tobytes()


CASES: dict[str, tuple[dict[str, str], tuple[Tensor, ...]]] = {
    "none": (
        METADATA,
        (
            Tensor("layers.0.k", "F32", (1, 2, 5), 0),
            Tensor("layers.0.v", "F8_E4M3", (2, 1, 3), 0),
            Tensor("layers.2.kv", "BF16", (3, 2, 8), 0),
            Tensor("layers.10.k", "F16", (1, 1, 7), 0),
        ),
    ),
    "fp8": (
        {},
        (
            Tensor("layers.0.k", "BF16", (2, 4, 64), "encoded"),
            Tensor("layers.0.v", "F16", (1, 16, 48), "encoded"),
            Tensor("layers.1.k", "BF16", (1, 1, 8), 1),
            Tensor("layers.1.v", "F32", (1, 1, 300), 5),
            Tensor("layers.2.k", "F8_E4M3", (1, 8, 96), 1),
            Tensor("layers.2.v", "F16", (2, 8, 32), 2, float("nan")),
            Tensor("layers.3.kv", "BF16", (2, 8, 64), 3, 450.0),
        ),
    ),
} | {
    f"turboquant-{bits}": (
        {},
        (
            Tensor("layers.0.k", "BF16", (1, 16, 32), 8),
            Tensor("layers.1.v", "BF16", (1, 16, 32), 8),
            Tensor("layers.3.k", "BF16", (2, 8, 32), "encoded"),
            Tensor("layers.3.v", "F16", (2, 8, 64), "encoded"),
            Tensor("layers.3.kv", "BF16", (1, 8, 256), "encoded"),
            Tensor("layers.4.k", "F16", (1, 8, 80), 6),
            Tensor("layers.5.v", "BF16", (1, 16, 32), 2, float("inf")),
            Tensor("layers.6.k", "F32", (1, 1, 32), 8),
            Tensor("layers.7.k", "F16", (1, 1, 32), 8),
        ),
    )
    for bits in (4, 3)
}


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii")


def manifest(case: str) -> bytes:
    metadata, tensors = CASES[case]
    rotates = case.startswith("turboquant")
    return canonical(
        {
            "okv": 1,
            "tool": TOOL,
            "codec": case,
            "rotation_seed": str(SEED) if rotates else None,
            "signs_version": 1 if rotates else None,
            "metadata": metadata,
            "tensors": [
                {"name": t.name, "dtype": t.dtype, "shape": t.shape, "role": t.role}
                for t in tensors
            ],
        }
    )


def encoded(case: str, tensor: Tensor) -> tuple[bytes, bytes]:
    """Payload, and what it decodes to."""
    dtype, width = HALF[tensor.dtype], tensor.shape[2]
    words = np.frombuffer(tensor.elements(case), np.uint16).reshape(-1, width)
    if case == "fp8":
        payload = codecs.fp8_encode(words, dtype)
        return payload, codecs.fp8_decode(payload, dtype, width).tobytes()
    of = (dtype, tensor.role, int(case[-1]), tensor.head_dim)
    payload = codecs.turboquant_encode(words, *of)
    return payload, codecs.turboquant_decode(payload, *of).tobytes()


def okv(case: str) -> tuple[bytes, dict[str, bytes]]:
    """The object, and each tensor that comes back from it."""
    text = manifest(case)
    segments = [objects.Stored(MANIFEST, 0, len(text), text)]
    back = {}
    for tensor in CASES[case][1]:
        elements = tensor.elements(case)
        if tensor.fate == "encoded":
            payload, back[tensor.name] = encoded(case, tensor)
            stored = objects.Stored(FORMATS[case], 0, len(elements), payload)
        else:
            back[tensor.name] = elements
            stored = objects.Stored(0, tensor.fate, len(elements), elements)
        segments.append(stored)
    vector = objects.Vector(1, objects.digest_fields(b"okv", text), tuple(segments))
    return objects.write(vector), back


def safetensors(case: str, elements: dict[str, bytes]) -> bytes:
    metadata, tensors = CASES[case]
    order = sorted(tensors, key=lambda t: (list(DTYPES).index(t.dtype), t.name))
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for tensor in order:
        offsets = (len(body), len(body) + len(elements[tensor.name]))
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": offsets,
        }
        body += elements[tensor.name]
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def made() -> dict[str, bytes]:
    """Bytes of every file."""
    files = {}
    for case, (_, tensors) in CASES.items():
        assert all(re.fullmatch(r"layers\.\d+\.(k|v|kv)", tensor.name) for tensor in tensors)
        files[f"{case}.okv"], back = okv(case)
        files[f"{case}.in.safetensors"] = safetensors(
            case, {tensor.name: tensor.elements(case) for tensor in tensors}
        )
        files[f"{case}.out.safetensors"] = safetensors(case, back)
    return files


def main() -> None:
    for name, content in made().items():
        (HERE / name).write_bytes(content)


if __name__ == "__main__":
    main()
