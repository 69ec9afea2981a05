"""The commands ``orbitkv``, with its subcommands, and ``orbitkv-cache-manager``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from orbitkv.commands import EXIT_INTERRUPTED, EXIT_REFUSED
from orbitkv.config import Config
from orbitkv.errors import ConfigError, OrbitError
from orbitkv.graph import Chart
from orbitkv.pipeline import load_pipeline
from orbitkv.runtime.runtime import unavailable_nodes


class _Parser(argparse.ArgumentParser):
    """Says in one line what was wrong with the arguments."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_REFUSED, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code: 0, 1 where a result differs, 2 where refused."""
    parser = _Parser(prog="orbitkv", description="The KV cache, outside the GPU, as a graph.")
    parser.add_argument("--version", action="version", version=version("orbitkv"))
    commands = parser.add_subparsers(metavar="COMMAND", required=True, parser_class=_Parser)
    for name, add_arguments, run, summary in (
        ("demo", _demo_arguments, _demo, "save and restore a real model's KV cache"),
        ("draw", _draw_arguments, _draw, "draw pipelines as a Mermaid flowchart"),
        ("check", _check_arguments, _check, "check a pipeline definition"),
        ("encode", _encode_arguments, _encode, "encode a file of KV tensors"),
        ("inspect", _inspect_arguments, _inspect, "say what an encoded file holds"),
        ("decode", _decode_arguments, _decode, "decode a file of KV tensors"),
        ("doctor", _doctor_arguments, _doctor, "say what this machine can do"),
        ("qualify", _qualify_arguments, _qualify, "measure what each codec does to a real model"),
        (
            "simulate",
            _simulate_arguments,
            _simulate,
            "run the cache's policies over a trace of requests",
        ),
        ("trace", _trace_arguments, _trace, "record a daemon, and look at what was recorded"),
        ("status", _status_arguments, _status, "say what the daemon holds and does"),
        ("top", _top_arguments, _top, "watch the daemon"),
    ):
        command = commands.add_parser(
            name, help=summary, description=summary[0].upper() + summary[1:] + "."
        )
        add_arguments(command)
        command.set_defaults(run=run)
    args = parser.parse_args(argv)
    sys.path.insert(0, "")  # a definition's own stages are found from here, as with python -m
    run_command: Callable[[argparse.Namespace], int] = args.run
    try:
        return run_command(args)
    except OrbitError as error:
        print(f"orbitkv: {error}", file=sys.stderr)
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # whoever read our output has gone; there is nobody left to tell
        return EXIT_REFUSED
    except OSError as error:
        print(f"orbitkv: {error}", file=sys.stderr)
        return EXIT_REFUSED


def _demo_arguments(parser: argparse.ArgumentParser) -> None:
    from orbitkv import demo

    demo.add_arguments(parser)


def _demo(args: argparse.Namespace) -> int:
    from orbitkv import demo

    return demo.run(args, nvcomp_library=_nvcomp_library())


def _draw_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "pipelines",
        nargs="*",
        default=["save", "restore"],
        metavar="NAME|FILE",
        help="packaged names or files, drawn together in this order (default: save restore)",
    )
    parser.add_argument(
        "--live", action="store_true", help="dash what is switched off on this machine"
    )
    parser.add_argument(
        "--ssd-cache-path", type=Path, metavar="P", help="with --live: as if the SSD tier were at P"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="T.okvtrace",
        help="draw the pipelines of a trace as an SVG: bytes, GB/s and wait on every arrow",
    )


def _draw(args: argparse.Namespace) -> int:
    if args.trace:
        return _draw_trace(args)
    if args.ssd_cache_path and not args.live:
        raise ConfigError("--ssd-cache-path: accepted with --live only")
    graphs = [load_pipeline(source).graph for source in args.pipelines]
    chart = Chart({}, ())
    for graph in graphs:
        chart |= graph.chart
    if not args.live:
        print(chart.to_mermaid())
        return 0
    dashed: set[tuple[str, str]] = set()
    notes = []
    for graph in graphs:
        off = unavailable_nodes(graph, Config(ssd_cache_paths=args.ssd_cache_path or ()))
        dashed |= {(e.src, e.dst) for e in graph.edges if e.src in off or e.dst in off}
        notes += [f"%% {graph.name}: {node_id} is off: {why}" for node_id, why in off.items()]
    print("\n".join([chart.to_mermaid(dashed=frozenset(dashed)), *notes]))
    return 0


def _draw_trace(args: argparse.Namespace) -> int:
    from orbitkv import trace_svg, tracing

    if args.live or args.ssd_cache_path or args.pipelines != ["save", "restore"]:
        raise ConfigError("--trace: accepted alone, as a trace has its own pipelines")
    sys.stdout.write(trace_svg.draw_svg(tracing.read(args.trace)))
    return 0


def _check_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="a definition, or a packaged name")


def _check(args: argparse.Namespace) -> int:
    pipeline = load_pipeline(args.file)
    graph = pipeline.graph
    print(
        f"{graph.name}: {len(graph.nodes)} nodes, {len(graph.edges)} edges, "
        f"sha256 {pipeline.sha256[:16]}"
    )
    return 0


