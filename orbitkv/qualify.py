"""orbitkv qualify: what each codec does to a real model.

Every context of a text is computed once. Its prefix is then saved and restored through a manager of
each codec, and what the model says next is compared with what it says after the prefix as it was
computed. Both go the same way but for the manager, so that ``none`` must give exactly zero.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from orbitkv.commands import (
    NotRestoredError,
    add_shared_options,
    files_of,
    run_command,
    unwritable,
)
from orbitkv.config import Config
from orbitkv.engines.checkpoint import (
    DEFAULT_MODEL,
    NEEDED,
    NEEDED_FOR_GGUF,
    GreedyEngine,
    check_installed,
    find_model,
    load_model,
    read_text,
    states_of,
    tokenize,
)
from orbitkv.engines.device import (
    await_stream,
    check_codec,
    check_device,
    describe_device,
    mark_stream,
    order_after,
)
from orbitkv.errors import ConfigError
from orbitkv.runtime.manager import Manager
from orbitkv.segment import Geometry, ModelIdentity, Role, hash_pages
from orbitkv.stages.ticket import Failed, Restored

DEFAULT_CODECS = ("none", "fp8", "turboquant-4", "turboquant-3")
CONTEXT_TOKENS = 1024
NEW_TOKENS = 64
PAGE_TOKENS = 32
# Of the weights. On CPUs without AMX one token in bfloat16 takes ten times as long.
WEIGHTS_DTYPE = "float32"
KV_DTYPES = ("bfloat16", "float16")  # what codecs take
REPORT_FILE, RATE_FILE, LAYERS_FILE = "qualify.json", "rate_kl.png", "layer_error.png"

Model = Any  # transformers.PreTrainedModel
States = list[Any]  # K and V of each layer in turn: tensors [1, heads, tokens, head_dim]
Axes = Any  # matplotlib.axes.Axes
Floats = npt.NDArray[np.floating[Any]]
Doubles = npt.NDArray[np.float64]

_NEEDED = (*NEEDED, "matplotlib")
_CROWDED_RATIO = 0.7  # from here on, a point's label has no room at its right


# Arithmetic -----------------------------------------------------------------------------------


def log_probabilities(logits: Floats) -> Doubles:
    """Log-softmax along the last axis, in float64."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def kl_nats(p: Doubles, q: Doubles) -> Doubles:
    """Kullback-Leibler divergence KL(p || q) along the last axis.

    Args:
        p, q: Log-probabilities. Exactly zero where they are the same.
    """
    return np.asarray((np.exp(p) * (p - q)).sum(axis=-1))


def surprise_nats(log_p: Doubles, targets: Sequence[int]) -> Doubles:
    """Negative log-probability of each target under its row."""
    return -log_p[np.arange(len(targets)), targets]


def perplexity(surprises: Doubles) -> float:
    """Exponential of the mean negative log-probability."""
    return float(np.exp(surprises.mean()))


def matching_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Number of leading tokens that two sequences share."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))


@dataclass(slots=True)
class ErrorSums:
    """Sums of squares of one tensor and of what was made of it, in float64."""

    difference: float = 0.0
    original: float = 0.0

    def add(self, original: Floats, restored: Floats) -> None:
        """Count one more part of the tensor."""
        exact = original.astype(np.float64)
        self.difference += float(np.square(restored - exact).sum())
        self.original += float(np.square(exact).sum())

    @property
    def relative_mse(self) -> float:
        """Mean square of the difference over that of the original; 0 for 0 over 0."""
        if self.original == 0.0:
            return 0.0 if self.difference == 0.0 else float("inf")
        return self.difference / self.original

    @property
    def relative_error(self) -> float:
        """RMS of the difference over that of the original."""
        return float(np.sqrt(self.relative_mse))


