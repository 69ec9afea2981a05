"""How fast is ANS on a GPU, and which of its steps takes how long?

A batch of normal bfloat16 numbers, over data that is not in the cache: first all steps together,
by CUDA events and by the host's clock; then each step between events of its own, which adds a
little to each.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np
from measure import parser, report

from orbitkv.codecs.base import SegmentSpec
from orbitkv.codecs.cuda import ans
from orbitkv.codecs.cuda.ans import AnsCodec, AnsDevice
from orbitkv.codecs.cuda.kernels import Kernels, Span
from orbitkv.codecs.cuda.tasks import SLOT, TASK
from orbitkv.codecs.nvcomp import open_nvcomp
from orbitkv.config import KIB, MIB
from orbitkv.objects import crc32
from orbitkv.segment import Role

ROUNDS, BATCHES = 20, 6


class Steps:
    """Events around calls, by name."""

    def __init__(self) -> None:
        self.on = False
        self.taken: dict[str, list[Any]] = {}

    def around(self, name: str, call: Callable[..., None]) -> Callable[..., None]:
        """Time a call, if timing is on."""

        def timed(*arguments: Any, **named: Any) -> None:  # noqa: ANN401 - as the call has them
            if not self.on:
                call(*arguments, **named)
                return
            start, end = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call(*arguments, **named)
            end.record()
            self.taken.setdefault(name, []).append((start, end))

        return timed

    def medians_us(self) -> dict[str, float]:
        """Median of each call, in microseconds."""
        cupy.cuda.get_current_stream().synchronize()
        return {
            name: statistics.median(1e3 * cupy.cuda.get_elapsed_time(*pair) for pair in pairs)
            for name, pairs in self.taken.items()
        }


def steps_of(kernels: Kernels, device: AnsDevice) -> Steps:
    """Put events around every step."""
    steps = Steps()
    kernels.gather = steps.around("gather", kernels.gather)
    kernels.scatter_raw = steps.around("scatter", kernels.scatter_raw)
    kernels.crc32 = steps.around("crc32", kernels.crc32)
    nvcomp = device.nvcomp
    nvcomp.compress_async = steps.around("compress", nvcomp.compress_async)
    nvcomp.decompress_async = steps.around("decompress", nvcomp.decompress_async)
    for name in ("layout", "pack", "unpack", "judge"):
        setattr(device, f"_{name}", steps.around(name, getattr(device, f"_{name}")))
    return steps


class Batch:
    """One batch, ready to be encoded and decoded again and again."""

    def __init__(
        self, kernels: Kernels, device: AnsDevice, segment_nbytes: int, batch_nbytes: int
    ) -> None:
        self.kernels, self.device = kernels, device
        self.nbytes, self.count = segment_nbytes, batch_nbytes // segment_nbytes
        head_dim = segment_nbytes // 2
        spec = SegmentSpec(dtype="bfloat16", role=Role.K, tokens=1, heads=1, head_dim=head_dim)
        bound = AnsCodec(device.nvcomp).bind(spec)
        self.rows = ans.describe([bound] * self.count, [segment_nbytes] * self.count)
        self.counts = [self.count]
        numbers = cupy.random.standard_normal(batch_nbytes // 2, np.float32)
        self.pages = (numbers.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        self.staging = cupy.empty(batch_nbytes, np.uint8)
        slots = np.zeros(self.count, SLOT)
        offsets = np.arange(self.count) * segment_nbytes
        slots["base"] = offsets + self.pages.data.ptr
        for name in ("page_stride", "outer_stride", "inner_stride", "row_nbytes"):
            slots[name] = segment_nbytes
        slots["outer"] = slots["inner"] = 1
        slots["access_nbytes"] = 16
        self.slots = cupy.asarray(slots.view(np.uint8))
        self.tasks = np.zeros(self.count, TASK)
        self.tasks["slot"] = self.tasks["unit_first"] = np.arange(self.count)
        self.tasks["unit_count"] = 1
        self.tasks["stored_nbytes"] = segment_nbytes
        self.tasks["payload"] = offsets + self.staging.data.ptr
        self.gathered = offsets + self.staging.data.ptr
        self.direct = offsets + self.pages.data.ptr
        self.device_tasks = cupy.asarray(self.tasks.view(np.uint8))
        self.words = cupy.zeros((2, self.count), np.uint32)
        self.results = cupy.zeros(self.count, np.uint64)
        plan = ans.plan_encode(device.nvcomp, self.rows, self.counts)
        self.encode_plan, self.decode_plan = plan, ans.plan_decode(device.nvcomp, self.rows)
        workspace_nbytes = max(plan.workspace_nbytes, self.decode_plan.workspace_nbytes)
        self.workspace = cupy.empty(workspace_nbytes + 4096, np.uint8)
        self.output = cupy.empty(plan.most_output_nbytes + 4096, np.uint8)
        self.workspace_at, self.output_at = (
            -(-memory.data.ptr // 4096) * 4096 for memory in (self.workspace, self.output)
        )
        self.host = np.zeros(max(plan.descriptors_nbytes, 40 * self.count), np.uint8)
        self.descriptors = cupy.zeros(self.host.nbytes, np.uint8)
        crcs = self.words.data.ptr
        self.span = Span(
            self.slots.data.ptr, self.device_tasks.data.ptr, crcs, crcs + 4 * self.count, 0
        )

    def reset_encode(self, *, direct: bool) -> None:
        """Upload what an encoder is given, and changes."""
        self.encode_plan.fill(
            self.host, self.direct if direct else self.gathered, self.workspace_at
        )
        self.descriptors.set(self.host)
        self.device_tasks.set(self.tasks.view(np.uint8))

    def encode(self, *, direct: bool) -> None:
        """Gather, unless nvCOMP may read the pages; encode; sum."""
        if not direct:
            self.kernels.gather(self.span, 0, self.count, self.nbytes)
        self.device.enqueue_encode(
            self.encode_plan,
            descriptors=self.descriptors.data.ptr,
            tasks=self.device_tasks.data.ptr,
            crcs=self.span.crcs,
            results=self.results.data.ptr,
            workspace=self.workspace_at,
            output=self.output_at,
        )
        self.kernels.crc32(self.span, 0, self.count, self.nbytes)

    def keep(self) -> None:
        """Remember what was encoded."""
        self.encoded = self.device_tasks.get()
        stored = self.encoded.view(TASK)["stored_nbytes"]
        zeros = np.array([crc32(bytes(nbytes)) for nbytes in stored], np.uint32)
        self.expected = np.zeros((2, self.count), np.uint32)
        self.expected[0] = self.words.get()[0] ^ zeros
        self.ratio = self.count * self.nbytes / float(stored.sum())

    def reset_decode(self) -> None:
        """Upload what a decoder is given, and changes."""
        self.decode_plan.fill(self.host, self.workspace_at)
        self.descriptors.set(self.host)
        self.device_tasks.set(self.encoded)
        self.words.set(self.expected)

    def decode(self) -> None:
        """Compare CRCs, decode, scatter."""
        most_nbytes = int(self.encoded.view(TASK)["stored_nbytes"].max())
        self.kernels.crc32(self.span, 0, self.count, most_nbytes)
        self.device.enqueue_decode(
            self.decode_plan,
            descriptors=self.descriptors.data.ptr,
            tasks=self.device_tasks.data.ptr,
            crcs=self.span.crcs,
            faults=self.span.faults,
            workspace=self.workspace_at,
        )
        self.kernels.scatter_raw(self.span, 0, self.count, self.nbytes)


def timed(
    batches: list[Batch], reset: Callable[[Batch], None], run: Callable[[Batch], None]
) -> tuple[float, float]:
    """Medians by events and of the host's part, in microseconds."""
    start, end = cupy.cuda.Event(), cupy.cuda.Event()
    device_us, host_us = [], []
    for index in range(ROUNDS + 3):
        batch = batches[index % len(batches)]
        reset(batch)
        start.record()
        began = time.perf_counter()
        run(batch)
        host_us.append(1e6 * (time.perf_counter() - began))
        end.record()
        end.synchronize()
        device_us.append(1e3 * cupy.cuda.get_elapsed_time(start, end))
    return statistics.median(device_us[3:]), statistics.median(host_us[3:])


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "").parse_args()
    nvcomp = open_nvcomp(os.environ.get("ORBITKV_NVCOMP_LIBRARY"))
    kernels, device = Kernels(cupy.cuda.Device().id), AnsDevice(nvcomp)
    steps = steps_of(kernels, device)
    rows: list[tuple[object, ...]] = []
    details: list[tuple[object, ...]] = []
    for batch_nbytes in (16 * MIB, 32 * MIB, 64 * MIB):
        for segment_nbytes in (32 * KIB, 64 * KIB, 256 * KIB, MIB):
            batches = [Batch(kernels, device, segment_nbytes, batch_nbytes) for _ in range(BATCHES)]
            shape = (batch_nbytes // MIB, segment_nbytes // KIB)
            runs = {
                "encode": (
                    lambda b: b.reset_encode(direct=False),
                    lambda b: b.encode(direct=False),
                ),
                "encode from pages": (
                    lambda b: b.reset_encode(direct=True),
                    lambda b: b.encode(direct=True),
                ),
                "decode": (lambda b: b.reset_decode(), lambda b: b.decode()),
            }
            for name, (reset, run) in runs.items():
                steps.on = False
                device_us, host_us = timed(batches, reset, run)
                steps.on, steps.taken = True, {}
                timed(batches, reset, run)
                details += [(*shape, name, step, us) for step, us in steps.medians_us().items()]
                steps.on = False
                if name != "decode":
                    for batch in batches:
                        reset(batch)
                        run(batch)
                        batch.keep()
                gb_s = batch_nbytes / device_us / 1e3
                rows.append((*shape, name, gb_s, device_us, host_us, batches[0].ratio))
            wrong = sum(int(batch.words.get().any()) for batch in batches)
            assert not wrong, f"{wrong} batches with faults"
            del batches
            cupy.get_default_memory_pool().free_all_blocks()
    title = f"ANS by nvCOMP {nvcomp.version}, logical GB/s"
    columns = ("batch MiB", "segment KiB", "what", "GB/s", "device us", "host us", "ratio")
    report(title, columns, rows, as_json=arguments.json)
    columns = ("batch MiB", "segment KiB", "what", "step", "us")
    report("Steps", columns, details, as_json=arguments.json)


if __name__ == "__main__":
    main()
