"""Compiles the kernels of a device, and starts them. Nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from orbitkv.codecs import tables
from orbitkv.codecs.cuda import crc_tables, driver
from orbitkv.codecs.cuda.ans import AnsDevice, DecodePlan, EncodePlan
from orbitkv.codecs.cuda.crc_tables import LINE_NBYTES, zeros_crc32
from orbitkv.codecs.cuda.source import OPTIONS, source
from orbitkv.codecs.cuda.tasks import Kernel, Launch, Span

__all__ = ["OPTIONS", "Kernels", "Launcher", "Span", "source", "zeros_crc32"]

# As in pages.cuh.
_BLOCK_WARPS = 8
_SM_BLOCKS = 4

_BLOCK_THREADS = 32 * _BLOCK_WARPS
_SHARED = "QQQIIIQQQI"  # what every kernel over tasks takes
_FP8 = {
    (way, is_half): f"{way}_fp8_{'f16' if is_half else 'bf16'}"
    for way in ("encode", "decode")
    for is_half in (False, True)
}
_TURBOQUANT_WARPS = 4  # of a block, as in turboquant.cu
_STEP_ELEMENTS = 1024  # that one of its warps works on at once
_MOST_STEPS = 8
_FEWEST_LINES, _MOST_LINES = 8, 32  # of a warp: all its loads at once, or less to do around them
_MOVE_BLOCKS = 8


class TurboQuant(NamedTuple):
    """Kernels for one kind of segments, and the rotation's signs on the device."""

    encode: driver.Kernel
    decode: driver.Kernel
    signs: int
    step_nbytes: int
    held: Any


class Kernels:
    """The kernels of one device, compiled. The device must be the current one here and at launches.

    ``load`` compiles, and so may take seconds; a ``Launcher`` only starts what has been loaded.
    """

    def __init__(self, device: int) -> None:
        import cupy  # noqa: PLC0415 - only where there is a GPU

        self._cupy = cupy
        # Blocking, as launches may come on any stream.
        self._crc_tables = cupy.asarray(crc_tables.device_tables(), blocking=True)
        self.crc_tables = int(self._crc_tables.data.ptr)
        attributes = cupy.cuda.Device(device).attributes
        self.most_warps = _BLOCK_WARPS * _SM_BLOCKS * int(attributes["MultiProcessorCount"])
        self._modules: dict[tuple[str, ...], Any] = {}
        self.named = {
            name: self._kernel(file, name, arguments)
            for file, names, arguments in (
                ("segments.cu", ("gather_raw", "gather", "scatter_raw"), _SHARED),
                ("fp8.cu", tuple(_FP8.values()), _SHARED),
                ("crc32.cu", ("crc32",), _SHARED),
                ("move.cu", ("move_words",), "QQI"),
            )
            for name in names
        }
        self.turboquant: dict[Kernel, TurboQuant] = {}
        self.ans: AnsDevice | None = None

    def on(self, stream: int) -> Launcher:
        """Start kernels on a ``cudaStream_t``."""
        return Launcher(self, stream)

    def load(self, kernel: Kernel) -> None:
        """Make ready for tasks that need this kernel."""
        if kernel[0] == "turboquant" and kernel not in self.turboquant:
            self.turboquant[kernel] = self._load_turboquant(kernel)
        elif kernel[0] == "ans" and self.ans is None:
            self.ans = AnsDevice(kernel[1])

    def _load_turboquant(self, kernel: Kernel) -> TurboQuant:
        _, bits, head_dim, is_half, seed = kernel
        macros = (f"-DBITS={bits}", f"-DHEAD_DIM={head_dim}")
        encode, decode = (
            self._kernel(
                "turboquant.cu",
                f"{way}_turboquant_{'f16' if is_half else 'bf16'}",
                f"{_SHARED}Q",
                *macros,
            )
            for way in ("encode", "decode")
        )
        signs = self._cupy.asarray(tables.rotation_signs(seed, head_dim), blocking=True)
        # A step is 1024 elements, in rows that take their codes and two bytes or more.
        step_nbytes = _STEP_ELEMENTS * bits // 8 + 2 * _STEP_ELEMENTS // head_dim
        return TurboQuant(encode, decode, int(signs.data.ptr), step_nbytes, signs)

    def _kernel(self, file: str, name: str, arguments: str, *macros: str) -> driver.Kernel:
        key = (file, *macros)
        if key not in self._modules:
            self._modules[key] = self._cupy.RawModule(
                code=source(file), options=(*OPTIONS, *macros)
            )
        function = self._modules[key].get_function(name).kernel
        return driver.Kernel(name, int(function.ptr), arguments)


