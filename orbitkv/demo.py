"""orbitkv demo: a real model's KV cache leaves the engine, and comes back.

The prompt is computed once, saved to DRAM and from there to SSD. Then the engine's own cache is
thrown away and the prompt is continued three times: as it was computed, from DRAM, and in a new
process that finds nothing but the file on SSD. The same tokens must come out, of the same bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, get_args

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from orbitkv.cache.catalogue import Tier
from orbitkv.commands import (
    EXIT_INTERRUPTED,
    EXIT_REFUSED,
    NotRestoredError,
    Report,
    add_shared_options,
    run_command,
)
from orbitkv.config import MIB, Config, SsdBackend, format_nbytes, parse_nbytes
from orbitkv.engines.checkpoint import (
    DEFAULT_MODEL,
    NEEDED,
    NEEDED_FOR_GGUF,
    GreedyEngine,
    check_installed,
    digest_pages,
    find_model,
    load_model,
    read_text,
    tokenize,
)
from orbitkv.engines.device import (
    await_stream,
    check_codec,
    check_device,
    describe_device,
)
from orbitkv.errors import ConfigError, OrbitError
from orbitkv.objects import object_nbytes
from orbitkv.runtime.manager import Manager

PROMPT_TOKENS = 4097  # 128 pages, and one token to compute
NEW_TOKENS = 32
WARM_UP_ROUNDS = 4  # until the allocator keeps what a restored cache and its growth take
# float32 first, as measured on a CPU with AVX-512 BF16 but no AMX: bfloat16 prefills 1.7 times as
# fast, but one token takes 1.3 s instead of 0.1 s, so that what a restore leaves to do costs most.
DTYPES = ("float32", "bfloat16", "float16")
CODECS = ("none", "ans")  # that give back every byte

_BE_THE_SECOND_PROCESS = """
import sys
sys.path.insert(0, sys.argv[1])
from orbitkv import demo
sys.exit(demo.answer_task())
"""

# What they are is imported only once it is known that it can be.
Model = Any  # transformers.PreTrainedModel
Cache = Any  # transformers.DynamicCache
Saver = Any  # orbitkv.engines.transformers.OrbitKVCache


@dataclass(frozen=True, slots=True)
class _Task:
    """What both processes do, as it travels from the first to the second.

    Attributes:
        dtype: Of the weights, and so of the cache.
        device: Where the model is, and so the engine's pages.
        codec, nvcomp_library: As ``Config`` has them.
        token_ids: The prompt.
        pool_nbytes, ssd_nbytes: Room for the prompt's pages in each tier.
        trace: File to record what the manager does to.
    """

    model: str
    dtype: str
    device: str
    codec: str
    token_ids: list[int]
    page_tokens: int
    new_tokens: int
    pool_nbytes: int
    ssd_nbytes: int
    ssd_path: str
    ssd_backend: SsdBackend
    nvcomp_library: str | None = None
    trace: str | None = None

    @property
    def pages(self) -> int:
        """Full pages of the prompt: what is saved."""
        return len(self.token_ids) // self.page_tokens

    @property
    def restorable_pages(self) -> int:
        """Full pages before the prompt's last token, which is always computed."""
        return (len(self.token_ids) - 1) // self.page_tokens

    def config(self) -> Config:
        """Settings of a manager that leaves its SSD file behind for the next one."""
        return replace(
            self.config_without_ssd(),
            ssd_cache_paths=(Path(self.ssd_path),),
            ssd_cache_capacity_nbytes=self.ssd_nbytes,
            ssd_backend=self.ssd_backend,
            ssd_persist=True,
            trace=Path(self.trace) if self.trace else None,
        )

    def config_without_ssd(self) -> Config:
        """The same for a manager of which nothing is to be left."""
        return Config(
            pool_nbytes=self.pool_nbytes,
            storage_codec=self.codec,
            nvcomp_library=self.nvcomp_library,
        )