# What is asked for ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Task:
    """What every codec is put through.

    Attributes:
        contexts: Token ids, ``context_tokens`` each, from one text, without overlap.
        prefix_tokens: Tokens at a context's beginning that are saved: whole pages.
        geometry: Of the prefix, in ``kv_dtype``.
        nvcomp_library: As ``Config`` has it.
    """

    codecs: tuple[str, ...]
    contexts: list[list[int]]
    prefix_tokens: int
    new_tokens: int
    geometry: Geometry
    identity: ModelIdentity
    nvcomp_library: str | None = None

    @property
    def pages(self) -> int:
        """Pages of a prefix."""
        return self.prefix_tokens // self.geometry.page_tokens


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        metavar="DIR",
        help="directory with one .gguf file or a Hugging Face checkpoint (default: %(default)s)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="DIR",
        help=f"directory for {REPORT_FILE}, {RATE_FILE} and {LAYERS_FILE}, made if need be",
    )
    parser.add_argument(
        "--codec",
        nargs="+",
        default=DEFAULT_CODECS,
        metavar="NAME",
        help=f"codecs to compare (default: {' '.join(DEFAULT_CODECS)})",
    )
    parser.add_argument(
        "--text-file",
        type=Path,
        metavar="F",
        help="UTF-8 text to compute (default: one of 9,400 tokens that comes with OrbitKV)",
    )
    parser.add_argument(
        "--contexts",
        type=int,
        metavar="N",
        help="contexts to take from the text (default: as many as it holds)",
    )
    parser.add_argument(
        "--context-tokens",
        type=int,
        default=CONTEXT_TOKENS,
        metavar="N",
        help="tokens of a context, 7/8 of which are its prefix (default: %(default)s)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=NEW_TOKENS,
        metavar="N",
        help="tokens to decode greedily after each prefix (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default=KV_DTYPES[0],
        help="what K and V are rounded to, also where no codec is used (default: %(default)s)",
    )
    add_shared_options(parser)


def run(args: argparse.Namespace, *, nvcomp_library: str | None = None) -> int:
    """Run the comparison.

    Args:
        nvcomp_library: As ``Config`` has it.

    Returns:
        0; 1 where ``none`` was not exact or a page was lost; 2 where it could not start.
    """
    return run_command(
        "qualify",
        lambda: _qualify(args, nvcomp_library),
        print_report=None if args.json else lambda report: _print_report(report, args.out),
        is_right=lambda report: report["none_is_exact"] is not False,
    )


def _qualify(args: argparse.Namespace, nvcomp_library: str | None) -> dict[str, Any]:
    started_s = time.perf_counter()
    console = Console(file=sys.stderr)
    codecs = tuple(dict.fromkeys(args.codec))
    for name in codecs:
        check_codec(name, args.device, nvcomp_library)
    for setting in ("contexts", "context_tokens", "new_tokens"):
        if (value := getattr(args, setting)) is not None and value < 1:
            option = setting.replace("_", "-")
            raise ConfigError(f"--{option}: {value}; accepted: 1 or more")
    model_path, gguf_file = find_model(args.model)
    text, text_name = read_text(args.text_file, flag="--text-file")
    check_installed(_NEEDED + (NEEDED_FOR_GGUF if gguf_file else ()))
    check_device(args.device)
    with files_of(args.out) as staging:
        with console.status(escape(f"loading {args.model}")):
            token_ids, _ = tokenize(model_path, gguf_file, text)
            contexts = _cut(args, token_ids)
            model = load_model(model_path, WEIGHTS_DTYPE, args.device)
        task = replace(_plan(args, model, codecs, contexts), nvcomp_library=nvcomp_library)
        results, cold_surprises = _measure(task, model, args.kv_dtype, console)
        report = _report(args, task, results, cold_surprises) | {
            "text": {
                "name": text_name,
                "sha256": hashlib.sha256(text.encode()).hexdigest(),
                "tokens": len(token_ids),
            },
            "device": describe_device(model.device),
            "machine": _machine(),
            "wall_s": time.perf_counter() - started_s,
        }
        try:
            _write_files(staging, report)
        except OSError as error:
            raise unwritable(args.out, error) from error
    return report


