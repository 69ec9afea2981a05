"""The pool: one page-aligned region, whole blocks, and a reason where it is not locked."""

from __future__ import annotations

import subprocess
import sys

from orbitkv.cache.pool import Pool
from tests.builders import BLOCK


def test_pool_is_page_aligned_zeroed_and_rounded_up_to_blocks() -> None:
    pool = Pool(BLOCK + 1, lock_memory=False)
    assert pool.capacity_nbytes == pool.memory.nbytes == 2 * BLOCK
    assert pool.memory.ctypes.data % BLOCK == 0
    assert not pool.memory.any()
    assert pool.unlocked_reason is None


def test_pool_counts_whole_blocks() -> None:
    pool = Pool(4 * BLOCK, lock_memory=False)
    offset = pool.allocate(1)
    assert offset == 0
    assert (pool.used_nbytes, pool.largest_free_nbytes) == (BLOCK, 3 * BLOCK)
    pool.free(offset, 1)
    assert (pool.used_nbytes, pool.largest_free_nbytes) == (0, 4 * BLOCK)


def test_closed_pool_leaves_a_held_view_readable() -> None:
    pool = Pool(BLOCK, lock_memory=False)
    view = pool.memory[:16]
    view[:] = 7
    pool.close()
    assert view.tolist() == [7] * 16
    assert pool.memory.nbytes == 0


def test_memory_is_locked_or_says_why_not() -> None:
    pool = Pool(BLOCK, lock_memory=True)
    assert pool.unlocked_reason is None or "mlock of 4096 bytes" in pool.unlocked_reason


def test_refused_lock_is_a_reason_with_the_bytes_and_the_limit_to_raise() -> None:
    """In a process of its own: without CAP_IPC_LOCK, and with a limit of one block."""
    script = f"""
import os, resource
from orbitkv.cache.pool import Pool
resource.setrlimit(resource.RLIMIT_MEMLOCK, ({BLOCK}, {BLOCK}))
if os.getuid() == 0:
    os.setuid(65534)
pool = Pool({16 * BLOCK}, lock_memory=True)
pool.memory[:] = 1
print(pool.unlocked_reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"mlock of {16 * BLOCK} bytes" in done.stdout
    assert "ulimit -l" in done.stdout