@dataclass(frozen=True, slots=True)
class _Run:
    """One continuation of the prompt.

    Attributes:
        ttft_ms: From having the prompt's token ids to having the first new token.
        restore_ms: The part of it that ``OrbitKVCache.restore`` took.
        page_digests: SHA-256 of each of the prompt's pages, over all layers; only of those that
            were restored, unless all were computed.
        sources: How many of the restored pages came from each tier.
    """

    ttft_ms: float
    restore_ms: float
    token_ids: list[int]
    page_digests: list[str]
    pages_restored: int
    sources: Mapping[str, int]


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
        "--prompt-file",
        type=Path,
        metavar="F",
        help=f"UTF-8 text to continue (default: {PROMPT_TOKENS} tokens of one that comes with it)",
    )
    parser.add_argument(
        "--ssd-cache-path",
        type=Path,
        metavar="P",
        help="file to make for the SSD tier, removed at the end (default: a temporary one)",
    )
    parser.add_argument(
        "--ssd-backend",
        choices=get_args(SsdBackend),
        default="auto",
        help="how the SSD file is read and written (default: io_uring, or threads without it)",
    )
    parser.add_argument(
        "--new-tokens",
        type=int,
        default=NEW_TOKENS,
        metavar="N",
        help="tokens to decode each time (default: %(default)s)",
    )
    parser.add_argument(
        "--pool-size",
        metavar="SIZE",
        help="DRAM for saved pages, such as 256mb (default: what the prompt needs)",
    )
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default=DTYPES[0],
        help="of the weights; on most CPUs the default is by far the fastest at decoding",
    )
    parser.add_argument(
        "--codec",
        choices=CODECS,
        default=CODECS[0],
        help="how pages are stored, ans with --device cuda only (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="T.okvtrace",
        help="record the run there, and the new process's beside it, as T-ssd.okvtrace",
    )
    add_shared_options(parser)


def run(args: argparse.Namespace, *, nvcomp_library: str | None = None) -> int:
    """Run the demo.

    Args:
        nvcomp_library: As ``Config`` has it.

    Returns:
        0 where every token and byte came back; 1 where one did not; 2 where it could not start.
    """
    return run_command(
        "demo",
        lambda: _demonstrate(args, nvcomp_library),
        print_report=None if args.json else _print_report,
        is_right=_is_right,
    )


def _is_right(report: Report) -> bool:
    complete = report["pages_restored"] == report["pages_expected"]
    return bool(report["tokens_identical"] and report["bytes_identical"] and complete)


def _demonstrate(args: argparse.Namespace, nvcomp_library: str | None) -> dict[str, Any]:
    check_installed(NEEDED)
    check_device(args.device)
    check_codec(args.codec, args.device, nvcomp_library)
    console = Console(file=sys.stderr)
    pool_nbytes = None
    if args.pool_size is not None:
        pool_nbytes = parse_nbytes(args.pool_size, setting="--pool-size")
    if args.new_tokens < 1:
        raise ConfigError(f"--new-tokens: {args.new_tokens}; accepted: 1 or more")
    model_path, gguf_file = find_model(args.model)
    text, text_name = read_text(args.prompt_file, flag="--prompt-file")
    check_installed(NEEDED_FOR_GGUF if gguf_file else ())
    with _ssd_file(args.ssd_cache_path) as ssd_path:
        with _step(console, f"loading {args.model}"):
            token_ids, tokenizer = tokenize(model_path, gguf_file, text)
            if args.prompt_file is None:
                token_ids = token_ids[:PROMPT_TOKENS]
            model = load_model(model_path, args.dtype, args.device)
        task = replace(
            _plan(args, model, token_ids, pool_nbytes, ssd_path), nvcomp_library=nvcomp_library
        )
        cold, dram, stored = _first_process(task, model, console)
        device = describe_device(model.device)
        del model
        with _step(console, "a new process: loading the model again, restoring from SSD"):
            ssd = _run_second_process(task)
    return _report(args, task, (cold, dram, ssd), stored) | {
        "device": device,
        "prompt": text_name,
        "continuation": tokenizer.decode(cold.token_ids),
    }


