"""Config: the one place where flags become values."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from orbitkv.errors import ConfigError

SsdBackend = Literal["auto", "uring", "preadv"]

KIB = 2**10
MIB = 2**20
GIB = 2**30

_UNIT_NBYTES = {"": 1, "b": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _UNIT_NBYTES |= dict.fromkeys((_letter, f"{_letter}b", f"{_letter}ib"), 2 ** (10 * _power))
_SIZE = re.compile(r"\s*(\d{1,19}(?:\.\d{1,19})?)\s*([a-zA-Z]*)\s*", re.ASCII)
_MOST_NBYTES = 2**63 - 1
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
        ssd_path: File of the SSD tier. None: no SSD tier.
        ssd_capacity_nbytes: Bytes of ``ssd_path``; preallocated where the filesystem can.
        ssd_backend: ``auto`` takes io_uring and falls back to preadv; an explicit choice never
            silently becomes another.
        ssd_persist: Leave the SSD file and its index behind at ``close``, and read them back at
            the next start. Off: the file is removed.
        storage_codec: Representation of stored segments; ``docs/codecs.md`` says what each does.
        rotation_seed: Of TurboQuant's signs, 0 to 2**64 - 1.
        storage_codec_budget_nbytes: Most workspace that one lane's batch may pin.
        save_pipeline, restore_pipeline: A packaged name, or the path of a definition.
        lock_memory: Lock the pool into RAM where the memlock limit allows.
        pool_wait_s: How long a demand read may wait for pool memory before its page is a miss.
    """

    pool_nbytes: int = GIB
    ssd_path: Path | None = None
    ssd_capacity_nbytes: int = 4 * GIB
    ssd_backend: SsdBackend = "auto"
    ssd_persist: bool = False
    storage_codec: str = "none"
    rotation_seed: int = 0
    storage_codec_budget_nbytes: int = 64 * MIB
    save_pipeline: str = "save"
    restore_pipeline: str = "restore"
    lock_memory: bool = True
    pool_wait_s: float = 5.0

    def __post_init__(self) -> None:
        for setting in ("pool_nbytes", "ssd_capacity_nbytes", "storage_codec_budget_nbytes"):
            value = getattr(self, setting)
            if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
                raise ConfigError(f"{setting}: {value!r}; accepted: a positive number of bytes")
        if self.ssd_backend not in get_args(SsdBackend):
            accepted = ", ".join(get_args(SsdBackend))
            raise ConfigError(f"ssd_backend: {self.ssd_backend!r}; accepted: {accepted}")
        if self.storage_codec not in STORAGE_CODECS:
            accepted = ", ".join(STORAGE_CODECS)
            raise ConfigError(f"storage_codec: {self.storage_codec!r}; accepted: {accepted}")
        if not self.pool_wait_s >= 0:  # also refuses NaN
            raise ConfigError(f"pool_wait_s: {self.pool_wait_s}; accepted: zero or more seconds")
        if self.ssd_persist and self.ssd_path is None:
            raise ConfigError("ssd_persist: True without an ssd_path; accepted: with one")