class Launcher:
    """Starts kernels on one stream.

    A launch covers ``count`` tasks of a span, from ``span.order[first]`` on; none of them stores
    more than ``most_stored_nbytes``.

    CRCs are preset: on a save to ``zeros_crc32`` of the bytes stored, on a restore to that XOR the
    one that is expected. Kernels make of it the payload's, or zero where that was expected.
    """

    def __init__(self, kernels: Kernels, stream: int) -> None:
        self._kernels = kernels
        self._stream = stream
        self._named = kernels.named

    def encode(self, span: Span, launch: Launch) -> None:
        """Encode the tasks of one launch, whatever it needs, and make their CRCs."""
        self._choose(span, launch, self.gather_raw, self.encode_fp8, self.encode_turboquant)

    def decode(self, span: Span, launch: Launch) -> None:
        """Decode the tasks of one launch, whatever it needs, in units without a fault."""
        self._choose(span, launch, self.scatter_raw, self.decode_fp8, self.decode_turboquant)

    def _choose(
        self,
        span: Span,
        launch: Launch,
        raw: Callable[..., None],
        fp8: Callable[..., None],
        turboquant: Callable[..., None],
    ) -> None:
        name, *parameters = launch.kernel
        where = (span, launch.first, launch.count, launch.most_stored_nbytes)
        if name == "raw":
            raw(*where)
        elif name == "fp8":
            fp8(*where, is_half=parameters[0])
        elif name == "turboquant":
            turboquant(*where, kernel=launch.kernel)
        else:
            raise ValueError(f"kernel {launch.kernel}")

    def gather_raw(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy segments into their payloads, and make their CRCs."""
        self._start("gather_raw", span, first, count, most_stored_nbytes)

    def gather(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy segments into their payloads. CRCs are left."""
        self._start("gather", span, first, count, most_stored_nbytes)

    def scatter_raw(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Copy payloads into their segments, in units without a fault."""
        self._start("scatter_raw", span, first, count, most_stored_nbytes)

    def encode_fp8(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, is_half: bool
    ) -> None:
        """Encode segments of FP16 or else bfloat16, make their CRCs, and report faults."""
        self._start(_FP8["encode", is_half], span, first, count, most_stored_nbytes)

    def decode_fp8(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, is_half: bool
    ) -> None:
        """Decode payloads into segments of FP16 or else bfloat16, in units without a fault."""
        # A line of 512 bytes is one of the segment here.
        name = _FP8["decode", is_half]
        self._start(name, span, first, count, most_stored_nbytes, LINE_NBYTES // 2)

    def encode_turboquant(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, kernel: Kernel
    ) -> None:
        """Encode segments of any role, make their CRCs, and report faults."""
        loaded = self._kernels.turboquant[kernel]
        self._start_turboquant(loaded.encode, loaded, span, first, count, most_stored_nbytes)
        self._start("crc32", span, first, count, most_stored_nbytes)

    def decode_turboquant(
        self, span: Span, first: int, count: int, most_stored_nbytes: int, *, kernel: Kernel
    ) -> None:
        """Decode payloads into segments of any role, in units without a fault; report faults."""
        loaded = self._kernels.turboquant[kernel]
        self._start_turboquant(loaded.decode, loaded, span, first, count, most_stored_nbytes)

    def crc32(self, span: Span, first: int, count: int, most_stored_nbytes: int) -> None:
        """Add to the CRCs of payloads, here of the tasks ``[first, first + count)``."""
        self._start("crc32", span._replace(order=0), first, count, most_stored_nbytes)

    def encode_ans(self, plan: EncodePlan, **at: int) -> None:
        """Encode a batch by nvCOMP, as ``AnsDevice.enqueue_encode`` says. CRCs are preset."""
        self._ans.enqueue_encode(plan, self._stream, **at)

    def expect_ans(self, *, tasks: int, crcs: int, count: int) -> None:
        """Preset the CRCs of a batch on a restore."""
        self._ans.enqueue_expect(self._stream, tasks=tasks, crcs=crcs, count=count)

    def decode_ans(self, plan: DecodePlan, **at: int) -> None:
        """Decode a batch by nvCOMP, as ``AnsDevice.enqueue_decode`` says."""
        self._ans.enqueue_decode(plan, self._stream, **at)

    @property
    def _ans(self) -> AnsDevice:
        assert self._kernels.ans, "a codec that no registration has loaded"
        return self._kernels.ans

    def move(self, target: int, source: int, nbytes: int) -> None:
        """Copy whole words between the device and pinned host memory, without a copy engine.

        Args:
            nbytes: A multiple of 4.
        """
        words = nbytes // 4
        blocks = min(_MOVE_BLOCKS, -(-words // _BLOCK_THREADS))
        if words:
            self._named["move_words"].launch(
                blocks, _BLOCK_THREADS, self._stream, target, source, words
            )

    def _share(self, count: int, units: int, fewest: int, most: int) -> tuple[int, int]:
        """Cut each task's units into shares, as small as let the device hold all of them at once.

        Returns:
            Shares a task, and units a share.
        """
        each = fewest
        while each < most and count * -(-units // each) > self._kernels.most_warps:
            each *= 2
        return -(-units // each), each

    def _start(
        self,
        name: str,
        span: Span,
        first: int,
        count: int,
        most_stored_nbytes: int,
        line_nbytes: int = LINE_NBYTES,
    ) -> None:
        """Start one warp a share of a payload's lines."""
        most_lines = -(-most_stored_nbytes // line_nbytes)
        shares, lines = self._share(count, most_lines, _FEWEST_LINES, _MOST_LINES)
        if not count * shares:
            return
        self._named[name].launch(
            -(-count * shares // _BLOCK_WARPS),
            _BLOCK_THREADS,
            self._stream,
            span.slots,
            span.tasks,
            span.order,
            first,
            count,
            shares,
            span.crcs,
            span.faults,
            self._kernels.crc_tables,
            lines,
        )

    def _start_turboquant(
        self,
        started: driver.Kernel,
        loaded: TurboQuant,
        span: Span,
        first: int,
        count: int,
        most_stored_nbytes: int,
    ) -> None:
        """Start one warp a share of a segment's steps."""
        most_steps = -(-most_stored_nbytes // loaded.step_nbytes)
        shares, _ = self._share(count, most_steps, 1, _MOST_STEPS)
        if not count * shares:
            return
        started.launch(
            -(-count * shares // _TURBOQUANT_WARPS),
            32 * _TURBOQUANT_WARPS,
            self._stream,
            span.slots,
            span.tasks,
            span.order,
            first,
            count,
            shares,
            span.crcs,
            span.faults,
            self._kernels.crc_tables,
            0,
            loaded.signs,
        )
