"""Files of encoded KV, ``.okv``: one object whose first segment describes the others.

``orbitkv encode``, ``inspect`` and ``decode`` are here, without an engine: a file of tensors goes
in, an object of ``docs/format.md`` comes out, and back. ``docs/okv.md`` describes both.
"""

from __future__ import annotations

import json
import mmap
import os
import re
import reprlib
import secrets
import stat
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from orbitkv.codecs import (
    Codec,
    SegmentCodec,
    SegmentSpec,
    length_of,
    open_host_codec,
    reason_to_stay_raw,
)
from orbitkv.codecs.raw import check_payload
from orbitkv.codecs.slots import PROTECTED_LAYERS
from orbitkv.codecs.tables import SIGNS_VERSION
from orbitkv.errors import CorruptObject, GeometryError, OrbitError, Unavailable
from orbitkv.objects import (
    MAX_SEGMENT_NBYTES,
    MAX_SEGMENTS,
    Bytes,
    Format,
    Header,
    RawReason,
    Row,
    Segment,
    check_payloads,
    crc32,
    object_nbytes,
    read_header,
    write_object,
)
from orbitkv.segment import DTYPE_NBYTES, Role, digest_fields

MANIFEST_VERSION = 1
GENERATION = 1
DTYPES: Mapping[str, str] = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "F8_E4M3": "float8_e4m3fn",
}  # in safetensors' order: the widest first
_FORMATS: Mapping[str, Format] = {
    "none": Format.RAW,
    "fp8": Format.FP8_E4M3FN,
    "turboquant-4": Format.TURBOQUANT4,
    "turboquant-3": Format.TURBOQUANT3,
}
_NAME = re.compile(r"layers\.(0|[1-9][0-9]{0,8})\.(kv|k|v)")
_SEED = re.compile(r"0|[1-9][0-9]{0,19}")
_ROLES = tuple(Role)
_AXES = 3
_SHOWN_FAULTS = 3
# What a manifest may take, so that a reader of JSON is not led to allocate without end.
_MOST_OTHER_NBYTES = 2**20
_MOST_TENSOR_NBYTES = 128