def _cut(args: argparse.Namespace, token_ids: Sequence[int]) -> list[list[int]]:
    """Cut the text into contexts.

    Raises:
        ConfigError: it holds fewer than asked for, or none.
    """
    length = args.context_tokens
    wanted = 1 if args.contexts is None else args.contexts
    if len(token_ids) < wanted * length:
        name = "the text" if args.text_file is None else f"--text-file {args.text_file}"
        raise ConfigError(
            f"{name}: {len(token_ids)} tokens; "
            f"accepted: {wanted * length} or more, for contexts of {length} (x {wanted})"
        )
    contexts = [
        list(token_ids[start : start + length])
        for start in range(0, len(token_ids) - length + 1, length)
    ]
    return contexts[: args.contexts]


def _plan(
    args: argparse.Namespace, model: Model, codecs: tuple[str, ...], contexts: list[list[int]]
) -> _Task:
    """Check what is asked against the model."""
    from orbitkv.engines.transformers import declare_geometry, fingerprint  # noqa: PLC0415 - torch

    declared = declare_geometry(model, page_tokens=PAGE_TOKENS)
    slots = tuple(replace(slot, dtype=args.kv_dtype) for slot in declared.slots)
    pages = args.context_tokens * 7 // 8 // PAGE_TOKENS
    prefix_tokens = pages * PAGE_TOKENS
    if pages == 0:
        raise ConfigError(
            f"--context-tokens: {args.context_tokens}; accepted: {PAGE_TOKENS * 8 // 7 + 1} or "
            f"more, so that 7/8 of them fill a page of {PAGE_TOKENS}"
        )
    positions = getattr(model.config, "max_position_embeddings", sys.maxsize)
    if max(args.context_tokens, prefix_tokens + 1 + args.new_tokens) > positions:
        raise ConfigError(
            f"contexts of {args.context_tokens} tokens, and {args.new_tokens} new ones after "
            f"{prefix_tokens + 1}; accepted: {positions}, the positions of this model"
        )
    return _Task(
        codecs=codecs,
        contexts=contexts,
        prefix_tokens=prefix_tokens,
        new_tokens=args.new_tokens,
        geometry=Geometry(PAGE_TOKENS, slots),
        identity=ModelIdentity(args.model.name, fingerprint(model)),
    )


# The runs -------------------------------------------------------------------------------------


class _Answers(NamedTuple):
    """What a model says after a prefix.

    Attributes:
        log_p: float64[predictions, vocabulary], of the text's own continuation.
        greedy: Tokens of the model's continuation.
    """

    log_p: Doubles
    greedy: list[int]


@dataclass(slots=True)
class _Result:
    """What a codec did, added up over contexts; one entry a context in each list.

    Attributes:
        errors: Of each slot of the geometry.
    """

    errors: tuple[ErrorSums, ...]
    original_nbytes: int = 0
    stored_nbytes: int = 0
    raw_segments: Counter[str] = field(default_factory=Counter)
    kl: list[Doubles] = field(default_factory=list)
    agrees: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    surprises: list[Doubles] = field(default_factory=list)
    matching: list[int] = field(default_factory=list)


def _measure(
    task: _Task, model: Model, kv_dtype: str, console: Console
) -> tuple[dict[str, _Result], list[Doubles]]:
    """Take every context through every codec.

    Returns:
        What each codec did, and the cold runs' surprise at the text, a context each.
    """
    import torch  # noqa: PLC0415

    torch.manual_seed(0)  # nothing draws from it
    engine = GreedyEngine(model)
    results = {
        name: _Result(tuple(ErrorSums() for _ in task.geometry.slots)) for name in task.codecs
    }
    cold_surprises = []
    with _progress(console, len(task.contexts) * (1 + len(task.codecs))) as step:
        for number, context in enumerate(task.contexts, start=1):
            where = f"context {number} of {len(task.contexts)}"
            step(f"{where}: cold")
            states = _prefix_states(task, engine, context, kv_dtype)
            cold = _answer(task, engine, context, states, None)
            targets = context[task.prefix_tokens + 1 :]
            cold_surprises.append(surprise_nats(cold.log_p, targets))
            for name, result in results.items():
                step(f"{where}: {name}")
                restored = _round_trip(task, name, context, states, result)
                for sums, before, after in zip(result.errors, states, restored, strict=True):
                    sums.add(before.float().cpu().numpy(), after.float().cpu().numpy())
                warm = _answer(task, engine, context, restored, cold.greedy)
                result.kl.append(kl_nats(cold.log_p, warm.log_p))
                result.agrees.append(cold.log_p.argmax(axis=-1) == warm.log_p.argmax(axis=-1))
                result.surprises.append(surprise_nats(warm.log_p, targets))
                result.matching.append(matching_length(cold.greedy, warm.greedy))
    return results, cold_surprises


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Show a bar; what is yielded is called with a name when a step begins."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("", total=total, start=True)
        begun = 0

        def step(name: str) -> None:
            nonlocal begun
            progress.update(bar, description=escape(name), completed=begun)
            begun += 1

        yield step