# What is asked for ----------------------------------------------------------------------------


@contextlib.contextmanager
def _ssd_file(path: Path | None) -> Iterator[Path]:
    """Give a path for the SSD tier, and remove whatever was made there, however the demo ends."""
    if path is None:
        # /tmp may be memory; /var/tmp is to be kept over a reboot, so it is on a disk.
        durable = Path("/var/tmp")  # noqa: S108 - a private directory is made in it
        where = durable if os.access(durable, os.W_OK | os.X_OK) else None
        try:
            temporary = tempfile.TemporaryDirectory(prefix="orbitkv-demo-", dir=where)
        except OSError as error:
            raise ConfigError(f"no temporary file: {error}; accepted: --ssd-cache-path") from error
        with temporary as directory:
            yield Path(directory) / "kv"
        return
    accepted = "a path where a file can be made and nothing is yet"
    try:
        path.open("xb").close()
    except OSError as error:
        raise ConfigError(
            f"--ssd-cache-path {path}: {error.strerror}; accepted: {accepted}"
        ) from error
    try:
        yield path
    finally:
        for suffix in ("", ".index", ".lock", ".unfinished"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _plan(
    args: argparse.Namespace,
    model: Model,
    token_ids: list[int],
    pool_nbytes: int | None,
    ssd_path: Path,
) -> _Task:
    """Work out the room that the prompt's pages take, and refuse what cannot be."""
    from orbitkv.engines.transformers import PAGE_TOKENS, declare_geometry  # noqa: PLC0415

    geometry = declare_geometry(model)
    prompt = "--prompt-file" if args.prompt_file is None else f"--prompt-file {args.prompt_file}"
    positions = getattr(model.config, "max_position_embeddings", sys.maxsize)
    if len(token_ids) <= PAGE_TOKENS:
        raise ConfigError(
            f"{prompt}: {len(token_ids)} tokens; accepted: {PAGE_TOKENS + 1} or more "
            f"(a page of {PAGE_TOKENS}, and one to compute)"
        )
    if len(token_ids) + args.new_tokens > positions:
        raise ConfigError(
            f"{prompt}: {len(token_ids)} tokens and {args.new_tokens} new ones; "
            f"accepted: {positions} together"
        )
    pages = len(token_ids) // PAGE_TOKENS
    nbytes = pages * object_nbytes(geometry.segment_nbytes)
    if pool_nbytes is not None and pool_nbytes < nbytes:
        raise ConfigError(
            f"--pool-size {args.pool_size}; "
            f"accepted: {nbytes} bytes or more, for the {pages} pages of this prompt"
        )
    return _Task(
        model=str(args.model.resolve()),
        dtype=args.dtype,
        device=args.device,
        codec=args.codec,
        token_ids=token_ids,
        page_tokens=geometry.page_tokens,
        new_tokens=args.new_tokens,
        pool_nbytes=pool_nbytes or nbytes + 64 * MIB,
        ssd_nbytes=nbytes,
        ssd_path=str(ssd_path.resolve()),
        ssd_backend=args.ssd_backend,
        trace=str(args.trace.resolve()) if args.trace else None,
    )


# The runs -------------------------------------------------------------------------------------


def _first_process(
    task: _Task,
    model: Model,
    console: Console,
) -> tuple[_Run, _Run, dict[str, int]]:
    """Compute and save; restore from DRAM; leave everything on SSD.

    Returns:
        The cold run, the one from DRAM, and the bytes that each tier held.
    """
    engine = GreedyEngine(model)
    with Manager(task.config()) as manager, _kv(task, manager, model) as kv:
        with _step(console, f"computing {len(task.token_ids)} tokens, then {task.new_tokens} more"):
            _warm_up(task, engine, prefill=True)
            cache = engine.empty_cache()
            await_stream(model.device)
            started_s = time.perf_counter()
            first = engine.next_token(task.token_ids, cache)
            ttft_ms = _since_ms(started_s)
            ticket = kv.save(task.token_ids, cache)  # goes on while the engine decodes
            new = engine.decode(task.token_ids, first, task.new_tokens, cache)
            digests = digest_pages(cache, task.pages, task.page_tokens)
            cold = _Run(ttft_ms, 0.0, new, digests, 0, {})
            ticket.result()
            del cache  # the engine has nothing left of it
        stored = {"engine": task.pages * kv.geometry.page_nbytes}
        stored["dram"] = manager.statistics().pool_used_nbytes
        with _step(console, f"restoring from DRAM, then {task.new_tokens} more"):
            dram = _continue_restored(task, engine, kv)
        with _step(console, "flushing to SSD, evicting DRAM"):
            manager.flush(evict_dram=True)
        stored["ssd"] = manager.statistics().ssd_used_nbytes
    return cold, dram, stored


def _second_process(task: _Task) -> _Run:
    """Restore what another process left on SSD."""
    model_path, _ = find_model(Path(task.model))
    model = load_model(model_path, task.dtype, task.device)
    engine = GreedyEngine(model)
    with Manager(task.config()) as manager, _kv(task, manager, model) as kv:
        _warm_up(task, engine, prefill=False)
        return _continue_restored(task, engine, kv)


def _warm_up(task: _Task, engine: GreedyEngine, *, prefill: bool) -> None:
    """Do first, on other tokens, all that will be measured: what only first calls cost is no TTFT.

    It has a manager of its own, of which nothing is left.

    Args:
        prefill: Compute the other tokens. Else the first one's state stands for them all.
    """
    other = task.token_ids[::-1]
    cache = engine.empty_cache()
    engine.next_token(other if prefill else other[:1], cache)
    if not prefill:
        for layer in cache.layers:
            layer.keys, layer.values = (
                tensor.repeat(1, 1, len(other), 1) for tensor in (layer.keys, layer.values)
            )
    with Manager(task.config_without_ssd()) as manager, _kv(task, manager, engine.model) as kv:
        kv.save(other, cache).result()
        del cache
        for _ in range(WARM_UP_ROUNDS):
            _continue_restored(replace(task, token_ids=other, new_tokens=2), engine, kv)


def _kv(task: _Task, manager: Manager, model: Model) -> Saver:
    from orbitkv.engines.transformers import OrbitKVCache  # noqa: PLC0415

    return OrbitKVCache(manager, model, page_tokens=task.page_tokens)


def _continue_restored(task: _Task, engine: GreedyEngine, kv: Saver) -> _Run:
    """Continue the prompt from whatever can be restored of it."""
    await_stream(engine.model.device)
    started_s = time.perf_counter()
    restoration = kv.restore(task.token_ids)
    restore_ms = _since_ms(started_s)
    first = engine.next_token(task.token_ids, restoration.cache)
    ttft_ms = _since_ms(started_s)
    new = engine.decode(task.token_ids, first, task.new_tokens, restoration.cache)
    pages = restoration.pages_restored
    digests = digest_pages(restoration.cache, pages, task.page_tokens)
    sources = {str(tier): count for tier, count in restoration.sources.items()}
    return _Run(ttft_ms, restore_ms, new, digests, pages, sources)


def _run_second_process(task: _Task) -> _Run:
    """Have a new interpreter load the model and restore from SSD."""
    # This package, whatever the new interpreter would find under its name.
    package_root = str(Path(__file__).parents[1].resolve())
    if task.trace:
        first = Path(task.trace)
        task = replace(task, trace=str(first.with_stem(f"{first.stem}-ssd")))
    ended = subprocess.run(
        [sys.executable, "-c", _BE_THE_SECOND_PROCESS, package_root],
        input=json.dumps(asdict(task)),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        words = (ended.stderr.strip() or "it said nothing").splitlines()[-1]
        code = ended.returncode
        raise NotRestoredError(f"the new process ended with exit code {code}: {words}")
    return _Run(**json.loads(ended.stdout.splitlines()[-1]))


def answer_task() -> int:
    """Be the second process: a task on standard input, its run on standard output."""
    task = _Task(**json.loads(sys.stdin.read()))
    try:
        second = _second_process(task)
    except OrbitError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_REFUSED
    except KeyboardInterrupt:  # the first process says it
        return EXIT_INTERRUPTED
    sys.stdout.write(json.dumps(asdict(second)) + "\n")
    return 0


# What came out --------------------------------------------------------------------------------


def _since_ms(started_s: float) -> float:
    return (time.perf_counter() - started_s) * 1e3


@contextlib.contextmanager
def _step(console: Console, text: str) -> Iterator[None]:
    """Show what is under way, and how long it took once it is over."""
    started_s = time.perf_counter()
    with console.status(escape(text)):
        yield
    console.print(f"[dim]{escape(text)}: {time.perf_counter() - started_s:.1f} s[/dim]")


def _report(
    args: argparse.Namespace,
    task: _Task,
    runs: tuple[_Run, _Run, _Run],
    stored: Mapping[str, int],
) -> dict[str, Any]:
    """Compare the runs. What was restored must come from the tier that it claims to come from."""
    import torch  # noqa: PLC0415

    cold, dram, ssd = runs
    from_tier = {Tier.DRAM: dram, Tier.SSD: ssd}
    return {
        "tokens_identical": all(run.token_ids == cold.token_ids for run in from_tier.values()),
        "bytes_identical": all(
            run.page_digests == cold.page_digests[: task.restorable_pages]
            for run in from_tier.values()
        ),
        "ttft_ms": {"cold": cold.ttft_ms, "dram": dram.ttft_ms, "ssd": ssd.ttft_ms},
        "restore_ms": {"dram": dram.restore_ms, "ssd": ssd.restore_ms},
        "speedup": {tier: cold.ttft_ms / run.ttft_ms for tier, run in from_tier.items()},
        "pages_restored": min(run.sources[tier] for tier, run in from_tier.items()),
        "pages_expected": task.restorable_pages,
        "bytes": dict(stored),
        "prompt_tokens": len(task.token_ids),
        "new_tokens": task.new_tokens,
        "model": str(args.model),
        "dtype": task.dtype,
        "codec": task.codec,
        "machine": {
            "platform": platform.platform(),
            "cpus": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "python": platform.python_version(),
            "torch": torch.__version__,
        },
    }


def _print_report(report: Mapping[str, Any]) -> None:
    """Draw the report as a table, for people."""
    table = Table(
        title=f"{report['prompt_tokens']} tokens of {escape(report['prompt'])}, "
        f"{report['dtype']} on {escape(report['device'])}, codec {report['codec']}",
        caption=f"continued with: {escape(repr(report['continuation']))}",
    )
    for heading in ("", "time to first token", "of that restoring", "faster", "stored"):
        table.add_column(heading, justify="right" if heading else "left")
    ttft_ms, stored = report["ttft_ms"], report["bytes"]
    nbytes = format_nbytes(stored["engine"])
    table.add_row("computed", f"{ttft_ms['cold']:,.0f} ms", "", "", f"{nbytes} in the engine")
    for tier, name in ((Tier.DRAM, "from DRAM"), (Tier.SSD, "from SSD, in a new process")):
        table.add_row(
            name,
            f"{ttft_ms[tier]:,.0f} ms",
            f"{report['restore_ms'][tier]:,.0f} ms",
            f"{report['speedup'][tier]:.1f}x",
            format_nbytes(stored[tier]),
        )
    console = Console()
    console.print(table)
    pages, wanted = report["pages_restored"], report["pages_expected"]
    console.print(f"pages restored     {pages} of {wanted}")
    for name in ("tokens_identical", "bytes_identical"):
        verdict = "[green]yes[/green]" if report[name] else "[bold red]NO[/bold red]"
        console.print(f"{name.replace('_', ' '):<18} {verdict}")