OnCompile = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of a file: its name says layer and role, and its shape the rest.

    Attributes:
        dtype: As safetensors writes it: a key of ``DTYPES``.
        shape: ``[heads, tokens, head_dim]``; of role ``kv``, ``[heads, tokens, 2 * head_dim]``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    layer: int = field(init=False, compare=False)
    spec: SegmentSpec = field(init=False, compare=False)

    def __post_init__(self) -> None:
        """Check it.

        Raises:
            GeometryError: saying what was seen and what is accepted.
        """
        where = f"tensor {_shown(self.name)}"
        named = _NAME.fullmatch(self.name)
        if not named:
            raise GeometryError(
                (f"{where}: accepted names: layers.<i>.k, layers.<i>.v and layers.<i>.kv",)
            )
        if self.dtype not in DTYPES:
            fault = f"{where}: dtype {_shown(self.dtype)}; accepted: {', '.join(DTYPES)}"
            raise GeometryError((fault,))
        role = Role(named[2])
        parts = 2 if role is Role.KV else 1
        counts = all(type(n) is int and 0 < n <= MAX_SEGMENT_NBYTES for n in self.shape)
        if len(self.shape) != _AXES or not counts or self.shape[-1] % parts:
            wanted = "2 * head_dim" if role is Role.KV else "head_dim"
            shape = _shown(list(self.shape))
            fault = f"{where}: shape {shape}; accepted: [heads, tokens, {wanted}], each above 0"
            raise GeometryError((fault,))
        heads, tokens, width = self.shape
        spec = SegmentSpec(
            dtype=DTYPES[self.dtype],
            role=role,
            tokens=tokens,
            heads=heads,
            head_dim=width // parts,
        )
        if spec.original_nbytes > MAX_SEGMENT_NBYTES:
            fault = f"{where}: {spec.original_nbytes} bytes; accepted: {MAX_SEGMENT_NBYTES}"
            raise GeometryError((fault,))
        object.__setattr__(self, "layer", int(named[1]))
        object.__setattr__(self, "spec", spec)

    @property
    def place(self) -> tuple[int, int]:
        """What a file's tensors are sorted by: layer, then ``k``, ``v``, ``kv``."""
        return self.layer, _ROLES.index(self.spec.role)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What the first segment says of the others.

    Attributes:
        tool: Name and version of the program that wrote it.
        rotation_seed: None: of a codec that rotates nothing.
        metadata: That of the file that was encoded, as safetensors has it.
        tensors: Of segment 1 and those after it, sorted by ``place``.
    """

    tool: str
    codec: str
    rotation_seed: int | None
    metadata: Mapping[str, str]
    tensors: tuple[Tensor, ...]

    def to_bytes(self) -> bytes:
        """Write it in the one form that is accepted: sorted keys, no spaces, ASCII."""
        seed = self.rotation_seed
        manifest = {
            "codec": self.codec,
            "metadata": dict(self.metadata),
            "okv": MANIFEST_VERSION,
            "rotation_seed": None if seed is None else str(seed),  # u64: more than a double holds
            "signs_version": None if seed is None else SIGNS_VERSION,
            "tensors": [
                {"dtype": t.dtype, "name": t.name, "role": str(t.spec.role), "shape": t.shape}
                for t in self.tensors
            ],
            "tool": self.tool,
        }
        return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode("ascii")

    @classmethod
    def of(cls, text: bytes) -> Self:
        """Read one, and believe nothing that it would not itself have written.

        Raises:
            CorruptObject: saying what is wrong with it.
        """
        try:
            value = json.loads(text.decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise CorruptObject(f"manifest is not JSON in ASCII: {_line(error)}") from error
        if not isinstance(value, dict):
            raise CorruptObject(f"manifest {_shown(value)}; accepted: an object")
        if value.get("okv") != MANIFEST_VERSION:
            seen = _shown(value.get("okv"))
            raise CorruptObject(f"manifest version {seen}; accepted: {MANIFEST_VERSION}")
        codec = value.get("codec")
        if not isinstance(codec, str) or codec not in _FORMATS:
            raise CorruptObject(f"codec {_shown(codec)}; accepted: {', '.join(_FORMATS)}")
        metadata = value.get("metadata")
        if not isinstance(metadata, dict) or not all(map(_is_text, metadata.values())):
            raise CorruptObject("manifest: metadata that is not text by name")
        tool = value.get("tool")
        if not isinstance(tool, str) or not tool.isprintable() or not all(map(_is_text, metadata)):
            raise CorruptObject("manifest: tool or a name of metadata is not text")
        manifest = cls(
            tool=tool,
            codec=codec,
            rotation_seed=_read_rotation(value) if _rotates(codec) else None,
            metadata=metadata,
            tensors=tuple(_read_tensors(value.get("tensors"))),
        )
        places = [tensor.place for tensor in manifest.tensors]
        if places != sorted(set(places)):
            raise CorruptObject("manifest: tensors out of order, or one of them twice")
        if manifest.to_bytes() != text:  # other keys, other spelling, a role that is not the name's
            raise CorruptObject("manifest is not in canonical form")
        return manifest

    @property
    def key_digest(self) -> bytes:
        """What the header of the file carries as its key."""
        return _key_digest(self.to_bytes())


@dataclass(frozen=True, slots=True)
class Okv:
    """What a file says of itself: header, table and manifest, checked; payloads are not."""

    header: Header
    manifest: Manifest

    @property
    def rows(self) -> tuple[tuple[Tensor, Row], ...]:
        """Each tensor with its row of the segment table."""
        return tuple(zip(self.manifest.tensors, self.header.rows[1:], strict=True))


def _key_digest(manifest: bytes) -> bytes:
    return digest_fields((b"okv", manifest))


def _rotates(codec: str) -> bool:
    return codec.startswith("turboquant-")


def _read_rotation(value: Mapping[str, Any]) -> int:
    seed, signs = value.get("rotation_seed"), value.get("signs_version")
    if signs != SIGNS_VERSION:
        raise CorruptObject(f"signs version {_shown(signs)}; accepted: {SIGNS_VERSION}")
    if not isinstance(seed, str) or not _SEED.fullmatch(seed) or int(seed) >= 2**64:
        raise CorruptObject(f"rotation seed {_shown(seed)}; accepted: text, 0 to 2^64 - 1")
    return int(seed)


def _read_tensors(value: object) -> Iterator[Tensor]:
    if not isinstance(value, list) or not value:
        raise CorruptObject("manifest without tensors")
    for entry in value:
        match entry:
            case {"name": str(name), "dtype": str(dtype), "shape": list(shape)}:
                try:
                    yield Tensor(name, dtype, tuple(shape))
                except GeometryError as error:
                    raise CorruptObject(f"manifest: {error}") from error
            case _:
                raise CorruptObject(f"manifest: tensor {_shown(entry)}")


def _is_text(value: object) -> bool:
    """Whether it can be written as UTF-8: JSON may hold half of a surrogate pair."""
    return isinstance(value, str) and not any("\ud800" <= c <= "\udfff" for c in value)


def _shown(value: object) -> str:
    """Show what a stranger wrote: on one line, neither long nor deep."""
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxlong, short.maxother = 2, 80, 80, 80
    return short.repr(value)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300]


# Objects ----------------------------------------------------------------------------------


def encode_tensors(
    tensors: Iterable[tuple[Tensor, Bytes]],
    codec: Codec,
    *,
    rotation_seed: int,
    metadata: Mapping[str, str],
    tool: str,
) -> Bytes:
    """Make one object of tensors.

    Args:
        tensors: Each with its elements, uint8[original_nbytes], host, contiguous.
        tool: Name and version of the program that encodes.

    Returns:
        The object: uint8[n], a function of the arguments alone.

    Raises:
        GeometryError: there are none, too many, or too much metadata.
    """
    ordered = sorted(tensors, key=lambda pair: pair[0].place)
    if not 0 < len(ordered) < MAX_SEGMENTS:
        raise GeometryError((f"{len(ordered)} tensors; accepted: 1 to {MAX_SEGMENTS - 1}",))
    seed = rotation_seed if _rotates(codec.name) else None
    described = tuple(tensor for tensor, _ in ordered)
    text = Manifest(tool, codec.name, seed, metadata, described).to_bytes()
    if len(text) > _most_manifest_nbytes(len(ordered)):
        most = _MOST_OTHER_NBYTES
        raise GeometryError((f"metadata over {most} bytes; accepted: up to {most} bytes",))
    manifest = np.frombuffer(text, np.uint8)
    segments = [Segment(Format.MANIFEST, manifest, manifest.nbytes, crc32=crc32(manifest))]
    chosen = _choose(codec, described)
    for (tensor, elements), bound in zip(ordered, chosen, strict=True):
        segments.append(_encode_one(tensor, elements, bound))
    image = np.empty(object_nbytes([s.stored_nbytes for s in segments]), np.uint8)
    write_object(image, segments, key_digest=_key_digest(text), generation=GENERATION)
    return image


def _choose(codec: Codec, tensors: tuple[Tensor, ...]) -> Iterator[SegmentCodec | RawReason]:
    """Give each tensor its codec, or why it stays raw, as a pipeline gives its slots theirs."""
    layers = sorted({tensor.layer for tensor in tensors})
    outer = {*layers[:PROTECTED_LAYERS], *layers[-PROTECTED_LAYERS:]}
    bound: dict[SegmentSpec, SegmentCodec | RawReason] = {}
    for tensor in tensors:
        spec = tensor.spec
        if codec.format is Format.RAW:
            yield RawReason.CHOSEN
        elif codec.protects_layers and tensor.layer in outer:
            yield RawReason.PROTECTED_LAYER
        else:
            if spec not in bound:
                found = codec.bind(spec)
                if not isinstance(found, RawReason):
                    reason = reason_to_stay_raw(length_of(found), spec.original_nbytes)
                    found = found if reason is None else reason
                bound[spec] = found
            yield bound[spec]


def _encode_one(tensor: Tensor, elements: Bytes, bound: SegmentCodec | RawReason) -> Segment:
    if not isinstance(bound, RawReason):
        payload = np.empty(length_of(bound), np.uint8)
        result = bound.encode(_words(tensor, elements), payload)
        if not isinstance(result, RawReason):
            return Segment(bound.format, payload, elements.nbytes, crc32=crc32(payload))
        bound = result
    return Segment(Format.RAW, elements, elements.nbytes, bound, crc32(elements))


def _words(tensor: Tensor, elements: Bytes) -> np.ndarray[Any, Any]:
    words = elements.view(f"u{DTYPE_NBYTES[tensor.spec.dtype]}")
    return words if words.flags.aligned else words.copy()


def _most_manifest_nbytes(tensors: int) -> int:
    return _MOST_OTHER_NBYTES + _MOST_TENSOR_NBYTES * tensors


def read_okv(image: Bytes) -> Okv:
    """Check a file's header, table and manifest. Of the payloads it reads the manifest only.

    Args:
        image: uint8[n], host: the file's bytes and nothing after them.

    Raises:
        CorruptObject: naming what was seen and what is accepted.
    """
    header = read_header(image)
    rows = header.rows
    row = rows[0]
    if row.format != Format.MANIFEST:
        raise CorruptObject(
            f"segment 0: format {row.format}; accepted: {Format.MANIFEST:d}, "
            "the manifest with which an .okv file begins"
        )
    if row.stored_nbytes != row.original_nbytes or row.raw_reason:
        raise CorruptObject("segment 0: the manifest's lengths or reason differ from its own")
    most = _most_manifest_nbytes(len(rows) - 1)
    if row.stored_nbytes > most:
        raise CorruptObject(f"manifest of {row.stored_nbytes} bytes; accepted: {most} or fewer")
    text = image[row.offset : row.offset + row.stored_nbytes].tobytes()
    seen = crc32(text)
    if seen != row.crc32:
        raise CorruptObject(f"segment 0: crc32 {seen:08x}; stored {row.crc32:08x}")
    digest = _key_digest(text)
    if digest != header.key_digest:
        raise CorruptObject(
            f"key digest {header.key_digest.hex()}; accepted: {digest.hex()}, the manifest's"
        )
    manifest = Manifest.of(text)
    if len(manifest.tensors) != len(rows) - 1:
        raise CorruptObject(
            f"manifest of {len(manifest.tensors)} tensors; segments after it: {len(rows) - 1}"
        )
    okv = Okv(header, manifest)
    for tensor, of_tensor in okv.rows:
        _check_row(manifest.codec, tensor, of_tensor)
    return okv


def _check_row(codec: str, tensor: Tensor, row: Row) -> None:
    if row.original_nbytes != tensor.spec.original_nbytes:
        raise CorruptObject(
            f"tensor {tensor.name}: {row.original_nbytes} bytes; "
            f"its shape and dtype make {tensor.spec.original_nbytes}"
        )
    if row.format == Format.RAW:
        return
    if row.format != _FORMATS[codec]:
        raise CorruptObject(f"tensor {tensor.name}: format {row.format} in a file of {codec}")
    if row.raw_reason:
        raise CorruptObject(f"tensor {tensor.name}: encoded, with a reason to be raw")


def decode_tensors(image: Bytes, okv: Okv, on_compile: OnCompile) -> Iterator[Bytes]:
    """Check every payload and all padding, then decode one tensor after the other.

    Args:
        image: As it was given to ``read_okv``.

    Yields:
        uint8[original_nbytes] for each tensor, in order. Raw ones are views of ``image``.

    Raises:
        CorruptObject: naming the segment that is not what it says.
    """
    segments = check_payloads(image, okv.header)[1:]
    bound: dict[SegmentSpec, SegmentCodec] = {}
    codec: Codec | None = None
    for tensor, segment in zip(okv.manifest.tensors, segments, strict=True):
        if segment.format == Format.RAW:
            yield segment.payload
            continue
        if codec is None:
            seed = okv.manifest.rotation_seed or 0
            codec = open_host_codec(okv.manifest.codec, rotation_seed=seed, on_compile=on_compile)
        try:
            if tensor.spec not in bound:
                bound[tensor.spec] = _bind_stored(codec, tensor.spec)
            elements = _decode_one(segment.payload, bound[tensor.spec])
        except CorruptObject as error:
            raise CorruptObject(f"tensor {tensor.name}: {error}") from error
        yield elements


def _bind_stored(codec: Codec, spec: SegmentSpec) -> SegmentCodec:
    bound = codec.bind(spec)
    if isinstance(bound, RawReason):
        raise CorruptObject(f"encoded; {codec.name} would leave it raw: {bound.name.lower()}")
    return bound


def _decode_one(payload: Bytes, codec: SegmentCodec) -> Bytes:
    check_payload(payload, length_of(codec))  # before room is taken: a shape may lie
    words = np.empty(codec.spec.elements, f"u{DTYPE_NBYTES[codec.spec.dtype]}")
    codec.decode(payload, words)
    return words.view(np.uint8)


# Files ------------------------------------------------------------------------------------


def encode_file(
    source: Path, target: Path, *, codec: str, rotation_seed: int, tool: str, on_compile: OnCompile
) -> Okv:
    """Encode a safetensors file into an object of its own.

    Raises:
        OrbitError: a file cannot be read or written, or is none of safetensors; or naming a tensor
            that is not KV, and what is accepted.
        Unavailable: the codec, or the package ``safetensors``, cannot be had.
    """
    opened = open_host_codec(codec, rotation_seed=rotation_seed, on_compile=on_compile)
    target = _checked_target(source, target)
    with _about(source):
        tensors, metadata = _read_safetensors(source)
        try:
            image = encode_tensors(
                tensors, opened, rotation_seed=rotation_seed, metadata=metadata, tool=tool
            )
        except GeometryError as error:
            raise OrbitError(f"{source}: {error}") from error
    _write_file(target, [image])
    return read_okv(image)


def decode_file(source: Path, target: Path, *, on_compile: OnCompile) -> Okv:
    """Decode an object into a safetensors file, once all of it has been checked and decoded.

    Raises:
        CorruptObject: the object is damaged; nothing is written.
        OrbitError: a file cannot be read or written.
    """
    target = _checked_target(source, target)
    with _about(source):
        read_okv(_mapped(source))  # before as many bytes are read as the file claims to have
        image = np.fromfile(source, np.uint8)
        okv = read_okv(image)
        decoded = list(decode_tensors(image, okv, on_compile))
    _write_file(target, safetensors_parts(okv.manifest, decoded))
    return okv


def inspect_file(source: Path, *, verify: bool, on_compile: OnCompile) -> Okv:
    """Read what a file says of itself, without its payloads unless they are to be verified.

    Raises:
        CorruptObject: the object is damaged.
        OrbitError: the file cannot be read.
    """
    with _about(source):
        okv = read_okv(_mapped(source))
        if verify:
            image = np.fromfile(source, np.uint8)
            okv = read_okv(image)
            for _ in decode_tensors(image, okv, on_compile):
                pass
    return okv


def safetensors_parts(manifest: Manifest, decoded: Iterable[Bytes]) -> list[Bytes]:
    """Lay decoded tensors out as a safetensors file: its header, then each tensor's bytes.

    Equal to what ``safetensors.serialize`` returns, but for its metadata, whose order there
    changes from one process to the next.
    """
    dtypes = list(DTYPES)
    pairs = zip(manifest.tensors, decoded, strict=True)
    ordered = sorted(pairs, key=lambda pair: (dtypes.index(pair[0].dtype), pair[0].name))
    header: dict[str, object] = {}
    if manifest.metadata:
        header["__metadata__"] = dict(sorted(manifest.metadata.items()))
    end = 0
    for tensor, elements in ordered:
        start, end = end, end + elements.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": (start, end),
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = np.frombuffer(len(text).to_bytes(8, "little") + text, np.uint8)
    return [head, *(elements for _, elements in ordered)]


def _read_safetensors(source: Path) -> tuple[list[tuple[Tensor, Bytes]], dict[str, str]]:
    try:
        from safetensors import SafetensorError, deserialize  # noqa: PLC0415 - of an extra
    except ImportError as error:
        raise Unavailable(
            f"the package safetensors cannot be imported ({error}); "
            "to get it: pip install safetensors"
        ) from error
    _check_regular(source)
    stored = source.read_bytes()
    try:
        found: list[tuple[str, Any]] = list(deserialize(stored))  # type: ignore[no-untyped-call]
    except SafetensorError as error:
        raise OrbitError(f"{source}: not a safetensors file: {_line(error)}") from error
    header_end = 8 + int.from_bytes(stored[:8], "little")  # within the file: it has been parsed
    metadata = json.loads(stored[8:header_end]).get("__metadata__") or {}
    del stored
    tensors: list[tuple[Tensor, Bytes]] = []
    faults: list[str] = []
    for name, one in sorted(found, key=lambda pair: pair[0]):
        try:
            tensor = Tensor(name, str(one["dtype"]), tuple(one["shape"]))
        except GeometryError as error:
            faults += error.faults
        else:
            tensors.append((tensor, np.frombuffer(one["data"], np.uint8)))
    if faults:
        more = len(faults) - _SHOWN_FAULTS
        shown = "; ".join(faults[:_SHOWN_FAULTS])
        raise OrbitError(f"{source}: {shown}" + (f"; and {more} more" if more > 0 else ""))
    return tensors, metadata


def _check_regular(path: Path) -> int:
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
        raise OrbitError(f"{path}: not a regular file")
    return status.st_size


def _mapped(path: Path) -> Bytes:
    """View a file without reading it. Only what is looked at gets loaded."""
    if _check_regular(path) == 0:
        return np.empty(0, np.uint8)
    with path.open("rb") as file:
        return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)


@contextmanager
def _about(path: Path) -> Iterator[None]:
    """Name the file in what is said of it, and of the system's errors with it."""
    try:
        yield
    except CorruptObject as error:
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        raise OrbitError(f"{path}: {error.strerror or _line(error)}") from error
    except MemoryError as error:
        raise OrbitError(f"{path}: takes more memory than this process can have") from error