def _prefix_states(
    task: _Task, engine: GreedyEngine, context: Sequence[int], kv_dtype: str
) -> States:
    """Compute a context's prefix, and round its K and V as an engine of ``kv_dtype`` holds them."""
    cache = engine.empty_cache()
    engine.next_token(context[: task.prefix_tokens], cache)
    states = states_of(cache, kv_dtype)
    if not all(state.isfinite().all() for state in states):
        raise ConfigError(f"--kv-dtype {kv_dtype}: K or V past its range; accepted: bfloat16")
    return states


def _answer(
    task: _Task,
    engine: GreedyEngine,
    context: Sequence[int],
    states: States,
    expected: Sequence[int] | None,
) -> _Answers:
    """Let the model go on after a prefix: along the text, and greedily by itself.

    Args:
        expected: Another run's greedy tokens: decoding stops after the first that differs.
    """
    logits = engine.logits(context, engine.cache_of(states))
    grown, cache = list(context[: task.prefix_tokens + 1]), engine.cache_of(states)
    greedy: list[int] = []
    while len(greedy) < task.new_tokens:
        greedy.append(engine.next_token([*grown, *greedy], cache))
        if expected is not None and greedy[-1] != expected[len(greedy) - 1]:
            break
    return _Answers(log_probabilities(logits[:-1]), greedy)


def _round_trip(
    task: _Task, codec: str, context: Sequence[int], states: States, result: _Result
) -> States:
    """Save a prefix, forget the pages it came from, and restore it into others.

    Args:
        result: Is told the bytes and the segments that were stored raw.

    Returns:
        Tensors of the shapes and dtypes of ``states``.
    """
    geometry = task.geometry
    config = Config(
        storage_codec=codec,
        nvcomp_library=task.nvcomp_library,
        pool_nbytes=task.pages * sum(geometry.object_nbytes.values()),
        lock_memory=False,
    )
    # Not a number wherever a restore fails to write.
    restored = [state.new_full(state.shape, float("nan")) for state in states]
    device = states[0].device
    with Manager(config) as manager:
        engine_pages = manager.register(geometry, _paged(geometry, states), model=task.identity)
        hashes = hash_pages(
            engine_pages.namespace, context[: task.prefix_tokens], geometry.page_tokens
        )
        pages = {page_hash: index for index, page_hash in enumerate(hashes)}
        ready = mark_stream(device)
        saved = manager.publish(engine_pages, list(pages.items()), ready=ready).result()
        if isinstance(saved, Failed):
            raise saved.error
        statistics = manager.statistics()
        manager.unregister(engine_pages)
        fresh_pages = manager.register(geometry, _paged(geometry, restored), model=task.identity)
        lease = manager.query(fresh_pages, hashes)
        found = {page_hash: pages[page_hash] for page_hash in lease.hashes}
        await_stream(device)  # else the fill may come after what is restored
        outcome = manager.restore(lease, found).result()
        if isinstance(outcome, Failed):
            raise outcome.error
        placed = 0
        if isinstance(outcome, Restored):
            placed = len(outcome.restored)
            order_after(outcome.ready, device)
        if placed != task.pages:
            raise NotRestoredError(f"{codec}: {placed} pages restored; {task.pages} were saved")
    result.original_nbytes += task.pages * geometry.page_nbytes
    result.stored_nbytes += statistics.pool_used_nbytes
    for name, count in statistics.counters.items():
        if name.startswith("raw_"):
            result.raw_segments[name.removeprefix("raw_")] += count
    return restored


