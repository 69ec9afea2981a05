"""What commands do alike: options, exit codes, files of a report, and how they end."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from orbitkv.engines.device import DEVICES
from orbitkv.errors import ConfigError, OrbitError

EXIT_DIFFERS, EXIT_REFUSED, EXIT_INTERRUPTED = 1, 2, 130

Report = dict[str, Any]


class NotRestoredError(Exception):
    """What was saved did not come back, so that there is nothing to report."""


def add_shared_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that such a command has last."""
    parser.add_argument(
        "--device",
        choices=DEVICES,
        default=DEVICES[0],
        help="where the model and its cache are; cuda: the first NVIDIA GPU (default: %(default)s)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object and no table")


def run_command(
    name: str,
    make_report: Callable[[], Report],
    *,
    print_report: Callable[[Report], None] | None,
    is_right: Callable[[Report], bool],
) -> int:
    """Make a report, and print it; or say in one line why there is none.

    Args:
        print_report: For people. None: the report is printed as one JSON object.
        is_right: Whether the report shows all that was promised.

    Returns:
        0 where it is right, 1 where it is not, or there is none because pages did not come back;
        2 where the command could not start; 130 where it was interrupted.
    """
    try:
        report = make_report()
    except OrbitError as error:
        sys.stderr.write(f"orbitkv {name}: {error}\n")
        return EXIT_REFUSED
    except NotRestoredError as error:
        sys.stderr.write(f"orbitkv {name}: {error}\n")
        return EXIT_DIFFERS
    except KeyboardInterrupt:
        sys.stderr.write(f"orbitkv {name}: interrupted\n")
        return EXIT_INTERRUPTED
    if print_report is None:
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_report(report)
    return 0 if is_right(report) else EXIT_DIFFERS


@contextlib.contextmanager
def files_of(out: Path) -> Iterator[Path]:
    """Give a directory whose files move to ``out`` at the end, if there is no error until then.

    Raises:
        ConfigError: ``out`` cannot be made or written in.
    """
    made, complete = not out.exists(), False
    try:
        out.mkdir(parents=True, exist_ok=True)
        staging = tempfile.TemporaryDirectory(prefix=".orbitkv-", dir=out)
    except OSError as error:
        raise unwritable(out, error) from error
    try:
        with staging as path:
            yield Path(path)
            try:
                for file in sorted(Path(path).iterdir()):
                    file.replace(out / file.name)
            except OSError as error:
                raise unwritable(out, error) from error
        complete = True
    finally:
        if made and not complete:
            with contextlib.suppress(OSError):
                out.rmdir()


def unwritable(out: Path, error: OSError) -> ConfigError:
    """Say that the files of a report cannot be written."""
    return ConfigError(f"--out {out}: {error.strerror}; accepted: a directory to write files in")
