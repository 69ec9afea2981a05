"""Config: the one place where flags become values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast, get_args

from orbitkv.errors import ConfigError

SsdBackend = Literal["auto", "uring", "preadv", "cufile"]
SsdReadPath = Literal["uring", "cufile"]
WritePolicy = Literal["all", "reuse"]

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNIT_NBYTES = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNIT_NBYTES |= dict.fromkeys((_letter, f"{_letter}b", f"{_letter}ib"), 2 ** (10 * _power))
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([a-zA-Z]*)\s*", re.ASCII)
_MOST_NBYTES = 2**63 - 1
_MOST_QUEUED = 2**16
_MOST_IN_FLIGHT = 2**15  # as an io_uring takes
_DAY_S = 86_400
_ALL_PERCENT = 100
STORAGE_CODECS = ("none", "fp8", "turboquant-4", "turboquant-3", "ans")


def parse_nbytes(text: str | int, *, setting: str) -> int:
    """Turn a size such as ``8gb``, ``64 MiB`` or ``4096`` into bytes.

    Units are powers of 1,024 with or without the ``i``: a pool of ``4gb`` is 4 GiB.

    Raises:
        ConfigError: naming ``setting``, what was seen, and what is accepted.
    """
    match = _SIZE.fullmatch(str(text))
    factor = _UNIT_NBYTES.get(match[2].lower()) if match else None
    if isinstance(text, bool) or match is None or factor is None:
        wanted = "a number of bytes, or one with a unit such as 64 MiB or 8gb"
        raise ConfigError(f"{setting}: {text!r} is not a size; accepted: {wanted}")
    nbytes = float(match[1]) * factor if "." in match[1] else int(match[1]) * factor
    if nbytes != int(nbytes) or nbytes > _MOST_NBYTES:
        accepted = f"a whole number up to {_MOST_NBYTES}"
        raise ConfigError(f"{setting}: {text!r} is {nbytes} bytes; accepted: {accepted}")
    return int(nbytes)


def format_nbytes(nbytes: int) -> str:
    """Render bytes for people, to a tenth of the unit."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < KIB:
            break
        value, unit = value / KIB, larger
    return f"{value:.1f} {unit}".replace(".0 ", " ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one manager. All sizes are bytes.

    Attributes:
        pool_nbytes: DRAM for encoded objects. Rounded up to whole 4 KiB blocks.
        ssd_cache_paths: Files of the SSD tier, one a shard. One, or several; none: no SSD tier.
        ssd_cache_capacity_nbytes: Bytes of all of them together, in equal parts; preallocated
            where the filesystem can.
        ssd_backend: What writes and reads them. ``auto`` takes cuFile where it is native, else
            io_uring, else preadv; an explicit choice never silently becomes another.
        ssd_read_path: What reads objects for pages on a GPU. None: as ``ssd_backend``.
        ssd_write_queue_depth: Most batches that wait to be written; more are dropped, and counted.
            None: as the definition says.
        ssd_write_inflight: Most objects that U writes at once. None: as the definition says.
        ssd_prefetch_inflight: Most objects that U reads at once. None: as the definition says.
        ssd_persist: Keep an index of each SSD file, leave both behind at ``close``, and read them
            back at the next start, whether the manager closed or was killed. Off: the files are
            removed.
        ssd_checkpoint_interval_s: How long what was written to SSD may be missing from the index.
        ssd_write_policy: ``all`` writes what is newly saved; ``reuse`` what a foreground query
            returns, and what is saved again while its key is among the last 16,384 that were.
        cache_protected_percent: Share of the pool, 0 to 100, in which pages that a foreground query
            found go last. A preference, not a reservation.
        enable_lfu_admission: While the pool is full, save only what was asked for as often as what
            would have to go for it.
        compile_policies: Run the policies' loops compiled: 10 to 100 times as fast, for 0.4 s at
            start and 120 MiB. None: where there is an NVIDIA driver.
        query_budget_nbytes: Stored bytes that the leases of all instances may hold at once, from
            the query until the last page is placed; no more than the pool. None: any number.
        query_instance_budget_nbytes: The same for one instance. None: ``query_budget_nbytes``.
        lease_ttl_s: How long a lease that nobody restores is kept.
        storage_codec: Representation of stored segments; ``docs/codecs.md`` says what each does.
        rotation_seed: Of TurboQuant's signs, 0 to 2**64 - 1.
        nvcomp_library: Of ``ans``: path of nvCOMP's library, or a name for the loader, which never
            silently becomes another. None: the pip package's, then the loader's. The commands take
            it from ``ORBITKV_NVCOMP_LIBRARY``; nothing else in OrbitKV reads the environment.
        storage_codec_budget_nbytes: Most workspace that one lane's batch may pin.
        save_pipeline, restore_pipeline: A packaged name, or the path of a definition.
        lock_memory: Lock the pool into RAM where the memlock limit allows.
        pool_wait_s: How long a demand read may wait for pool memory before its page is a miss.
        trace: File to record from start to close what nodes and queues do; ``docs/tracing.md``.
            One that is there is replaced. None: nothing is recorded.
    """

    pool_nbytes: int = GIB
    ssd_cache_paths: tuple[Path, ...] = ()
    ssd_cache_capacity_nbytes: int = 4 * GIB
    ssd_backend: SsdBackend = "auto"
    ssd_read_path: SsdReadPath | None = None
    ssd_write_queue_depth: int | None = None
    ssd_write_inflight: int | None = None
    ssd_prefetch_inflight: int | None = None
    ssd_persist: bool = False
    ssd_checkpoint_interval_s: float = 5.0
    ssd_write_policy: WritePolicy = "all"
    cache_protected_percent: int = 0
    enable_lfu_admission: bool = False
    compile_policies: bool | None = None
    query_budget_nbytes: int | None = None
    query_instance_budget_nbytes: int | None = None
    lease_ttl_s: float = 60.0
    storage_codec: str = "none"
    rotation_seed: int = 0
    nvcomp_library: str | None = None
    storage_codec_budget_nbytes: int = 64 * MIB
    save_pipeline: str | Path = "save"
    restore_pipeline: str | Path = "restore"
    lock_memory: bool = True
    pool_wait_s: float = 5.0
    trace: Path | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "ssd_cache_paths", _as_paths(self.ssd_cache_paths))
        object.__setattr__(self, "trace", _as_path(self.trace))
        backends = get_args(SsdBackend)
        policies = get_args(WritePolicy)
        read_paths = (None, *get_args(SsdReadPath))
        some, bound = "a positive number of bytes", "None, or 1 to 32768"
        for setting, stands, accepted in (
            ("pool_nbytes", _is_count(self.pool_nbytes), some),
            (
                "ssd_cache_paths",
                all(map(_is_file_name, self.ssd_cache_paths))
                and len(set(self.ssd_cache_paths)) == len(self.ssd_cache_paths),
                "paths of files, each another",
            ),
            ("ssd_cache_capacity_nbytes", _is_count(self.ssd_cache_capacity_nbytes), some),
            ("ssd_backend", self.ssd_backend in backends, ", ".join(backends)),
            (
                "ssd_read_path",
                self.ssd_read_path in read_paths,
                f"None, {', '.join(read_paths[1:])}",
            ),
            (
                "ssd_write_queue_depth",
                _is_bound(self.ssd_write_queue_depth, _MOST_QUEUED),
                "None, or 1 to 65536",
            ),
            ("ssd_write_inflight", _is_bound(self.ssd_write_inflight, _MOST_IN_FLIGHT), bound),
            (
                "ssd_prefetch_inflight",
                _is_bound(self.ssd_prefetch_inflight, _MOST_IN_FLIGHT),
                bound,
            ),
            ("ssd_persist", isinstance(self.ssd_persist, bool), "True or False"),
            (
                "ssd_checkpoint_interval_s",
                _is_interval(self.ssd_checkpoint_interval_s),
                "more than zero seconds, up to a day",
            ),
            ("ssd_write_policy", self.ssd_write_policy in policies, ", ".join(policies)),
            ("cache_protected_percent", _is_percent(self.cache_protected_percent), "0 to 100"),
            ("enable_lfu_admission", isinstance(self.enable_lfu_admission, bool), "True or False"),
            (
                "compile_policies",
                self.compile_policies is None or isinstance(self.compile_policies, bool),
                "True, False or None",
            ),
            ("query_budget_nbytes", _is_limit(self.query_budget_nbytes), f"{some}, or None"),
            (
                "query_instance_budget_nbytes",
                _is_limit(self.query_instance_budget_nbytes),
                f"{some}, or None",
            ),
            ("lease_ttl_s", _is_interval(self.lease_ttl_s), "more than zero seconds, up to a day"),
            ("storage_codec", self.storage_codec in STORAGE_CODECS, ", ".join(STORAGE_CODECS)),
            ("rotation_seed", _is_seed(self.rotation_seed), "0 to 2**64 - 1"),
            ("nvcomp_library", _is_library(self.nvcomp_library), "a path or name, or None"),
            (
                "storage_codec_budget_nbytes",
                _is_count(self.storage_codec_budget_nbytes),
                some,
            ),
            ("save_pipeline", isinstance(self.save_pipeline, str | Path), "a name or a path"),
            ("restore_pipeline", isinstance(self.restore_pipeline, str | Path), "a name or a path"),
            ("lock_memory", isinstance(self.lock_memory, bool), "True or False"),
            ("pool_wait_s", _is_wait(self.pool_wait_s), "zero or more seconds"),
            ("trace", self.trace is None or _is_file_name(self.trace), "the path of a file"),
        ):
            if not stands:
                raise ConfigError(f"{setting}: {getattr(self, setting)!r}; accepted: {accepted}")
        for setting in ("query_budget_nbytes", "query_instance_budget_nbytes"):
            budget_nbytes = getattr(self, setting)
            if budget_nbytes is not None and budget_nbytes > self.pool_nbytes:
                accepted = f"no more than the pool, which is {self.pool_nbytes}"
                raise ConfigError(f"{setting}: {budget_nbytes}; accepted: {accepted}")
        whole_nbytes, each_nbytes = self.query_budget_nbytes, self.query_instance_budget_nbytes
        if whole_nbytes is not None and each_nbytes is not None and each_nbytes > whole_nbytes:
            accepted = f"no more than that of all instances, which is {whole_nbytes}"
            raise ConfigError(f"query_instance_budget_nbytes: {each_nbytes}; accepted: {accepted}")
        for setting, asks in (
            ("ssd_persist", self.ssd_persist),
            ("ssd_read_path", self.ssd_read_path is not None),
            ("ssd_backend", self.ssd_backend == "cufile"),
        ):
            if asks and not self.ssd_cache_paths:
                seen = f"{getattr(self, setting)!r} without ssd_cache_paths"
                raise ConfigError(f"{setting}: {seen}; accepted: with one or more")


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_bound(value: object, most: int) -> bool:
    return value is None or (_is_count(value) and cast("int", value) <= most)


def _is_limit(value: object) -> bool:
    return value is None or _is_count(value)


def _is_percent(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _ALL_PERCENT


def _as_path(value: object) -> object:
    return Path(value) if isinstance(value, str) else value


def _as_paths(value: object) -> tuple[Any, ...]:
    """One path or several, as they may be given; anything else is left to be refused."""
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else (value,)
    return tuple(Path(path) if isinstance(path, str) else path for path in several)


def _is_seed(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**64


def _is_wait(value: object) -> bool:
    return isinstance(value, int | float) and value >= 0  # which NaN is not


def _is_interval(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= _DAY_S


def _is_library(value: object) -> bool:
    return value is None or (isinstance(value, str) and bool(value) and "\0" not in value)


def _is_file_name(value: object) -> bool:
    return isinstance(value, Path) and bool(value.name) and "\0" not in str(value)