def _paged(geometry: Geometry, states: States) -> dict[str, Any]:
    """See tensors [1, heads, tokens, head_dim] as pages, in place."""
    views = {}
    for slot, state in zip(geometry.slots, states, strict=True):
        pages = state.shape[2] // geometry.page_tokens
        shape = (slot.heads, pages, geometry.page_tokens, slot.head_dim)
        views[slot.name] = state[0].view(shape)
    return views


# What came out --------------------------------------------------------------------------------


def _report(
    args: argparse.Namespace,
    task: _Task,
    results: Mapping[str, _Result],
    cold_surprises: Sequence[Doubles],
) -> dict[str, Any]:
    cold_perplexity = perplexity(np.concatenate(cold_surprises))
    codecs = {
        name: _codec_report(task, result, cold_perplexity) for name, result in results.items()
    }
    return {
        "model": str(args.model),
        "weights_dtype": WEIGHTS_DTYPE,
        "kv_dtype": args.kv_dtype,
        "contexts": len(task.contexts),
        "context_tokens": args.context_tokens,
        "prefix_tokens": task.prefix_tokens,
        "page_tokens": task.geometry.page_tokens,
        "predictions": sum(len(surprises) for surprises in cold_surprises),
        "new_tokens": task.new_tokens,
        "cold_perplexity": cold_perplexity,
        "codecs": codecs,
        "none_is_exact": _is_exact(codecs["none"]) if "none" in codecs else None,
    }


def _codec_report(task: _Task, result: _Result, cold_perplexity: float) -> dict[str, Any]:
    kl, agrees = np.concatenate(result.kl), np.concatenate(result.agrees)
    own_perplexity = perplexity(np.concatenate(result.surprises))
    by_role = {
        str(role): [
            sums
            for slot, sums in zip(task.geometry.slots, result.errors, strict=True)
            if slot.role is role
        ]
        for role in (Role.K, Role.V)
    }
    return {
        "bytes_ratio": result.stored_nbytes / result.original_nbytes,
        "original_nbytes": result.original_nbytes,
        "stored_nbytes": result.stored_nbytes,
        "raw_segments": dict(result.raw_segments),
        "kl_nats": float(kl.mean()),
        "kl_nats_p99": float(np.quantile(kl, 0.99)),
        "kl_nats_by_context": [float(part.mean()) for part in result.kl],
        "top1_agreement": float(agrees.mean()),
        "perplexity": own_perplexity,
        "perplexity_difference": own_perplexity - cold_perplexity,
        "greedy_exact": float(np.mean([n == task.new_tokens for n in result.matching])),
        "greedy_matching_tokens": float(np.mean(result.matching)),
        "greedy_matching_by_context": result.matching,
        "relative_error": {
            role: [sums.relative_error for sums in layers] for role, layers in by_role.items()
        },
        "relative_mse": {
            role: [sums.relative_mse for sums in layers] for role, layers in by_role.items()
        },
    }


def _is_exact(codec: Mapping[str, Any]) -> bool:
    """Whether nothing at all differs from the cold run."""
    errors = [*codec["relative_error"]["k"], *codec["relative_error"]["v"]]
    zero = [*errors, *codec["kl_nats_by_context"], codec["perplexity_difference"]]
    one = [codec["top1_agreement"], codec["greedy_exact"]]
    return all(value == 0.0 for value in zero) and all(value == 1.0 for value in one)