def _checked_target(source: Path, target: Path) -> Path:
    """Find where the output goes, before any work is done for it: past links, never the input."""
    with _about(target):
        target = Path(os.path.realpath(target))
        if not target.parent.is_dir():
            raise OrbitError(f"{target}: no such directory: {target.parent}")
        if target.exists():
            if not target.is_file():
                raise OrbitError(f"{target}: not a regular file; it is left as it is")
            if source.exists() and target.samefile(source):
                raise OrbitError(f"{target}: is the input; accepted: another file")
    return target


def _write_file(target: Path, parts: Iterable[Bytes]) -> None:
    """Write a neighbour, and let it take the target's place once it is on the disk whole."""
    neighbour = target.with_name(f".orbitkv-{os.getpid()}-{secrets.token_hex(4)}.tmp")
    with _about(target):
        try:
            with neighbour.open("xb") as file:
                for part in parts:
                    file.write(part.data)
                file.flush()
                os.fsync(file.fileno())
            neighbour.replace(target)
        finally:
            neighbour.unlink(missing_ok=True)
        directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)  # or the rename may be lost with the power
        finally:
            os.close(directory)


# What is told of a file -------------------------------------------------------------------


def summary(okv: Okv) -> str:
    """Say in one line what became of the tensors."""
    rows = [row for _, row in okv.rows]
    raw = Counter(_reason(row) for row in rows if row.format == Format.RAW)
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(raw.items()))
    stored, original = _totals(okv)
    return (
        f"{len(rows)} tensors, {len(rows) - raw.total()} encoded, {raw.total()} raw"
        + (f" ({reasons})" if reasons else "")
        + f"; {stored} of {original} bytes, ratio {stored / original:.3f}"
    )


