"""How near do the GPU lanes come to the hardware: kernels, whole graphs, one page?

Kernels are timed by CUDA events over one batch, the graphs by the clock as a caller sees them.
Every figure stands beside its limit, measured in the same run: a device copy, a pinned copy,
torch's casts.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import os
import statistics
import struct
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import cupy
import numpy as np
import torch
from measure import packed_geometry, parser, report

from orbitkv import Config, Geometry, Manager, ModelIdentity, Restored, Saved
from orbitkv.codecs import open_codec
from orbitkv.codecs.ans import AnsCodec, open_ans
from orbitkv.codecs.cuda.ans_batch import AnsDecoding, AnsEncoding, AnsSlots, decoding_nbytes
from orbitkv.codecs.cuda.kernels import Kernels
from orbitkv.codecs.cuda.tasks import Item, Tasks, describe_slots, tasks_nbytes
from orbitkv.codecs.slots import bind_slots
from orbitkv.config import GIB, KIB, MIB
from orbitkv.errors import Unavailable
from orbitkv.objects import Format
from orbitkv.probe import nvcomp_candidates
from orbitkv.segment import PagedTensors

ROUNDS = 20
NVCOMP_LIBRARY = os.environ.get("ORBITKV_NVCOMP_LIBRARY")
DATA_NBYTES = 2 * GIB  # many times the L2 cache

Run = Callable[[], None]


def random_tensors(made: Geometry, pages: int) -> dict[str, torch.Tensor]:
    """Normal numbers in GPU memory, one tensor a layer."""
    return {
        slot.name: torch.randn(made.shape(slot, pages), device="cuda", dtype=torch.bfloat16)
        for slot in made.slots
    }


def median_s(runs: list[Run], before: list[Run]) -> float:
    """Median of ROUNDS timings by events, in turn over data that is not in the cache."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    taken = []
    for index in range(ROUNDS + 3):
        before[index % len(runs)]()
        torch.cuda._sleep(200_000)  # noqa: SLF001 - the kernels are there when the clock starts
        start.record()
        runs[index % len(runs)]()
        end.record()
        end.synchronize()
        taken.append(cupy.cuda.get_elapsed_time(start, end) / 1e3)
    return statistics.median(taken[3:])


