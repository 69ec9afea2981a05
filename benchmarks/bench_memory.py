"""How much memory does an embedded manager add to an engine's process, beside its pool?

Each figure is the resident memory of a new process that has imported torch, as an engine has.
"""

from __future__ import annotations

import subprocess
import sys

from measure import parser, report

TARGET_MIB = 150
POOL_MIB = 256

PROBE = f"""
import os
import torch

def resident_mib():
    pages = int(open("/proc/self/statm").read().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20

torch.zeros(1)
before = resident_mib()
import pathlib, tempfile
from orbitkv import Config, Geometry, Manager, ModelIdentity, Role, Slot
slots = tuple(
    Slot(name=f"{{i}}", layer=i, role=Role.KV, dtype="bfloat16", heads=8, head_dim=128)
    for i in range(36)
)
geometry = Geometry(16, slots)
tensors = {{s.name: torch.ones(64, 8, 16, 256, dtype=torch.bfloat16) for s in slots}}
registered = sum(t.numel() * t.element_size() for t in tensors.values()) / 2**20
imported = resident_mib() - registered
with tempfile.TemporaryDirectory() as folder:
    config = Config(
        pool_nbytes={POOL_MIB} * 2**20,
        ssd_cache_paths=pathlib.Path(folder) / "kv",
        ssd_cache_capacity_nbytes=512 * 2**20,
    )
    with Manager(config) as manager:
        instance = manager.register(geometry, tensors, model=ModelIdentity("bench"))
        hashes = instance.hash_pages(range(64 * 16))
        manager.publish(instance, list(zip(hashes, range(64)))).result()
        manager.flush(evict_dram=True)
        lease = manager.query(instance, hashes)
        manager.restore(lease, {{h: i for i, h in enumerate(hashes)}}).result()
        at_work = resident_mib() - registered - {POOL_MIB}
print(before, imported, at_work)
"""


def main() -> int:
    """Run the probe three times and print the median of what was added."""
    args = parser(__doc__ or "").parse_args()
    runs = sorted(
        [float(word) for word in subprocess.check_output([sys.executable, "-c", PROBE]).split()]
        for _ in range(3)
    )
    before, imported, at_work = runs[1]
    rows = [
        ("process with torch imported", before, ""),
        ("added by importing orbitkv", imported - before, ""),
        ("added by a manager at work, SSD included", at_work - before, f"< {TARGET_MIB}"),
    ]
    report("Resident memory beside the pool", ("what", "MiB", "target"), rows, as_json=args.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