def _totals(okv: Okv) -> tuple[int, int]:
    rows = [row for _, row in okv.rows]
    return sum(row.stored_nbytes for row in rows), sum(row.original_nbytes for row in rows)


def _format(row: Row) -> str:
    return Format(row.format).name.lower()


def _reason(row: Row) -> str | None:
    """Name a raw segment's reason; a number that is not known stays one."""
    if row.format != Format.RAW:
        return None
    try:
        return RawReason(row.raw_reason).name.lower()
    except ValueError:
        return str(row.raw_reason)


def to_json(okv: Okv, *, verified: bool) -> str:
    """Write all that is known of a file as one JSON object on one line."""
    header, manifest = okv.header, okv.manifest
    stored, original = _totals(okv)
    first = header.rows[0]
    segments: list[dict[str, object]] = [
        {
            "name": tensor.name,
            "layer": tensor.layer,
            "role": tensor.spec.role,
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "format": _format(row),
            "raw_reason": _reason(row),
            "original_nbytes": row.original_nbytes,
            "stored_nbytes": row.stored_nbytes,
            "ratio": row.stored_nbytes / row.original_nbytes,
            "offset": row.offset,
            "crc32": f"{row.crc32:08x}",
        }
        for tensor, row in okv.rows
    ]
    return json.dumps(
        {
            "file_nbytes": header.total_nbytes,
            "generation": header.generation,
            "key_digest": header.key_digest.hex(),
            "tool": manifest.tool,
            "codec": manifest.codec,
            "rotation_seed": manifest.rotation_seed,
            "signs_version": None if manifest.rotation_seed is None else SIGNS_VERSION,
            "metadata": manifest.metadata,
            "manifest_nbytes": first.stored_nbytes,
            "segments": segments,
            "original_nbytes": original,
            "stored_nbytes": stored,
            "ratio": stored / original,
            "raw_reasons": Counter(seg["raw_reason"] for seg in segments if seg["raw_reason"]),
            "verified": verified,
        }
    )


