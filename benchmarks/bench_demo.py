"""How much sooner does a prompt's first token come when its KV cache is restored?

Without ``--shape``, runs ``orbitkv demo`` several times. Each run measures the model's own prefill,
the restore from DRAM, and the restore from SSD in a new process; a speed-up is the median of the
runs' ratios, so that a drift of the machine meets both sides.

With ``--shape``, a model of that shape with random weights, in this process, and DRAM only. Random
tokens are computed once and saved; then the same prompt's first token is asked for in turn:
computed again; with KV that was kept; and with KV restored. On a GPU the last two also with CUDA
graphs, which start on each band of layers as soon as it is there.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import parser, report
from transformers import Qwen3Config, Qwen3ForCausalLM

from orbitkv.config import MIB, STORAGE_CODECS, Config
from orbitkv.engines.checkpoint import GreedyEngine
from orbitkv.engines.device import DEVICES, await_stream, check_device, describe_device
from orbitkv.engines.graphed import GraphedStep
from orbitkv.engines.landing import Arrival, make_cache
from orbitkv.engines.transformers import OrbitKVCache, declare_geometry
from orbitkv.errors import ConfigError
from orbitkv.runtime.manager import Manager
from orbitkv.stages.ticket import Saved

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from orbitkv.cli import main; sys.exit(main())"]
TARGETS = {"dram": 20, "ssd": 15}
NAMES = {"cold": "computed", "dram": "from DRAM", "ssd": "from SSD, in a new process"}

SHAPE_TARGET = 8
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-8b": {
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
    },
    "tiny": {  # to try this on any machine
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_size": 128,
        "intermediate_size": 256,
        "vocab_size": 1000,
        "max_position_embeddings": 40960,
        "initializer_range": 0.2,
    },
}
LOSSLESS = ("none", "ans")
WARM_UP_ROUNDS = 3
COLUMNS = ("prompt", "first token ms", "range ms", "of that restoring ms", "faster", "target")

Tensors = Sequence[torch.Tensor]  # K and V of each layer in turn


def run_demo(model: Path, device: str) -> dict[str, Any]:
    """One run's report; the demo's own word for it where it failed."""
    ended = subprocess.run(
        [*COMMAND, "demo", "--model", str(model), "--device", device, "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        sys.exit(f"orbitkv demo: exit code {ended.returncode}\n{ended.stderr}{ended.stdout}")
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def bench_demo(args: argparse.Namespace) -> int:
    """Print medians and ratios beside the targets, which are those of a CPU."""
    count = args.runs or 3
    runs = [run_demo(args.model.resolve(), args.device) for _ in range(count)]
    rows = []
    for source, name in NAMES.items():
        ttft_ms = [run["ttft_ms"][source] for run in runs]
        restore_ms = [run["restore_ms"].get(source, 0.0) for run in runs]
        faster = [run["ttft_ms"]["cold"] / run["ttft_ms"][source] for run in runs]
        has_target = source in TARGETS and args.device == "cpu"
        rows.append(
            (
                name,
                statistics.median(ttft_ms),
                f"{min(ttft_ms):.0f} to {max(ttft_ms):.0f}",
                statistics.median(restore_ms),
                statistics.median(faster),
                f">= {TARGETS[source]}" if has_target else "",
            )
        )
    title = f"{runs[0]['prompt_tokens']} tokens, {runs[0]['dtype']}, {count} runs"
    report(title, COLUMNS, rows, as_json=args.json, facts={"device": runs[0]["device"]})
    return 0


# A model of a given shape ---------------------------------------------------------------------


def make_model(shape: str, device: str) -> Any:  # noqa: ANN401 - transformers.PreTrainedModel
    """Make a model with random weights in bfloat16, where it is to run."""
    torch.manual_seed(0)
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            return Qwen3ForCausalLM(Qwen3Config(**SHAPES[shape])).eval()
    finally:
        torch.set_default_dtype(usual)


def same_bytes(ones: Tensors, others: Tensors) -> bool:
    """Whether tensors are equal bit for bit, which NaN is not to itself as a number."""
    pairs = zip(ones, others, strict=True)
    return all(torch.equal(a.view(torch.int16), b.view(torch.int16)) for a, b in pairs)


def matching(ones: Sequence[int], others: Sequence[int]) -> int:
    """Number of leading tokens that are the same."""
    pairs = enumerate(zip(ones, others, strict=True))
    return next((index for index, (a, b) in pairs if a != b), len(ones))


class Noted:
    """An arrival that tells when each band came."""

    def __init__(self, arrival: Arrival) -> None:
        self._arrival = arrival
        self.came_s: list[float] = []

    def wait(self, band: int) -> int:
        """Wait as the arrival does."""
        pages = self._arrival.wait(band)
        self.came_s.append(time.perf_counter())
        return pages


class Bench:
    """One prompt, computed and saved; every way to its first token, timed and checked.

    Attributes:
        measures: By name; each gives the milliseconds to the first token, and those of them until
            all of the KV had been restored.
        bands_ms: Until the first band was there, of each overlapped restore.
    """

    def __init__(self, args: argparse.Namespace, manager: Manager, model: Any) -> None:  # noqa: ANN401
        self.new_tokens = args.new_tokens
        self.engine = GreedyEngine(model)
        self.kv = OrbitKVCache(manager, model, page_tokens=args.page_tokens, bands=args.bands)
        vocabulary = SHAPES[args.shape]["vocab_size"]
        drawn = torch.randint(
            vocabulary, (args.tokens,), generator=torch.Generator().manual_seed(1)
        )
        self.tokens: list[int] = drawn.tolist()
        self.pages = (args.tokens - 1) // args.page_tokens
        self.landing = self.kv.make_landing(self.pages * args.page_tokens)
        cache = self.engine.empty_cache()
        self.first = self.engine.next_token(self.tokens, cache)
        saved = self.kv.save(self.tokens, cache).result()
        if not isinstance(saved, Saved) or saved.dropped:
            sys.exit(f"not saved: {saved}")
        prefix_tokens = self.pages * args.page_tokens
        self.kept = [
            tensor[:, :, :prefix_tokens]
            for layer in cache.layers
            for tensor in (layer.keys, layer.values)
        ]
        self.cold_tokens = self.engine.decode(self.tokens, self.first, self.new_tokens, cache)
        self.bands_ms: list[float] = []
        self.measures: dict[str, Callable[[], tuple[float, float]]] = {
            "computed": self.compute,
            "kept": self.keep,
            "from DRAM, a cache of its own": lambda: self.restore(None),
            "from DRAM": lambda: self.restore(self.landing),
        }
        self.step: Any = None
        if self.landing.device.type == "cuda" and prefix_tokens == args.tokens - 1:
            self.step = GraphedStep(self.engine, self.landing, self.pages)
            self.measures |= {
                "kept, graphs": self.keep_graphed,
                "from DRAM, graphs": self.restore_graphed,
            }

    def make_cache(self) -> Any:  # noqa: ANN401 - transformers.DynamicCache
        """A cache of the KV that never left, by views."""
        return make_cache(self.engine.model.config, self.kept)

    def compute(self) -> tuple[float, float]:
        """From nothing."""
        started_s = self._start()
        self.engine.next_token(self.tokens, self.engine.empty_cache())
        return _since_ms(started_s), 0.0

    def keep(self) -> tuple[float, float]:
        """From KV that never left: what a restore can at best come down to."""
        started_s = self._start()
        self.engine.next_token(self.tokens, self.make_cache())
        return _since_ms(started_s), 0.0

    def restore(self, landing: Any) -> tuple[float, float]:  # noqa: ANN401 - Landing
        """From what is restored, once all of it is there."""
        started_s = self._start()
        restoration = self.kv.restore(self.tokens, landing)
        restore_ms = _since_ms(started_s)
        self.engine.next_token(self.tokens, restoration.cache)
        return _since_ms(started_s), restore_ms

    def keep_graphed(self) -> tuple[float, float]:
        """From what the landing holds."""
        started_s = self._start()
        self.step.run(self.tokens[-1])
        return _since_ms(started_s), 0.0

    def restore_graphed(self) -> tuple[float, float]:
        """From what is restored, band by band as it comes."""
        started_s = self._start()
        arrival = Noted(self.kv.begin(self.tokens, self.landing))
        if self.step.run(self.tokens[-1], arrival) is None:
            sys.exit("from DRAM, graphs: pages were lost")
        ttft_ms = _since_ms(started_s)
        self.bands_ms.append((arrival.came_s[0] - started_s) * 1e3)
        return ttft_ms, (arrival.came_s[-1] - started_s) * 1e3

    def check(self, *, lossless: bool) -> dict[str, object]:
        """Compare bytes and tokens of each way with those of KV that never left.

        Returns:
            What is to be told, under names; and ``right``: nothing differs that must not.
        """
        kept = self._continue(self.make_cache())
        # How far two runs over the same bytes agree, without any restore: kernels that add in any
        # order make a model of random weights, whose best tokens lie close together, go astray.
        control = matching(self._continue(self.make_cache()), kept)
        self._poison()
        restoration = self.kv.restore(self.tokens, self.landing)
        complete = restoration.pages_restored == self.pages
        identical = complete and same_bytes(self.landing.tensors, self.kept)
        restored = self._continue(restoration.cache)
        as_kept = matching(restored, kept)
        facts: dict[str, object] = {
            "pages restored": f"{restoration.pages_restored} of {self.pages}",
            "bytes identical": identical,
            "kept tokens as kept, run twice": f"{control} of {self.new_tokens}",
            "restored tokens as kept": f"{as_kept} of {self.new_tokens}",
            "restored tokens as computed": f"{matching(restored, self.cold_tokens)} of "
            f"{self.new_tokens} (computed at once or one by one, a token takes other kernels)",
        }
        right = complete and (not lossless or (identical and as_kept >= control))
        if self.step:
            for target, tensor in zip(self.landing.tensors, self.kept, strict=True):
                target.copy_(tensor)
            kept = self._continue_graphed(None)
            for target, tensor in zip(self.landing.tensors, self.kept, strict=True):
                target.copy_(tensor)
            control = matching(self._continue_graphed(None), kept)
            self._poison()
            restored = self._continue_graphed(self.kv.begin(self.tokens, self.landing))
            identical = same_bytes(self.landing.tensors, self.kept)
            as_kept = matching(restored, kept)
            facts["graphs, bytes identical"] = identical
            facts["graphs, kept tokens as kept, run twice"] = f"{control} of {self.new_tokens}"
            facts["graphs, restored tokens as kept"] = f"{as_kept} of {self.new_tokens}"
            right = right and (not lossless or (identical and as_kept >= control))
        return facts | {"right": right}

    def _continue(self, cache: Any) -> list[int]:  # noqa: ANN401 - transformers.DynamicCache
        first = self.engine.next_token(self.tokens, cache)
        return self.engine.decode(self.tokens, first, self.new_tokens, cache)

    def _continue_graphed(self, arrival: Any) -> list[int]:  # noqa: ANN401 - Arrival
        first = self.step.run(self.tokens[-1], arrival)
        if first is None:
            sys.exit("graphs: pages were lost")
        cache = self.step.grown_cache()
        return self.engine.decode(self.tokens, first, self.new_tokens, cache)

    def _poison(self) -> None:
        for tensor in self.landing.tensors:
            tensor.fill_(float("nan"))

    def _start(self) -> float:
        await_stream(self.landing.device)
        return time.perf_counter()


def _since_ms(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3


@contextmanager
def prepared(args: argparse.Namespace) -> Iterator[Bench]:
    """Make the model, compute and save the prompt."""
    model = make_model(args.shape, args.device)
    page_nbytes = declare_geometry(model, page_tokens=args.page_tokens).page_nbytes
    pages = args.tokens // args.page_tokens
    config = Config(pool_nbytes=pages * page_nbytes * 3 // 2 + 64 * MIB, storage_codec=args.codec)
    with Manager(config) as manager:
        bench = Bench(args, manager, model)
        with bench.kv:
            yield bench


def bench_shape(args: argparse.Namespace) -> int:
    """Measure in turn, then check; 1 where a byte or token differs that must not."""
    check_device(args.device)
    count = args.runs or 9
    with prepared(args) as bench:
        for _ in range(WARM_UP_ROUNDS):
            for measure in bench.measures.values():
                measure()
        bench.bands_ms.clear()
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in bench.measures}
        for _ in range(count):
            for name, measure in bench.measures.items():
                taken[name].append(measure())
        facts = bench.check(lossless=args.codec in LOSSLESS)
        facts["KV MiB"] = sum(t.nbytes for t in bench.landing.tensors) / MIB
        facts["device"] = describe_device(bench.landing.device)
        if bench.bands_ms:
            facts["graphs, first band ms"] = statistics.median(bench.bands_ms)
    cold_ms = [ttft_ms for ttft_ms, _ in taken["computed"]]
    rows = []
    for name, runs in taken.items():
        ttft_ms = [ttft_ms for ttft_ms, _ in runs]
        faster = [cold / ours for cold, ours in zip(cold_ms, ttft_ms, strict=True)]
        has_target = args.device == "cuda" and name == "from DRAM, graphs"
        rows.append(
            (
                name,
                statistics.median(ttft_ms),
                f"{min(ttft_ms):.1f} to {max(ttft_ms):.1f}",
                statistics.median(restore_ms for _, restore_ms in runs),
                statistics.median(faster),
                f">= {SHAPE_TARGET}" if has_target else "",
            )
        )
    title = (
        f"{args.shape}, random weights, bfloat16, {args.tokens} tokens in pages of "
        f"{args.page_tokens} and {args.bands} bands, codec {args.codec}, {count} runs"
    )
    right = facts.pop("right")
    report(title, COLUMNS, rows, as_json=args.json, facts=facts)
    return 0 if right else 1


def main() -> int:
    """Measure the demo, or a model of a shape."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, help="3 of the demo, 9 of a shape, if not said")
    arguments.add_argument("--device", choices=DEVICES, default=DEVICES[0])
    arguments.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2")
    arguments.add_argument("--shape", choices=SHAPES)
    shaped = arguments.add_argument_group("with --shape")
    shaped.add_argument("--tokens", type=int, default=4097, help="whole pages and one, for graphs")
    shaped.add_argument("--page-tokens", type=int, default=128)
    shaped.add_argument("--bands", type=int, default=3)
    shaped.add_argument("--codec", choices=STORAGE_CODECS, default="none")
    shaped.add_argument("--new-tokens", type=int, default=32)
    args = arguments.parse_args()
    try:
        return bench_shape(args) if args.shape else bench_demo(args)
    except ConfigError as error:
        print(f"bench_demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
