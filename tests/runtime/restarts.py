"""A process that is killed and started again on one persistent store, run with its paths.

Each line on its input forks a manager that first restores every key, tells how many it had, and
then saves, evicts and restores until it is killed.
"""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

from orbitkv import Config, Manager
from tests.builders import BLOCK
from tests.runtime.keyed import Keyed

KEYS = 60  # 150 blocks
SSD_BLOCKS = 80


def say(*words: object) -> None:
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def live(paths: list[Path]) -> None:
    config = Config(
        pool_nbytes=20 * BLOCK,
        ssd_cache_paths=tuple(paths),
        ssd_cache_capacity_nbytes=SSD_BLOCKS * BLOCK,
        ssd_persist=True,
        ssd_checkpoint_interval_s=0.01,
        lock_memory=False,
    )
    choose = random.Random(os.getpid())
    with Manager(config) as manager:
        keyed = Keyed(manager)
        say("hits", sum(keyed.restore([key]) for key in range(KEYS)))
        while True:
            keyed.save(choose.choices(range(KEYS), k=choose.randint(1, 6)))
            if choose.random() < 0.6:
                manager.flush(evict_dram=True)
            keyed.restore(choose.choices(range(KEYS), k=choose.randint(1, 6)))


def main() -> None:
    paths = [Path(name) for name in sys.argv[1:]]
    for _ in sys.stdin:
        pid = os.fork()  # no thread has been started yet
        if not pid:
            live(paths)
        say("pid", pid)
        say("ended", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    main()