def render(okv: Okv, console: Console, *, verified: bool) -> None:
    """Print a file's header, its segment table and its totals."""
    header, manifest = okv.header, okv.manifest
    seed = manifest.rotation_seed
    facts = Table.grid(padding=(0, 2))
    for name, value in (
        ("written by", manifest.tool),
        ("codec", manifest.codec),
        *(() if seed is None else (("rotation", f"seed {seed}, signs version {SIGNS_VERSION}"),)),
        ("key digest", header.key_digest.hex()),
        ("generation", str(header.generation)),
        ("file", f"{header.total_nbytes} bytes"),
        *((f"metadata {name!r}", repr(text)) for name, text in sorted(manifest.metadata.items())),
    ):
        facts.add_row(Text(name), Text(value, overflow="fold"))
    console.print(facts)
    table = Table("name", "dtype", "shape", "format", "raw because")
    for name in ("original", "stored", "ratio"):
        table.add_column(name, justify="right")
    table.add_column("crc32")
    first = header.rows[0]
    stored, crc = str(first.stored_nbytes), f"{first.crc32:08x}"
    table.add_row("", "", "", _format(first), "", stored, stored, "", crc)
    for tensor, row in okv.rows:
        table.add_row(
            tensor.name,
            tensor.dtype,
            Text(str(list(tensor.shape))),
            _format(row),
            _reason(row) or "",
            str(row.original_nbytes),
            str(row.stored_nbytes),
            f"{row.stored_nbytes / row.original_nbytes:.3f}",
            f"{row.crc32:08x}",
        )
    console.print(table)
    console.print(Text(summary(okv)))
    if verified:
        console.print("verified: every CRC, all padding, and every encoded segment decodes")