def _encode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source",
        type=Path,
        metavar="IN.safetensors",
        help="tensors layers.<i>.k, layers.<i>.v of [heads, tokens, head_dim], or layers.<i>.kv "
        "of [heads, tokens, 2 * head_dim]",
    )
    parser.add_argument("-o", dest="target", type=Path, metavar="OUT.okv", required=True)
    parser.add_argument(
        "--codec", metavar="NAME", required=True, help="none, fp8, turboquant-4 or turboquant-3"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="N",
        help="of TurboQuant's rotation, 0 to 2^64 - 1 (default: 0)",
    )


def _encode(args: argparse.Namespace) -> int:
    from orbitkv import okv

    encoded = okv.encode_file(
        args.source,
        args.target,
        codec=args.codec,
        rotation_seed=args.seed,
        tool=f"orbitkv {version('orbitkv')}",
        on_compile=_say,
    )
    print(f"{args.target}: {okv.summary(encoded)}")
    return 0


def _inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="FILE.okv")
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every CRC and all padding, and decode every encoded segment",
    )


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from orbitkv import okv

    found = okv.inspect_file(args.source, verify=args.verify, on_compile=_say)
    if args.json:
        print(okv.to_json(found, verified=args.verify))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 160  # nobody reads a pipe in 80 columns
        okv.render(found, console, verified=args.verify)
    return 0


def _decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", type=Path, metavar="IN.okv")
    parser.add_argument("-o", dest="target", type=Path, metavar="OUT.safetensors", required=True)


def _decode(args: argparse.Namespace) -> int:
    from orbitkv import okv

    decoded = okv.decode_file(args.source, args.target, on_compile=_say)
    print(f"{args.target}: {okv.summary(decoded)}")
    return 0


def _say(message: str) -> None:
    print(f"orbitkv: {message}", file=sys.stderr)


def _nvcomp_library() -> str | None:
    """``Config.nvcomp_library`` as the environment has it; only commands look there."""
    import os

    return os.environ.get("ORBITKV_NVCOMP_LIBRARY") or None


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    parser.add_argument(
        "--ssd-cache-path",
        type=Path,
        metavar="P",
        help="where the SSD tier would be (default: here, and no SSD tier)",
    )


def _doctor(args: argparse.Namespace) -> int:
    from rich.console import Console

    from orbitkv import doctor

    findings = doctor.examine(args.ssd_cache_path or Path.cwd(), nvcomp_library=_nvcomp_library())
    config = Config(ssd_cache_paths=args.ssd_cache_path or ())
    nodes = {
        f"{name}.{node_id}": reason
        for name in ("save", "restore")
        for node_id, reason in unavailable_nodes(load_pipeline(name).graph, config).items()
    }
    if args.json:
        print(doctor.to_json(findings, nodes))
    else:
        doctor.render(findings, Console(), nodes)
    return 0


def _qualify_arguments(parser: argparse.ArgumentParser) -> None:
    from orbitkv import qualify

    qualify.add_arguments(parser)


def _qualify(args: argparse.Namespace) -> int:
    from orbitkv import qualify

    return qualify.run(args, nvcomp_library=_nvcomp_library())


def _simulate_arguments(parser: argparse.ArgumentParser) -> None:
    from orbitkv import simulation

    simulation.add_arguments(parser)


def _simulate(args: argparse.Namespace) -> int:
    from orbitkv import simulation

    return simulation.run(args)


def _trace_arguments(parser: argparse.ArgumentParser) -> None:
    from orbitkv import tracing

    tracing.add_arguments(parser)


def _trace(args: argparse.Namespace) -> int:
    from orbitkv import tracing

    return tracing.run(args)


def _status_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object on standard output")
    _socket_argument(parser)


def _status(args: argparse.Namespace) -> int:
    from rich.console import Console

    from orbitkv import top
    from orbitkv.runtime.client import Client

    with Client(args.socket) as client:
        status = client.status()
    if args.json:
        print(top.to_json(status))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = 160  # as above
        console.print(top.render(status, None))
    return 0


def _top_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--interval-s", type=float, default=1.0, metavar="S", help="between two looks (default: 1)"
    )
    _socket_argument(parser)


def _top(args: argparse.Namespace) -> int:
    from rich.console import Console

    from orbitkv import top
    from orbitkv.runtime.client import Client

    if not args.interval_s > 0:
        raise ConfigError(f"--interval-s: {args.interval_s}; accepted: more than zero seconds")
    with Client(args.socket) as client:
        top.watch(client, Console(), args.interval_s)
    return 0


def _socket_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--socket", type=Path, metavar="PATH", help="of the daemon (default: as the daemon's own)"
    )


def cache_manager() -> int:
    """Run ``orbitkv-cache-manager``."""
    import os

    from orbitkv.runtime import daemon

    sys.path.insert(0, "")  # as above
    return daemon.main(
        notify_socket=os.environ.get("NOTIFY_SOCKET"), nvcomp_library=_nvcomp_library()
    )


if __name__ == "__main__":
    sys.exit(main())