def _machine() -> dict[str, Any]:
    import torch  # noqa: PLC0415

    return {
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _lossy_mean(errors: Sequence[float]) -> float:
    """Mean over the layers that are not exact; protected ones would flatter the others."""
    lossy = [error for error in errors if error != 0.0]
    return float(np.mean(lossy)) if lossy else 0.0


def _print_report(report: Mapping[str, Any], out: Path) -> None:
    """Draw the report as a table, for people."""
    table = Table(
        title=f"{report['contexts']} contexts of {report['context_tokens']} tokens, "
        f"{report['prefix_tokens']} of them restored; {escape(Path(report['model']).name)}, "
        f"KV in {report['kv_dtype']}",
        caption=f"KL: nats per token, over {report['predictions']} predictions. Perplexity: added "
        f"to {report['cold_perplexity']:.3f}. Greedy: contexts with the same "
        f"{report['new_tokens']} tokens, and how many were the same on average. K, V: rms of the "
        "error over rms, mean of the layers that are not exact.",
    )
    table.add_column(no_wrap=True)
    for heading in ("stored", "KL", "top-1", "perpl.", "greedy", "K", "V"):
        table.add_column(heading, justify="right")
    for name, codec in report["codecs"].items():
        alike = round(codec["greedy_exact"] * report["contexts"])
        errors = codec["relative_error"]
        table.add_row(
            name,
            f"{codec['bytes_ratio']:.1%}",
            f"{codec['kl_nats']:.2g}",
            f"{codec['top1_agreement']:.1%}",
            f"{codec['perplexity_difference']:+.3f}",
            f"{alike}/{report['contexts']}, {codec['greedy_matching_tokens']:.1f}",
            f"{_lossy_mean(errors['k']):.1%}",
            f"{_lossy_mean(errors['v']):.1%}",
        )
    console = Console()
    console.print(table)
    if report["none_is_exact"] is False:
        console.print("none is exact      [bold red]NO[/bold red]")
    names = f"{REPORT_FILE}, {RATE_FILE}, {LAYERS_FILE}"
    console.print(escape(f"{names} in {out}, after {report['wall_s']:.0f} s"))


def _write_files(path: Path, report: Mapping[str, Any]) -> None:
    """Write the report and its two drawings."""
    from matplotlib.figure import Figure  # noqa: PLC0415 - draws without a display, and late

    (path / REPORT_FILE).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    rate = Figure(figsize=(6.4, 4.4), layout="constrained")
    _draw_rate(rate.subplots(), report)
    layers = Figure(figsize=(9.6, 4.2), layout="constrained")
    _draw_layers(layers.subplots(1, 2, sharey=True), report)
    layers.legend(*layers.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
    for figure, name in ((rate, RATE_FILE), (layers, LAYERS_FILE)):
        figure.savefig(path / name, dpi=110, metadata={"Software": None})


def _draw_rate(axes: Axes, report: Mapping[str, Any]) -> None:
    """Draw stored bytes against KL. A logarithm has no zero: what is exact lies on the floor."""
    divergences = {name: codec["kl_nats"] for name, codec in report["codecs"].items()}
    lossy = [kl for kl in divergences.values() if kl > 0.0]
    floor = min(lossy, default=1e-3) / 10
    for index, (name, kl) in enumerate(divergences.items()):
        ratio, exact = report["codecs"][name]["bytes_ratio"], kl <= 0.0
        point, left = (ratio, floor if exact else kl), ratio > _CROWDED_RATIO
        axes.plot(*point, "v" if exact else "o", color=f"C{index}")
        axes.annotate(
            f"{name}: {kl:.2g}",
            point,
            xytext=(-8, 4) if left else (8, 4),
            textcoords="offset points",
            ha="right" if left else "left",
        )
    axes.set_yscale("log")
    axes.set_ylim(floor / 2, max(lossy, default=floor) * 4)
    axes.set_xlim(0, 1.1)
    axes.set_xlabel("bytes in the pool / bytes in the engine")
    axes.set_ylabel("KL(cold || restored), nats per token")
    axes.set_title("What fewer bytes cost")
    axes.grid(alpha=0.3)


def _draw_layers(panels: Sequence[Axes], report: Mapping[str, Any]) -> None:
    """Draw the relative error of K and of V, layer by layer."""
    for axes, role in zip(panels, ("k", "v"), strict=True):
        for index, (name, codec) in enumerate(report["codecs"].items()):
            errors = np.array(codec["relative_error"][role])
            lossy = np.where(errors > 0.0, errors, np.nan)  # no line down to protected layers
            axes.plot(errors, "o", ms=3, color=f"C{index}", label=name)
            axes.plot(lossy, lw=1, color=f"C{index}")
        axes.set_title(role.upper())
        axes.set_xlabel("layer")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rms of the error / rms")
    panels[0].set_ylim(bottom=0)
