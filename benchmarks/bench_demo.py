"""How much sooner does a prompt's first token come when its KV cache is restored?

Runs ``orbitkv demo`` several times. Each run measures the model's own prefill, the restore from
DRAM, and the restore from SSD in a new process; a speed-up is the median of the runs' ratios, so
that a drift of the machine meets both sides.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import parser, report

ROOT = Path(__file__).parents[1]
COMMAND = [sys.executable, "-c", "import sys; from orbitkv.cli import main; sys.exit(main())"]
TARGETS = {"dram": 20, "ssd": 15}
NAMES = {"cold": "computed", "dram": "from DRAM", "ssd": "from SSD, in a new process"}


def run_demo(model: Path) -> dict[str, Any]:
    """One run's report; the demo's own word for it where it failed."""
    ended = subprocess.run(
        [*COMMAND, "demo", "--model", str(model), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        sys.exit(f"orbitkv demo: exit code {ended.returncode}\n{ended.stderr}{ended.stdout}")
    result: dict[str, Any] = json.loads(ended.stdout)
    return result


def main() -> int:
    """Print medians and ratios beside the targets."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--runs", type=int, default=3)
    arguments.add_argument("--model", type=Path, default=ROOT / ".models" / "smollm2")
    args = arguments.parse_args()
    runs = [run_demo(args.model.resolve()) for _ in range(args.runs)]
    rows = []
    for source, name in NAMES.items():
        ttft_ms = [run["ttft_ms"][source] for run in runs]
        restore_ms = [run["restore_ms"].get(source, 0.0) for run in runs]
        faster = [run["ttft_ms"]["cold"] / run["ttft_ms"][source] for run in runs]
        rows.append(
            (
                name,
                statistics.median(ttft_ms),
                f"{min(ttft_ms):.0f} to {max(ttft_ms):.0f}",
                statistics.median(restore_ms),
                statistics.median(faster),
                f">= {TARGETS[source]}" if source in TARGETS else "",
            )
        )
    columns = ("prompt", "first token ms", "range ms", "of that restoring ms", "faster", "target")
    title = f"{runs[0]['prompt_tokens']} tokens, {runs[0]['dtype']}, {args.runs} runs"
    report(title, columns, rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
