"""Geometry of an engine's pages, and the keys that name what is stored of them.

A *page* is the engine's allocation unit, a *slot* one layer's K, V or packed KV part of it, and a
*segment* the contiguous bytes of one slot of one page: the unit of encoding and of CRC.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from orbitkv.errors import DestinationError, GeometryError
from orbitkv.objects import PAYLOAD_ALIGN_NBYTES, object_nbytes

NAMESPACE_PREFIX = "orbitkv:v2:"

DTYPE_NBYTES: Mapping[str, int] = {
    "bfloat16": 2,
    "float16": 2,
    "float32": 4,
    "float8_e4m3fn": 1,
}
Words = npt.NDArray[Any]
_WORD: Mapping[int, np.dtype[Any]] = {n: np.dtype(f"u{n}") for n in (1, 2, 4)}


class Role(StrEnum):
    """What a slot holds. ``KV`` packs a head's K and V side by side: ``2 * head_dim`` wide."""

    K = "k"
    V = "v"
    KV = "kv"


class Axis(StrEnum):
    """An axis of a registered tensor."""

    PAGE = "page"
    TOKEN = "token"  # noqa: S105 - an axis, not a secret
    HEAD = "head"
    DIM = "dim"


NHD = (Axis.PAGE, Axis.TOKEN, Axis.HEAD, Axis.DIM)
HND = (Axis.PAGE, Axis.HEAD, Axis.TOKEN, Axis.DIM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One layer's K, V or packed KV part of a page, as the engine declares it.

    Attributes:
        name: Key of its tensor at registration, unique in the geometry.
        axes: Order of the tensor's axes. The order without ``page`` is that of a segment's bytes.
        strides: Elements between neighbours, one an axis. None: any, as the tensor has them.
        group: State group. A page is usable only if every group of it is there.
    """

    name: str
    layer: int
    role: Role
    dtype: str
    heads: int
    head_dim: int
    axes: tuple[Axis, ...] = HND
    strides: tuple[int, ...] | None = None
    group: str = "attention"

    def __post_init__(self) -> None:
        """Take roles and axes in text too; what is neither is a fault of the geometry."""
        try:
            object.__setattr__(self, "role", Role(self.role))
            object.__setattr__(self, "axes", tuple(Axis(axis) for axis in self.axes))
        except (ValueError, TypeError) as error:
            accepted = f"role of {', '.join(Role)}; axes of {', '.join(Axis)}"
            raise GeometryError((f"slot {self.name!r}: {error}; accepted: {accepted}",)) from error

    @property
    def width(self) -> int:
        """Elements along the ``dim`` axis."""
        return self.head_dim * (2 if self.role is Role.KV else 1)


@dataclass(frozen=True)
class Geometry:
    """The slots of a page and the number of its tokens: declared, validated, never guessed.

    Raises:
        GeometryError: with every slot that cannot be.
    """

    page_tokens: int
    slots: tuple[Slot, ...]

    def __post_init__(self) -> None:
        faults = tuple(self._faults())
        if faults:
            raise GeometryError(faults)

    def _faults(self) -> Iterable[str]:
        if self.page_tokens < 1:
            yield f"page of {self.page_tokens} tokens; accepted: 1 or more"
        if not self.slots:
            yield "no slots"
        seen: set[str] = set()
        for slot in self.slots:
            where = f"slot {slot.name!r}"
            if slot.name in seen:
                yield f"{where}: declared twice"
            seen.add(slot.name)
            if slot.dtype not in DTYPE_NBYTES:
                yield f"{where}: dtype {slot.dtype!r}; accepted: {', '.join(DTYPE_NBYTES)}"
            if min(slot.heads, slot.head_dim) < 1 or slot.layer < 0:
                yield (
                    f"{where}: layer {slot.layer}, {slot.heads} heads of {slot.head_dim}; "
                    "accepted: layer 0 or more, one head or more of dimension one or more"
                )
            if sorted(slot.axes) != sorted(Axis):
                yield f"{where}: axes {', '.join(slot.axes)}; accepted: each of {', '.join(Axis)}"
            elif slot.axes[-1] is not Axis.DIM:
                yield f"{where}: last axis is {slot.axes[-1]}; accepted: dim"

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Once: a hash over all slots at every look-up would cost more than the look-up."""
        return hash((self.page_tokens, self.slots))

    @cached_property
    def groups(self) -> Mapping[str, tuple[int, ...]]:
        """Indices of the slots of each state group, in order of declaration."""
        groups: dict[str, tuple[int, ...]] = {}
        for index, slot in enumerate(self.slots):
            groups[slot.group] = (*groups.get(slot.group, ()), index)
        return groups

    @cached_property
    def segment_nbytes(self) -> tuple[int, ...]:
        """Bytes of one segment of each slot."""
        return tuple(
            self.page_tokens * slot.heads * slot.width * DTYPE_NBYTES[slot.dtype]
            for slot in self.slots
        )

    @cached_property
    def object_nbytes(self) -> Mapping[str, int]:
        """Bytes of one raw object of each state group: the most that it can take."""
        return {
            group: object_nbytes([self.segment_nbytes[index] for index in slots])
            for group, slots in self.groups.items()
        }

    @cached_property
    def page_nbytes(self) -> int:
        """Bytes of one page over all its slots, as the engine holds it."""
        return sum(self.segment_nbytes)

    def shape(self, slot: Slot, pages: int) -> tuple[int, ...]:
        """Shape of a slot's tensor that holds ``pages`` pages."""
        lengths = {
            Axis.PAGE: pages,
            Axis.TOKEN: self.page_tokens,
            Axis.HEAD: slot.heads,
            Axis.DIM: slot.width,
        }
        return tuple(lengths[axis] for axis in slot.axes)

    def fingerprint(self) -> bytes:
        """Digest of what decides a segment's bytes. Strides do not, and are left out."""
        fields = [b"geometry", str(self.page_tokens).encode()]
        for slot in self.slots:
            fields += [
                str(value).encode()
                for value in (
                    slot.name,
                    slot.layer,
                    slot.role,
                    slot.dtype,
                    slot.heads,
                    slot.head_dim,
                    slot.group,
                    ",".join(axis for axis in slot.axes if axis is not Axis.PAGE),
                )
            ]
        return digest_fields(fields)


def digest_fields(fields: Iterable[bytes]) -> bytes:
    """SHA-256 over fields, each prefixed with its length (u64, little-endian).

    The prefix keeps equal strings in different fields from ever colliding.
    """
    digest = hashlib.sha256()
    for field in fields:
        digest.update(struct.pack("<Q", len(field)))
        digest.update(field)
    return digest.digest()


@dataclass(frozen=True, slots=True)
class ModelIdentity:
    """Whose KV it is: two models, revisions or salts never share a byte.

    Attributes:
        rank, ranks: Part of a tensor-parallel model that this instance holds.
        salt: Keeps tenants apart that must not see each other's prefixes.
    """

    name: str
    revision: str = ""
    rank: int = 0
    ranks: int = 1
    salt: bytes = b""


def make_namespace(
    model: ModelIdentity, geometry: Geometry, *, storage_codec: str, rotation_seed: int = 0
) -> str:
    """Name the space of keys whose bytes mean the same: ``orbitkv:v2:<64 hex>``."""
    fields = (
        model.name.encode(),
        model.revision.encode(),
        ",".join(dict.fromkeys(slot.dtype for slot in geometry.slots)).encode(),
        geometry.fingerprint(),
        str(geometry.page_tokens).encode(),
        f"{model.rank}/{model.ranks}".encode(),
        storage_codec.encode(),
        str(rotation_seed).encode(),
        model.salt,
    )
    return NAMESPACE_PREFIX + digest_fields(fields).hex()


def hash_pages(namespace: str, tokens: Sequence[int], page_tokens: int) -> list[bytes]:
    """Hash every full page of a token sequence, each chained to the one before it.

    A page's hash covers its namespace, all tokens before it and its own, so that equal hashes
    mean equal prefixes. Tokens past the last full page have no hash.

    Returns:
        ``len(tokens) // page_tokens`` digests of 32 bytes.
    """
    parent = digest_fields((b"root", namespace.encode()))
    hashes = []
    for start in range(0, len(tokens) - page_tokens + 1, page_tokens):
        page = np.asarray(tokens[start : start + page_tokens], dtype="<i8").tobytes()
        parent = digest_fields((parent, page))
        hashes.append(parent)
    return hashes


@dataclass(frozen=True)
class StateKey:
    """Names one object: (namespace, page hash, state group)."""

    namespace: str
    page_hash: bytes
    group: str

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 that stands for the key in headers and indexes."""
        digest = _begun(self.namespace).copy()
        group = self.group.encode()
        digest.update(
            b"".join(
                (_LENGTH.pack(len(self.page_hash)), self.page_hash, _LENGTH.pack(len(group)), group)
            )
        )
        made: bytes = digest.digest()
        return made


_LENGTH = struct.Struct("<Q")
_KEPT_DIGESTS = 2**12


class KeyDigests(dict[bytes, bytes]):
    """``StateKey.digest`` by page hash, in one namespace and group.

    Keeps what it has computed: a prefix is asked for again and again. When full, it begins anew.
    """

    def __init__(self, namespace: str, group: str) -> None:
        super().__init__()
        self._namespace = namespace
        self._group = group

    def __missing__(self, page_hash: bytes) -> bytes:
        if len(self) >= _KEPT_DIGESTS:
            self.clear()
        digest = StateKey(self._namespace, page_hash, self._group).digest
        self[page_hash] = digest
        return digest


@functools.lru_cache(maxsize=256)
def _begun(namespace: str) -> Any:  # noqa: ANN401 - a hash object of hashlib
    """The digest of a key after its first field, which all keys of an instance share."""
    field = namespace.encode()
    return hashlib.sha256(_LENGTH.pack(len(field)) + field)


class PagedTensors:
    """One instance's registered tensors, as words of the dtype's width.

    Holds no copy: a page is a strided view of the engine's own memory. Tensors in GPU memory are
    described by views of the same kind, which no host code may read or write.

    Args:
        geometry: What the engine declares.
        tensors: For each slot's name a ``torch.Tensor``, ``np.ndarray`` or ``cupy.ndarray``, with
            the shape of ``geometry.shape(slot, pages)`` and one number of pages in all; all on
            the CPU, or all on one GPU.

    Attributes:
        device: Ordinal of the CUDA device that holds the tensors; None: host memory.
        device_slots: The slots as kernels read them, once the lanes have opened the device.
        bridged: The GPU's arenas cannot hold a page, so its segments pass through the host.

    Raises:
        GeometryError: with every difference between a tensor and its slot.
    """

    device_slots: Any = None
    bridged: bool = False

    def __init__(self, geometry: Geometry, tensors: Mapping[str, Any]) -> None:
        faults: list[str] = []
        names = {slot.name for slot in geometry.slots}
        faults += [f"slot {name!r}: no tensor" for name in names - tensors.keys()]
        faults += [f"tensor {name!r}: not declared" for name in tensors.keys() - names]
        self.geometry = geometry
        self._owners = dict(tensors)
        self._words: list[Words] = []
        self._runs: list[npt.NDArray[np.uint8] | None] = []
        self._blocks: dict[tuple[int, ...], npt.NDArray[np.uint8] | None] = {}
        page_counts: dict[int, str] = {}
        devices: dict[int | None, str] = {}
        for slot in geometry.slots:
            if slot.name not in tensors:
                continue
            try:
                words, device = _as_words(slot, tensors[slot.name])
                _check_words(geometry, slot, words)
            except GeometryError as error:
                faults += error.faults
                continue
            devices.setdefault(device, slot.name)
            page_axis = slot.axes.index(Axis.PAGE)
            page_counts.setdefault(words.shape[page_axis], slot.name)
            pages = np.moveaxis(words, page_axis, 0)
            self._words.append(pages)
            self._runs.append(_as_runs(pages))
        starts: dict[int, str] = {}
        for slot, words in zip(geometry.slots, self._words, strict=False):
            other = starts.setdefault(words.ctypes.data, slot.name)
            if other != slot.name and not faults:
                faults.append(f"tensors {other!r} and {slot.name!r} begin at one address")
        if len(page_counts) > 1:
            counts = ", ".join(f"{name!r} has {pages}" for pages, name in page_counts.items())
            faults.append(f"tensors hold different numbers of pages: {counts}")
        if len(devices) > 1:
            places = ", ".join(f"{name!r} on {_place(on)}" for on, name in devices.items())
            faults.append(f"tensors on several devices: {places}; accepted: one a registration")
        if faults:
            raise GeometryError(tuple(faults))
        self.pages = next(iter(page_counts))
        self.device = next(iter(devices))

    def view(self, slot_index: int) -> Words:
        """All pages of a slot: words[page, ...] with the strides of the engine's tensor."""
        return self._words[slot_index]

    def segment(self, slot_index: int, page_index: int) -> Words:
        """One page's part of a slot: a view of words, strided as the engine lays it out."""
        page: Words = self._words[slot_index][page_index]
        return page

    def run(self, slot_index: int, page_index: int) -> npt.NDArray[np.uint8] | None:
        """The same as uint8[segment_nbytes], where it is one run of memory; None elsewhere."""
        runs = self._runs[slot_index]
        return None if runs is None else runs[page_index]

    def block(self, slots: tuple[int, ...], page_index: int) -> npt.NDArray[np.uint8] | None:
        """Several slots of a page as one uint8[slots, segment_nbytes], strided; None elsewhere.

        Engines that keep all layers in one allocation lay them out at even distances; then one
        call copies a whole page. Segments must fill their 512 B blocks, so that their payloads
        lie side by side as well.
        """
        if slots not in self._blocks:
            self._blocks[slots] = _as_block([self._runs[slot] for slot in slots])
        block = self._blocks[slots]
        return None if block is None else block[page_index]

    def check_indices(self, page_indices: Iterable[int], *, distinct: bool) -> None:
        """Check every page index of a request before the first byte moves.

        Raises:
            DestinationError: naming all that are out of range or come twice.
        """
        indices = list(page_indices)
        strange = [
            index
            for index in indices
            if isinstance(index, bool) or not isinstance(index, int | np.integer)
        ]
        if strange:
            raise DestinationError(f"page index {_listing(strange)}; accepted: integers")
        outside = sorted({index for index in indices if not 0 <= index < self.pages})
        twice = sorted(index for index, count in Counter(indices).items() if distinct and count > 1)
        faults = []
        if outside:
            faults.append(f"page index {_listing(outside)}; accepted: 0 to {self.pages - 1}")
        if twice:
            faults.append(f"page index {_listing(twice)} comes twice; accepted: distinct pages")
        if faults:
            raise DestinationError("; ".join(faults))


def _listing(values: Sequence[object], *, most: int = 8) -> str:
    shown = ", ".join(map(repr, values[:most]))
    return shown if len(values) <= most else f"{shown} and {len(values) - most} more"


def _place(device: int | None) -> str:
    return "the CPU" if device is None else f"cuda:{device}"


def _as_words(slot: Slot, tensor: Any) -> tuple[Words, int | None]:  # noqa: ANN401 - see below
    """View a torch, numpy or CuPy tensor's memory as unsigned words, keeping its strides.

    The dtype is compared by name, so that torch need not be imported to check a numpy array.

    Returns:
        The view, and the CUDA device that holds the memory.
    """
    word = _WORD[DTYPE_NBYTES[slot.dtype]]
    if isinstance(tensor, np.ndarray) or type(tensor).__module__.partition(".")[0] == "cupy":
        seen = str(tensor.dtype)
        word_of = {"bfloat16": ("uint16",), "float8_e4m3fn": ("uint8",)}.get(slot.dtype, ())
        if seen != slot.dtype and seen not in word_of:
            wanted = " or ".join((slot.dtype, *word_of))
            raise GeometryError((f"slot {slot.name!r}: dtype {seen}; declared {wanted}",))
        if isinstance(tensor, np.ndarray):
            viewed: Words = tensor.view(word)
            return viewed, None
        return _described(tensor.data.ptr, tensor.shape, tensor.strides, word), tensor.device.id
    seen = str(getattr(tensor, "dtype", type(tensor).__name__)).removeprefix("torch.")
    if seen != slot.dtype:
        raise GeometryError((f"slot {slot.name!r}: dtype {seen}; declared {slot.dtype}",))
    device: Any = getattr(tensor, "device", None)
    kind = getattr(device, "type", "an unknown device")
    if kind not in {"cpu", "cuda"}:
        raise GeometryError((f"slot {slot.name!r}: on {device or kind}; accepted: cpu, cuda",))
    if "strided" not in str(getattr(tensor, "layout", "strided")):
        message = f"slot {slot.name!r}: layout {tensor.layout}; accepted: torch.strided"
        raise GeometryError((message,))
    if kind == "cuda":
        strides = [stride * word.itemsize for stride in tensor.stride()]
        return _described(tensor.data_ptr(), tensor.shape, strides, word), device.index
    import torch  # noqa: PLC0415 - only an engine that brings torch pays for its import

    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32}[word.itemsize]
    words: Words = tensor.detach().view(signed).numpy()
    return words.view(word), None


