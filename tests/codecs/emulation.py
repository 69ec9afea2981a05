"""A CPU in a GPU's place: kernels compiled by g++, and of CuPy and nvCOMP what ANS calls."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import numpy.typing as npt
import pytest

from orbitkv.codecs.cuda import driver
from orbitkv.codecs.cuda.ans import AnsDevice
from orbitkv.codecs.nvcomp import Kind, Slices

HERE = Path(__file__).parent
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def aligned(nbytes: int, alignment: int = 4096, fill: int = 0xA5) -> np.ndarray:
    """Host memory that starts on a boundary, as an arena does."""
    memory = np.full(nbytes + alignment, fill, np.uint8)
    offset = -memory.ctypes.data % alignment
    return memory[offset : offset + nbytes]


class Array:
    """What CuPy gives."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values
        self.data = SimpleNamespace(ptr=values.ctypes.data)

    def get(self) -> np.ndarray:
        return self.values.copy()


class Cupy:
    """The calls that ``AnsDevice`` makes of CuPy."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cuda = SimpleNamespace(get_current_stream=lambda: SimpleNamespace(ptr=0))
        self.launched: list[tuple[str, int]] = []
        self.functions: list[Callable[..., None]] = []

    def kernel(self, name: str, function: int, arguments: str) -> SimpleNamespace:
        """What the driver's ``Kernel`` is."""
        return SimpleNamespace(launch=self.functions[function])

    def open(self, nvcomp: Zlib) -> AnsDevice:
        """What a GPU would make ready for a registration."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(sys.modules, "cupy", self)
            patch.setattr(driver, "Kernel", self.kernel)
            return AnsDevice(nvcomp)

    def asarray(self, values: np.ndarray, *, blocking: bool = False) -> Array:
        memory = aligned(values.nbytes, 256)
        memory[:] = np.ascontiguousarray(values).view(np.uint8)
        return Array(memory.view(values.dtype))

    def zeros(self, count: int, dtype: npt.DTypeLike) -> Array:
        return Array(aligned(count * np.dtype(dtype).itemsize, 256, 0).view(dtype))

    def RawModule(self, code: str, options: Sequence[str]) -> SimpleNamespace:  # noqa: N802
        self.code = code
        library = build(self.directory, code)

        def function(name: str) -> SimpleNamespace:
            call = getattr(library, f"{name}_on_cpu")
            call.restype = ctypes.c_bool

            def launch(blocks: int, threads: int, stream: int, *arguments: int) -> None:
                self.launched.append((name, blocks))
                values = np.array(arguments, np.uint64)
                assert call(blocks, threads, values.ctypes.data_as(ctypes.c_void_p)), name

            self.functions.append(launch)
            return SimpleNamespace(kernel=SimpleNamespace(ptr=len(self.functions) - 1))

        return SimpleNamespace(get_function=function)

    def layout_of(self, name: str, fields: Sequence[str]) -> tuple[int, ...]:
        """Size of a kernel's struct, and offset of each field."""
        offsets = ",".join(f"offsetof({name}, {field})" for field in fields)
        code = f'{self.code}\nextern "C" size_t layout[] = {{sizeof({name}), {offsets}}};'
        directory = self.directory / name
        directory.mkdir()
        library = build(directory, code)
        return tuple((ctypes.c_size_t * (1 + len(fields))).in_dll(library, "layout"))


KERNELS = ("ans_layout", "ans_pack", "ans_expect", "ans_unpack", "ans_judge")


def build(directory: Path, code: str) -> ctypes.CDLL:
    """Compile kernels, once for each directory."""
    target = directory / "kernels.so"
    if not target.exists():
        lines = ['#include "emulation.hpp"', code, *(f"EMULATE({name})" for name in KERNELS)]
        (directory / "kernels.cpp").write_text("\n".join(lines))
        options = ("-std=c++17", "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas", f"-I{HERE}")
        command = ("g++", *options, str(directory / "kernels.cpp"), "-o", str(target))
        subprocess.run(command, check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(target))


def load(address: int, nbytes: int) -> bytes:
    return ctypes.string_at(address, nbytes)


def store(address: int, value: bytes) -> None:
    ctypes.memmove(address, value, len(value))