class KernelBatches:
    """Batches of one size over fresh pages, ready to be encoded and decoded again and again."""

    def __init__(
        self, compiled: Kernels, codec: str, segment_nbytes: int, batch_nbytes: int
    ) -> None:
        self.kernels = kernels = compiled.on(0)
        segments = batch_nbytes // segment_nbytes
        layers = min(segments, 64)
        self.geometry = packed_geometry(segment_nbytes, layers)
        pages_a_batch = segments // layers
        batches = max(2, DATA_NBYTES // (2 * batch_nbytes)) if batch_nbytes < GIB else 1
        batches = min(batches, 32)
        pages = pages_a_batch * batches
        self.tensors = PagedTensors(self.geometry, random_tensors(self.geometry, pages))
        self.slots = cupy.asarray(describe_slots(self.tensors).view(np.uint8))
        bound = bind_slots(
            open_codec(codec, rotation_seed=0, on_compile=print), self.geometry, protect=False
        )
        self.layout = bound.layouts["attention"]
        self.arena = cupy.zeros(self.layout.nbytes * pages, np.uint8)
        self.batches = [
            self._tasks(range(b * pages_a_batch, (b + 1) * pages_a_batch)) for b in range(batches)
        ]
        for launch in self.batches[0][0].launches:
            compiled.load(launch.kernel)
        self.presets = self.batches[0][0].crcs.copy()
        self.logical_nbytes = batch_nbytes
        self.stored_nbytes = self.layout.nbytes * pages_a_batch
        self.encode_s = median_s(
            [lambda t=t: self._each(t[0], kernels.encode) for t in self.batches],
            [lambda t=t: self._preset(t, expected=None) for t in self.batches],
        )
        expected = [
            t[1][t[0].results[0] :][: 4 * t[0].count].get().view(np.uint32) for t in self.batches
        ]
        resets = [
            lambda t=t, e=e: self._preset(t, expected=e)
            for t, e in zip(self.batches, expected, strict=True)
        ]
        self.check_s = median_s([lambda t=t: self._check(t[0]) for t in self.batches], resets)
        self.decode_s = median_s([lambda t=t: self._decode(t[0]) for t in self.batches], resets)

    def _tasks(self, pages: range) -> tuple[Tasks, cupy.ndarray, np.ndarray]:
        layout, count = self.layout, len(self.layout.places) * len(pages)
        scratch = np.zeros(tasks_nbytes(count), np.uint8)
        device = cupy.zeros(scratch.nbytes, np.uint8)
        start = self.arena.data.ptr
        items = [Item(layout, page, start + page * layout.nbytes) for page in pages]
        tasks = Tasks(scratch, device.data.ptr, self.slots.data.ptr, items)
        return tasks, device, scratch

    def _preset(
        self, batch: tuple[Tasks, cupy.ndarray, np.ndarray], *, expected: np.ndarray | None
    ) -> None:
        tasks, device, scratch = batch
        tasks.crcs[:], tasks.faults[:] = self.presets[: tasks.count], 0
        if expected is not None:
            tasks.expect([expected])
        device.set(scratch)

    def _each(self, tasks: Tasks, work: Callable[..., None]) -> None:
        for launch in tasks.launches:
            work(tasks.span, launch)

    def _check(self, tasks: Tasks) -> None:
        most_nbytes = max(launch.most_stored_nbytes for launch in tasks.launches)
        self.kernels.crc32(tasks.span, 0, tasks.count, most_nbytes)

    def _decode(self, tasks: Tasks) -> None:
        self._check(tasks)
        self._each(tasks, self.kernels.decode)


class AnsBatches:
    """The same for ANS, as C and R run it: descriptors up, gather, nvCOMP, layout, pack, CRC; back.

    Args:
        gathered: As where segments are not runs of memory that nvCOMP may read in the pages.
    """

    def __init__(
        self,
        compiled: Kernels,
        codec: AnsCodec,
        segment_nbytes: int,
        batch_nbytes: int,
        *,
        gathered: bool,
    ) -> None:
        self.kernels = compiled.on(0)
        segments = batch_nbytes // segment_nbytes
        layers = min(segments, 64)
        self.geometry = packed_geometry(segment_nbytes, layers)
        objects = [tuple(range(layers))] * (segments // layers)
        batches = max(2, min(8, DATA_NBYTES // (2 * batch_nbytes)))
        pages = len(objects) * batches
        tensors = PagedTensors(self.geometry, random_tensors(self.geometry, pages))
        described = describe_slots(tensors)
        slots = cupy.asarray(described.view(np.uint8))
        bound = bind_slots(codec, self.geometry, protect=False)
        assert isinstance(bound.together, AnsSlots)
        for one in bound.codecs:
            compiled.load(one.kernel)
        shape = bound.together.encode_shape(objects, gathered=gathered)
        needed_nbytes = sum(map(bound.together.decode_nbytes, objects))
        self.held = [tensors, slots]
        shared = self._room(max(shape.shared_nbytes, needed_nbytes))
        at = int(slots.data.ptr)
        saves = []
        for batch in range(batches):
            chosen = range(batch * len(objects), (batch + 1) * len(objects))
            output = self._room(shape.output_nbytes)
            save = AnsEncoding(
                shape, *self._scratch(shape.scratch_nbytes), shared=shared, output=output, slots=at
            )
            saves.append((save, chosen, output))
        self.encode_s = median_s(
            [lambda s=save: s.enqueue(self.kernels) for save, *_ in saves],
            [lambda s=save, c=chosen: s.fill(described, c) for save, chosen, _ in saves],
        )
        restores, self.stored_nbytes = [], 0.0
        for save, chosen, output in saves:
            save.fill(described, chosen)
            save.enqueue(self.kernels)
            save.fetch(self.kernels)
            cupy.cuda.Device().synchronize()
            layouts = save.layouts()
            rows = np.concatenate([layout.rows for layout in layouts])
            rows["crc32"] = save.crcs
            self.stored_nbytes += float(rows["stored_nbytes"].sum()) / batches
            nbytes = [layout.nbytes for layout in layouts]
            images = [output + before for before in itertools.accumulate(nbytes[:-1], initial=0)]
            back = bound.together.decode_shape(objects, rows["format"] == Format.RAW)
            restore = AnsDecoding(
                back, *self._scratch(decoding_nbytes(segments)), shared=shared, slots=at
            )
            units = [(number,) for number in range(len(objects))]
            restores.append((restore, (rows, images, chosen, units)))
        self.logical_nbytes = batch_nbytes
        self.decode_s = median_s(
            [lambda r=restore: self._decode(r) for restore, _ in restores],
            [lambda r=restore, w=what: r.fill(*w) for restore, what in restores],
        )
        for restore, what in restores:
            restore.fill(*what)
            self._decode(restore)
            crcs_at, nbytes = restore.results
            self.kernels.move(restore.tasks.ctypes.data + crcs_at, restore.span.crcs, nbytes)
            cupy.cuda.Device().synchronize()
            assert not restore.crcs.any(), "another CRC"
            assert not restore.faults.any(), "a segment that did not decode"

    def _room(self, nbytes: int) -> int:
        memory = cupy.empty(nbytes + 4 * KIB, np.uint8)
        self.held.append(memory)
        return -(-int(memory.data.ptr) // (4 * KIB)) * 4 * KIB

    def _scratch(self, nbytes: int) -> tuple[np.ndarray, int]:
        memory = cupy.cuda.alloc_pinned_memory(nbytes)
        scratch = np.frombuffer(memory, np.uint8, nbytes)
        return scratch, scratch.ctypes.data

    def _decode(self, restore: AnsDecoding) -> None:
        restore.check(self.kernels)
        restore.decode(self.kernels)


def roof_gb_s() -> float:
    """Bytes read and written a second by a device copy of 1 GiB."""
    source = torch.randn(GIB // 4, device="cuda")
    target = torch.empty_like(source)
    return 2 * GIB / median_s([lambda: target.copy_(source)], [lambda: None]) / 1e9


def cast_gb_s() -> tuple[float, float]:
    """Casts by torch of 256 MiB of bfloat16 to fp8 and back, logical GB/s."""
    wide = [torch.randn(128 * MIB, device="cuda").to(torch.bfloat16) for _ in range(4)]
    narrow = [w.to(torch.float8_e4m3fn) for w in wide]
    nothing = [lambda: None] * 4
    there = median_s([lambda w=w: w.to(torch.float8_e4m3fn) for w in wide], nothing)
    back = median_s([lambda n=n: n.to(torch.bfloat16) for n in narrow], nothing)
    return 256 * MIB / there / 1e9, 256 * MIB / back / 1e9


class NvcompCrc32:
    """nvCOMP's own CRC32, of payloads cut into pieces of 64 KiB: a warp a piece, 16 bytes a read.

    That is its fastest form here; it gives a CRC a piece, which would still have to be combined.
    """

    PIECE_NBYTES = 64 * KIB

    def __init__(self) -> None:
        library = next(iter(nvcomp_candidates(None)))
        self._call = ctypes.CDLL(library).nvcompBatchedCRC32Async

    def median_s(self, arena: cupy.ndarray, nbytes: int) -> float:
        """Median over parts of the arena that are not in the cache."""
        count = nbytes // self.PIECE_NBYTES
        parts = max(1, arena.nbytes // nbytes)
        starts = [arena.data.ptr + part * nbytes for part in range(parts)]
        pieces = [
            cupy.asarray(np.arange(count, dtype=np.uint64) * self.PIECE_NBYTES + start)
            for start in starts
        ]
        lengths = cupy.full(count, self.PIECE_NBYTES, np.uint64)
        found, states = cupy.zeros(count, np.uint32), cupy.zeros(count, np.int32)
        # nvcompBatchedCRC32Opts_t: CRC-32/ISO-HDLC; one warp a message, 16 bytes a read.
        options = struct.pack(
            "<IIBB2xI16xiii20x64x", 0x04C11DB7, 2**32 - 1, 1, 1, 2**32 - 1, 0, 16, 1
        )
        given = (ctypes.c_char * len(options)).from_buffer_copy(options)

        class Options(ctypes.Structure):
            _fields_ = (("bytes", ctypes.c_char * len(options)),)

        def run(piece: cupy.ndarray) -> None:
            status = self._call(
                ctypes.c_void_p(piece.data.ptr),
                ctypes.c_void_p(lengths.data.ptr),
                ctypes.c_size_t(count),
                ctypes.c_void_p(found.data.ptr),
                Options.from_buffer(given),
                ctypes.c_int(0),
                ctypes.c_void_p(states.data.ptr),
                ctypes.c_void_p(0),
            )
            assert status == 0, f"nvcompBatchedCRC32Async: status {status}"

        taken = median_s([lambda p=p: run(p) for p in pieces], [lambda: None] * parts)
        last = arena[(parts - 1) * nbytes :][: self.PIECE_NBYTES].get()
        run(pieces[-1])
        assert int(found[0]) == zlib.crc32(last), (
            "nvCOMP's CRC is not zlib's: the options are wrong"
        )
        return taken


def bench_kernels(kernels: Kernels, codecs: list[str], *, as_json: bool) -> None:
    """Each codec's kernels, by batch and segment."""
    roof = roof_gb_s()
    try:
        nvcomp = NvcompCrc32()
    except OSError as error:
        print(f"nvCOMP's CRC32 is not measured: {error}")
        nvcomp = None
    there, back = cast_gb_s()
    rows: list[tuple[object, ...]] = [("device copy, moved", "", "", roof, "", "", "")]
    rows.append(("torch bf16 > fp8 / fp8 > bf16", 256, "", there, "", back, ""))
    for codec in codecs:
        if codec == "ans":
            rows += ans_rows(kernels)
            continue
        for segment_nbytes in (64 * KIB, 256 * KIB):
            for batch_nbytes in (16 * MIB, 64 * MIB, 256 * MIB):
                made = KernelBatches(kernels, codec, segment_nbytes, batch_nbytes)
                moved = made.logical_nbytes + made.stored_nbytes
                rows.append(
                    (
                        codec,
                        batch_nbytes // MIB,
                        segment_nbytes // KIB,
                        made.logical_nbytes / made.encode_s / 1e9,
                        moved / made.encode_s / 1e9 / roof * 100,
                        made.logical_nbytes / made.decode_s / 1e9,
                        (moved + made.stored_nbytes) / made.decode_s / 1e9 / roof * 100,
                    )
                )
                if codec == "none" and nvcomp:
                    theirs_s = nvcomp.median_s(made.arena, batch_nbytes)
                    theirs = batch_nbytes / theirs_s / 1e9
                    place = (batch_nbytes // MIB, NvcompCrc32.PIECE_NBYTES // KIB)
                    rows.append(("nvCOMP's crc32", *place, theirs, theirs / roof * 100, "", ""))
                if codec == "none":
                    crc = made.stored_nbytes / made.check_s / 1e9
                    rows.append(
                        (
                            "crc32",
                            batch_nbytes // MIB,
                            segment_nbytes // KIB,
                            crc,
                            crc / roof * 100,
                            "",
                            "",
                        )
                    )
                del made
                torch.cuda.empty_cache()
                cupy.get_default_memory_pool().free_all_blocks()
    columns = (
        "kernels",
        "batch MiB",
        "segment KiB",
        "encode GB/s",
        "% of roof",
        "check + decode GB/s",
        "% of roof",
    )
    report("Kernels, logical GB/s", columns, rows, as_json=as_json)


def ans_rows(kernels: Kernels) -> list[tuple[object, ...]]:
    """ANS, by batch and segment; nothing where there is no nvCOMP."""
    try:
        codec = open_ans(NVCOMP_LIBRARY)
    except Unavailable as error:
        print(error)
        return []
    rows: list[tuple[object, ...]] = []
    for gathered in (False, True):
        for segment_nbytes in (64 * KIB, 256 * KIB):
            for batch_nbytes in (16 * MIB, 64 * MIB, 256 * MIB):
                made = AnsBatches(kernels, codec, segment_nbytes, batch_nbytes, gathered=gathered)
                how = "gathered" if gathered else "from pages"
                ratio = made.logical_nbytes / made.stored_nbytes
                rows.append(
                    (
                        f"ans {how}, ratio {ratio:.2f}",
                        batch_nbytes // MIB,
                        segment_nbytes // KIB,
                        made.logical_nbytes / made.encode_s / 1e9,
                        "",
                        made.logical_nbytes / made.decode_s / 1e9,
                        "",
                    )
                )
                del made
                torch.cuda.empty_cache()
                cupy.get_default_memory_pool().free_all_blocks()
    return rows


def pinned_gb_s(nbytes: int) -> tuple[float, float]:
    """Pinned copies from and to the GPU."""
    host = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    device = torch.zeros(nbytes, dtype=torch.uint8, device="cuda")
    nothing = [lambda: None]
    out = median_s([lambda: host.copy_(device, non_blocking=True)], nothing)
    back = median_s([lambda: device.copy_(host, non_blocking=True)], nothing)
    return nbytes / out / 1e9, nbytes / back / 1e9


class Engine:
    """Pages of a model in GPU memory, registered with a manager."""

    def __init__(self, manager: Manager, made: Geometry, pages: int, name: str) -> None:
        self.manager = manager
        self.tensors = random_tensors(made, pages)
        self.instance = manager.register(made, self.tensors, model=ModelIdentity(name))
        self.nbytes = made.page_nbytes * pages
        self.hashes = [f"{name} {page}".encode() for page in range(pages)]
        self.round = 0
        torch.cuda.synchronize()

    def save(self) -> float:
        """Save all pages under new hashes; return the seconds."""
        self.round += 1
        self.hashes = [
            f"{self.instance.namespace} {self.round} {page}".encode()
            for page in range(len(self.hashes))
        ]
        started = time.perf_counter()
        outcome = self.manager.publish(
            self.instance, [(h, page) for page, h in enumerate(self.hashes)]
        ).result()
        taken = time.perf_counter() - started
        assert isinstance(outcome, Saved), outcome
        assert len(outcome.stored) == len(self.hashes), outcome
        return taken

    def restore(self) -> float:
        """Restore all pages; return the seconds."""
        started = time.perf_counter()
        lease = self.manager.query(self.instance, self.hashes)
        outcome = self.manager.restore(
            lease, {h: page for page, h in enumerate(self.hashes)}
        ).result()
        taken = time.perf_counter() - started
        assert isinstance(outcome, Restored), outcome
        assert not outcome.missed, outcome
        return taken


@contextmanager
def managed(codec: str, pool_nbytes: int) -> Iterator[Manager]:
    """A manager with the packaged pipelines and the default budget."""
    config = Config(
        pool_nbytes=pool_nbytes,
        storage_codec=codec,
        nvcomp_library=NVCOMP_LIBRARY,
        lock_memory=False,
    )
    with Manager(config) as made:
        yield made
        assert made.leaks() == [], made.leaks()


def both_at_once(saver: Engine, restorer: Engine, rounds: int) -> tuple[float, float]:
    """Bytes a second of saves and restores that run together until the first of them ends."""
    taken: Mapping[str, list[float]] = {"save": [], "restore": []}
    stop = threading.Event()

    def repeat(kind: str, work: Callable[[], float]) -> None:
        for _ in range(rounds):
            if stop.is_set():
                return
            taken[kind].append(work())
        stop.set()

    threads = [
        threading.Thread(target=repeat, args=("save", saver.save)),
        threading.Thread(target=repeat, args=("restore", restorer.restore)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    save_s, restore_s = (statistics.median(taken[kind]) for kind in ("save", "restore"))
    return saver.nbytes / save_s / 1e9, restorer.nbytes / restore_s / 1e9


def bench_graphs(codecs: list[str], *, as_json: bool) -> None:
    """Whole graphs, as the manager runs them, 1 GiB of pages."""
    out, back = pinned_gb_s(GIB)
    rows: list[tuple[object, ...]] = [("pinned copy of 1 GiB", "", "", out, back, "", "")]
    for codec in codecs:
        for segment_nbytes, layers in ((256 * KIB, 36), (64 * KIB, 36)):
            made = packed_geometry(segment_nbytes, layers)
            pages = GIB // made.page_nbytes
            with managed(codec, 5 * GIB) as manager:
                engine = Engine(manager, made, pages, "a")
                other = Engine(manager, made, pages, "b")
                for warm in (engine, other):
                    warm.save()
                    warm.restore()
                saves, restores = [], []
                for _ in range(ROUNDS):
                    manager.flush(evict_dram=True)
                    saves.append(engine.save())
                    restores.append(engine.restore())
                ratio = engine.nbytes / manager.statistics().pool_used_nbytes
                save_gb_s = engine.nbytes / statistics.median(saves) / 1e9
                restore_gb_s = engine.nbytes / statistics.median(restores) / 1e9
                manager.flush(evict_dram=True)
                other.save()
                together = both_at_once(engine, other, 4)
            rows.append(
                (
                    codec,
                    segment_nbytes // KIB,
                    ratio,
                    save_gb_s,
                    restore_gb_s,
                    together[0] / save_gb_s * 100,
                    together[1] / restore_gb_s * 100,
                )
            )
            torch.cuda.empty_cache()
    columns = (
        "codec",
        "segment KiB",
        "bytes saved, x",
        "E>C>D GB/s",
        "D>R>E GB/s",
        "save % with restore",
        "restore % with save",
    )
    report("Whole graphs, 1 GiB of pages, logical GB/s", columns, rows, as_json=as_json)


def bench_page(*, as_json: bool) -> None:
    """One page of 16 tokens of a Qwen3-8B shape: how long until it is back?"""
    made = packed_geometry(64 * KIB, 36)
    rows = []
    for codec in ("none", "fp8"):
        with managed(codec, GIB) as manager:
            engine = Engine(manager, made, 64, "page")
            engine.save()
            taken = []
            for index in range(1000):
                page = index % 64
                lease = manager.query(engine.instance, [engine.hashes[page]])
                started = time.perf_counter()
                outcome = manager.restore(lease, {engine.hashes[page]: page}).result()
                taken.append((time.perf_counter() - started) * 1e6)
                assert isinstance(outcome, Restored)
        taken = taken[100:]
        rows.append(
            (
                codec,
                made.page_nbytes / MIB,
                statistics.median(taken),
                float(np.percentile(taken, 99)),
            )
        )
    report("Restore of one page", ("codec", "MiB", "p50 us", "p99 us"), rows, as_json=as_json)


def main() -> None:
    """Run what was asked for."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--only", choices=("kernels", "graphs", "page"), action="append")
    arguments.add_argument("--codec", action="append", help="all if not said")
    chosen: argparse.Namespace = arguments.parse_args()
    only = chosen.only or ("kernels", "graphs", "page")
    if "kernels" in only:
        codecs = chosen.codec or ["none", "ans", "fp8", "turboquant-4", "turboquant-3"]
        bench_kernels(Kernels(0), codecs, as_json=chosen.json)
    if "graphs" in only:
        codecs = chosen.codec or ["none", "ans", "fp8", "turboquant-4"]
        bench_graphs(codecs, as_json=chosen.json)
    if "page" in only:
        bench_page(as_json=chosen.json)


if __name__ == "__main__":
    main()