def _described(
    address: int, shape: Sequence[int], strides: Sequence[int], word: np.dtype[Any]
) -> Words:
    """Describe GPU memory by a numpy view, whose address, shape and strides are all of use."""

    class Described:
        __array_interface__: ClassVar = {
            "version": 3,
            "data": (address, False),
            "shape": tuple(shape),
            "strides": tuple(strides),
            "typestr": word.str,
        }

    return np.asarray(Described())


def _check_words(geometry: Geometry, slot: Slot, words: Words) -> None:
    where = f"slot {slot.name!r}"
    if words.ndim != len(slot.axes):
        axes = ", ".join(slot.axes)
        raise GeometryError((f"{where}: {words.ndim} axes; declared {len(slot.axes)} ({axes})",))
    faults = []
    pages = words.shape[slot.axes.index(Axis.PAGE)]
    wanted = geometry.shape(slot, pages)
    if words.shape != wanted:
        axes = ", ".join(slot.axes)
        faults.append(f"{where}: shape {words.shape}; declared {wanted} as ({axes})")
    if pages < 1:
        faults.append(f"{where}: no pages")
    strides = tuple(stride // words.itemsize for stride in words.strides)
    if slot.strides is not None and strides != slot.strides:
        faults.append(f"{where}: strides {strides}; declared {slot.strides}")
    if not faults and _overlaps(words):
        faults.append(f"{where}: strides {strides} overlap; accepted: each element on its own")
    if words.shape[-1] > 1 and strides[-1] != 1:
        faults.append(f"{where}: stride {strides[-1]} along dim; accepted: 1")
    if not words.flags.writeable:
        faults.append(f"{where}: read-only memory; accepted: writable")
    if faults:
        raise GeometryError(tuple(faults))


def _as_runs(pages: Words) -> npt.NDArray[np.uint8] | None:
    """View [page, ...] words as uint8[page, segment_nbytes]; None where a page is not one run."""
    if not pages[0].flags.c_contiguous:
        return None
    segment_nbytes = pages[0].nbytes
    page_stride = pages.strides[0] if len(pages) > 1 else segment_nbytes
    return np.lib.stride_tricks.as_strided(
        pages[0].reshape(-1).view(np.uint8), (len(pages), segment_nbytes), (page_stride, 1)
    )


def _as_block(
    runs: Sequence[npt.NDArray[np.uint8] | None],
) -> npt.NDArray[np.uint8] | None:
    """View slots that lie at even distances as uint8[page, slot, segment_nbytes]."""
    first = runs[0]
    layouts = {(run.shape, run.strides) for run in runs if run is not None}
    if first is None or any(run is None for run in runs) or len(layouts) != 1:
        return None
    starts = [run.ctypes.data for run in runs if run is not None]
    distances = {after - before for before, after in itertools.pairwise(starts)}
    if len(distances) > 1 or min(distances, default=0) < 0:
        return None
    pages, nbytes = first.shape
    if nbytes % PAYLOAD_ALIGN_NBYTES:
        return None
    strides = (first.strides[0], distances.pop() if distances else nbytes, 1)
    return np.lib.stride_tricks.as_strided(first, (pages, len(runs), nbytes), strides)


def _overlaps(words: Words) -> bool:
    """Whether two elements may share memory: each axis must step over all smaller ones."""
    span = words.itemsize
    steps = zip(words.strides, words.shape, strict=True)
    for stride, length in sorted((s, n) for s, n in steps if n > 1):
        if stride < span:
            return True
        span = stride * (length - 1) + span
    return False