def numbers(address: int, count: int) -> np.ndarray:
    return np.frombuffer((ctypes.c_uint64 * count).from_address(address), np.uint64)


class Zlib:
    """In nvCOMP's place: it codes with zlib, and refuses what it has not coded.

    Attributes:
        allowed: Ranges of addresses, outside which nothing may be read or written.
        failing: Status and length to tell of slices, by their numbers over all calls.
    """

    path = "zlib"
    version = "5.3.0"
    generation = 5

    def __init__(self) -> None:
        self.allowed: list[tuple[int, int]] = []
        self.failing: dict[int, tuple[int, int]] = {}
        self.coded = 0
        self.temp: dict[Kind, int] = {Kind.BYTES: 4164}

    def squeeze(self, plain: bytes, kind: Kind) -> bytes:
        return zlib.compress(plain, 1)

    def stretch(self, coded: bytes, kind: Kind) -> bytes:
        return zlib.decompress(coded)

    def max_output_nbytes(self, kind: Kind, slice_nbytes: int) -> int:
        return slice_nbytes + 1000

    def compress_temp_nbytes(self, kind: Kind, slices: int, most: int, total: int) -> int:
        return self.temp.get(kind, 0) * slices

    def decompress_temp_nbytes(self, kind: Kind, slices: int, most: int, total: int) -> int:
        return 0

    def check(self, address: int, nbytes: int, alignment: int) -> None:
        assert address % alignment == 0, hex(address)
        assert nbytes > 0
        if self.allowed:
            assert any(low <= address and address + nbytes <= high for low, high in self.allowed)

    def compress_async(self, slices: Slices, most_slice_nbytes: int, stream: int) -> None:
        arrays = (slices.sources, slices.source_nbytes, slices.targets, slices.target_nbytes)
        columns = [numbers(address, slices.count) for address in arrays]
        for index in range(slices.count):
            source, nbytes, target = (int(column[index]) for column in columns[:3])
            assert 0 < nbytes <= most_slice_nbytes
            self.check(source, nbytes, 16)
            self.check(target, self.max_output_nbytes(slices.kind, nbytes), 256)
            head = bytes((0x5A, slices.kind)) + nbytes.to_bytes(4, "little")
            coded = head + self.squeeze(load(source, nbytes), slices.kind)
            coded = coded[: self.max_output_nbytes(slices.kind, nbytes)]
            store(target, coded + b"\xee" * 9)  # more than it says, within its room
            status, columns[3][index] = self.failing.get(self.coded, (0, len(coded)))
            store(slices.statuses + 4 * index, status.to_bytes(4, "little", signed=True))
            self.coded += 1

    def decompress_async(self, slices: Slices, room_nbytes: int, stream: int) -> None:
        arrays = (slices.sources, slices.source_nbytes, slices.targets, room_nbytes)
        columns = [numbers(address, slices.count) for address in arrays]
        found = numbers(slices.target_nbytes, slices.count)
        for index in range(slices.count):
            source, nbytes, target, room = (int(column[index]) for column in columns)
            self.check(source, nbytes, 16)
            self.check(target, room, 16)
            status = 0
            try:
                coded = load(source, nbytes)
                wanted = int.from_bytes(coded[2:6], "little")
                assert coded[:2] == bytes((0x5A, slices.kind)), "another kind"
                decoded = self.stretch(coded[6:], slices.kind)
                assert len(decoded) == wanted <= room, "another length"
                store(target, decoded)
                found[index] = len(decoded)
            except (AssertionError, zlib.error):
                status, found[index] = 12, room
            store(slices.statuses + 4 * index, status.to_bytes(4, "little"))


class Planes(Zlib):
    """Codes halves of 16-bit elements apart, as only that makes normal numbers shorter."""

    def squeeze(self, plain: bytes, kind: Kind) -> bytes:
        if kind == Kind.FLOAT16:
            plain = plain[1::2] + plain[::2]
        return super().squeeze(plain, kind)

    def stretch(self, coded: bytes, kind: Kind) -> bytes:
        planes = super().stretch(coded, kind)
        if kind == Kind.FLOAT16:
            high, low = planes[: len(planes) // 2], planes[len(planes) // 2 :]
            planes = bytes(byte for pair in zip(low, high, strict=True) for byte in pair)
        return planes
