"""docs/format.md in the standard library alone: what it says, written and read without OrbitKV.

Run it to write the vectors again; they come out the same. The tests compare them with what OrbitKV
writes and reads, so neither can change without the other and the document.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
HEADER = struct.Struct("<8sHHIQQ32s28sI")
ROW = struct.Struct("<BBHIQQQ")


@dataclass(frozen=True)
class Stored:
    """One segment of an object, as its table row and payload tell it."""

    format: int
    raw_reason: int
    original_nbytes: int
    payload: bytes


@dataclass(frozen=True)
class Vector:
    """What one file of objects/ holds."""

    generation: int
    key_digest: bytes
    segments: tuple[Stored, ...]


def up(nbytes: int, alignment: int) -> int:
    return (nbytes + alignment - 1) // alignment * alignment


def write(vector: Vector) -> bytes:
    rows, body = b"", b""
    start = at = up(HEADER.size + ROW.size * len(vector.segments), 512)
    for stored in vector.segments:
        body += bytes(up(len(body), 512) - len(body))
        at = start + len(body)
        body += stored.payload
        rows += ROW.pack(
            stored.format,
            stored.raw_reason,
            0,
            zlib.crc32(stored.payload),
            stored.original_nbytes,
            len(stored.payload),
            at,
        )
    total = up(start + len(body), 4096)
    fields = (b"OrbitKV\0", 2, 96, len(vector.segments), vector.generation, total)
    head = HEADER.pack(*fields, vector.key_digest, bytes(28), 0)[:92]
    head += struct.pack("<I", zlib.crc32(head + rows))
    image = head + rows
    image += bytes(start - len(image)) + body
    return image + bytes(total - len(image))


def read(image: bytes) -> Vector:
    """Check everything that the document asks of a reader, in its order."""
    magic, version, header, count, generation, total, digest, reserved, crc = HEADER.unpack(
        image[:96]
    )
    assert (magic, version, header, total) == (b"OrbitKV\0", 2, 96, len(image))
    assert 1 <= count <= 65536
    end = 96 + 32 * count
    assert end <= len(image)
    assert crc == zlib.crc32(image[:92] + image[96:end])
    rows = list(ROW.iter_unpack(image[96:end]))
    segments = []
    for format_, reason, flags, payload_crc, original, nbytes, offset in rows:
        assert offset == up(end, 512)
        assert offset + nbytes <= len(image)
        assert not any(image[end:offset])
        assert flags == 0
        assert original <= 2**40
        assert format_ != 0 or original == nbytes
        end = offset + nbytes
        assert payload_crc == zlib.crc32(image[offset:end])
        segments.append(Stored(format_, reason, original, image[offset:end]))
    assert total == up(end, 4096)
    assert not any(image[end:])
    assert not any(reserved)
    return Vector(generation, digest, tuple(segments))


def digest_fields(*fields: bytes) -> bytes:
    return hashlib.sha256(b"".join(struct.pack("<Q", len(f)) + f for f in fields)).digest()


def key_digest(namespace: str, page_hash: bytes, group: str) -> bytes:
    return digest_fields(namespace.encode(), page_hash, group.encode())


def page_hashes(namespace: str, tokens: Sequence[int], page_tokens: int) -> Iterator[bytes]:
    parent = digest_fields(b"root", namespace.encode())
    for page in range(len(tokens) // page_tokens):
        own = tokens[page * page_tokens : (page + 1) * page_tokens]
        parent = digest_fields(parent, struct.pack(f"<{page_tokens}q", *own))
        yield parent


def fingerprint(page_tokens: int, slots: Sequence[dict[str, object]]) -> bytes:
    order = ("name", "layer", "role", "dtype", "heads", "head_dim", "group", "axes")
    values = [str(slot[field]) for slot in slots for field in order]
    return digest_fields(*(text.encode() for text in ("geometry", str(page_tokens), *values)))


def namespace(case: dict[str, object]) -> str:
    slots = case["slots"]
    assert isinstance(slots, list)
    assert isinstance(case["page_tokens"], int)
    fields = (
        str(case["name"]).encode(),
        str(case["revision"]).encode(),
        ",".join(dict.fromkeys(slot["dtype"] for slot in slots)).encode(),
        fingerprint(case["page_tokens"], slots),
        str(case["page_tokens"]).encode(),
        f"{case['rank']}/{case['ranks']}".encode(),
        str(case["storage_codec"]).encode(),
        str(case["rotation_seed"]).encode(),
        bytes.fromhex(str(case["salt_hex"])),
    )
    return "orbitkv:v2:" + digest_fields(*fields).hex()


def noise(name: str, nbytes: int) -> bytes:
    """Bytes that follow from a name: SHA-256 of the name and a counter, cut to length."""
    blocks = (hashlib.sha256(f"{name}/{i}".encode()).digest() for i in range(nbytes // 32 + 1))
    return b"".join(blocks)[:nbytes]


def raw(name: str, nbytes: int, *, reason: int = 0) -> Stored:
    return Stored(0, reason, nbytes, noise(name, nbytes))


VECTORS = {
    "single": Vector(7, noise("single/key", 32), (raw("single/0", 1024),)),
    "unaligned": Vector(
        2**40 + 1,
        noise("unaligned/key", 32),
        tuple(raw(f"unaligned/{i}", n) for i, n in enumerate((1, 511, 512, 513, 100))),
    ),
    "many": Vector(
        2**64 - 1,
        noise("many/key", 32),
        tuple(raw(f"many/{i}", 1 + 37 * i % 700) for i in range(20)),
    ),
    "user-format": Vector(
        1,
        noise("user-format/key", 32),
        (
            Stored(128, 0, 4096, noise("user-format/0", 1234)),
            raw("user-format/1", 700, reason=1),
            Stored(255, 0, 65536, b""),
        ),
    ),
}

_SLOT = {
    "layer": 0,
    "dtype": "float16",
    "heads": 2,
    "head_dim": 64,
    "group": "attention",
    "axes": "head,token,dim",
}
KEYS: list[dict[str, object]] = [
    {
        "name": "org/model",
        "revision": "0123abcd",
        "rank": 1,
        "ranks": 4,
        "salt_hex": b"tenant".hex(),
        "storage_codec": "none",
        "rotation_seed": 0,
        "page_tokens": 4,
        "slots": [
            _SLOT | {"name": "layers.0.k", "role": "k"},
            _SLOT | {"name": "layers.0.v", "role": "v"},
        ],
        "tokens": [1, 2, 3, 4, 5, 6, 7, 2**31, 9],
        "group": "attention",
    },
    {
        "name": "módel",
        "revision": "",
        "rank": 0,
        "ranks": 1,
        "salt_hex": "",
        "storage_codec": "none",
        "rotation_seed": 5,
        "page_tokens": 2,
        "slots": [
            _SLOT | {"name": "a", "role": "kv", "dtype": "bfloat16", "axes": "token,head,dim"},
            _SLOT | {"name": "b", "role": "k", "dtype": "float8_e4m3fn", "layer": 11},
            _SLOT | {"name": "c", "role": "v", "dtype": "bfloat16", "group": "state"},
        ],
        "tokens": [-1, 0, 2**62, 3],
        "group": "state",
    },
]


def keys() -> list[dict[str, object]]:
    """Every case with what follows from it."""
    found = []
    for case in KEYS:
        space, page_tokens, tokens = namespace(case), case["page_tokens"], case["tokens"]
        assert isinstance(page_tokens, int)
        assert isinstance(tokens, list)
        hashes = list(page_hashes(space, tokens, page_tokens))
        slots = case["slots"]
        assert isinstance(slots, list)
        found.append(
            case
            | {
                "fingerprint": fingerprint(page_tokens, slots).hex(),
                "namespace": space,
                "page_hashes": [page_hash.hex() for page_hash in hashes],
                "key_digests": [key_digest(space, h, str(case["group"])).hex() for h in hashes],
            }
        )
    return found


def main() -> None:
    for name, vector in VECTORS.items():
        (HERE / "objects" / f"{name}.bin").write_bytes(write(vector))
    text = json.dumps(keys(), indent=1, ensure_ascii=False)
    (HERE / "keys.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
