"""Settings: what is read is what was meant, and what cannot be meant is said in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orbitkv.config import GIB, KIB, MIB, Config, format_nbytes, parse_nbytes
from orbitkv.errors import ConfigError, OrbitError

unhurried = settings(deadline=None)  # a busy machine is no fault


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        (0, 0),
        ("0", 0),
        ("4096", 4096),
        ("4096b", 4096),
        ("4096 B", 4096),
        ("1k", KIB),
        ("1kb", KIB),
        ("1 KB", KIB),
        ("1KiB", KIB),
        ("1.5 KiB", 1536),
        ("0.5k", 512),
        ("64 MiB", 64 * MIB),
        ("64mb", 64 * MIB),
        ("64M", 64 * MIB),
        ("8gb", 8 * GIB),
        ("8 GiB", 8 * GIB),
        ("2tb", 2 * 2**40),
        ("  16   mib ", 16 * MIB),
        ("007", 7),
        ("2.0", 2),
    ],
)
def test_sizes_are_read_in_powers_of_1024(text: str | int, nbytes: int) -> None:
    assert parse_nbytes(text, setting="--pool") == nbytes


@pytest.mark.parametrize(
    "text",
    [
        *("", " ", "b", "gb", "-1", "-1gb", "+1", "1e9", "1,5gb", "1_000", "8 gigs", "8gbs"),
        *("8 g b", "8gb8", "0x10", ".5k", "5.k", "1..5k", "nan", "inf", "64 MiB\n1"),
    ],
)
def test_what_is_not_a_size_is_refused_with_setting_value_and_what_is_accepted(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_nbytes(text, setting="--pool")
    accepted = "accepted: a number of bytes, or one with a unit such as 64 MiB or 8gb"
    assert str(caught.value) == f"--pool: {text!r} is not a size; {accepted}"


@pytest.mark.parametrize("value", [True, False, None, -1, [1], {"a": 1}, b"1"])
def test_values_that_are_no_text_or_number_are_refused(value: Any) -> None:  # noqa: ANN401
    with pytest.raises(ConfigError, match="is not a size"):
        parse_nbytes(value, setting="--pool")


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'0.3k' is 307.2 bytes; accepted: a whole number"):
        parse_nbytes("0.3k", setting="--pool")


@pytest.mark.parametrize("text", ["9" * 5000, "9" * 400 + ".5"], ids=["digits", "float"])
def test_a_size_that_no_number_holds_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--pool"):
        parse_nbytes(text, setting="--pool")


@unhurried
@given(st.text(max_size=12) | st.from_regex(r"\s?\d{1,12}(\.\d{1,6})?\s?[kmgtKMGT]?i?[bB]?\s?"))
def test_any_text_is_a_size_or_refused(text: str) -> None:
    try:
        nbytes = parse_nbytes(text, setting="--pool")
    except ConfigError:
        return
    assert nbytes >= 0
    assert text.strip()[0].isdigit()


@unhurried
@given(st.integers(0, 2**60), st.sampled_from(["", "b", "B", " bytes"[:2]]))
def test_whole_bytes_are_read_exactly(nbytes: int, unit: str) -> None:
    assert parse_nbytes(nbytes, setting="x") == nbytes
    assert parse_nbytes(f"{nbytes}{unit}", setting="x") == nbytes


@unhurried
@given(st.integers(0, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB"]))
def test_what_is_shown_is_read_back_where_it_is_round(count: int, unit: str) -> None:
    nbytes = parse_nbytes(f"{count} {unit}", setting="x")
    assert parse_nbytes(format_nbytes(nbytes), setting="x") == nbytes


@unhurried
@given(st.integers(0, 2**50))
def test_what_is_shown_is_within_a_tenth_of_the_unit(nbytes: int) -> None:
    shown = format_nbytes(nbytes)
    number, _, unit = shown.partition(" ")
    unit_nbytes = 1 if unit == "bytes" else parse_nbytes(f"1 {unit}", setting="x")
    assert abs(float(number) * unit_nbytes - nbytes) <= 0.05 * unit_nbytes + 1e-6 * nbytes


# Config ------------------------------------------------------------------------------------


def test_the_defaults_keep_a_gibibyte_in_dram_and_nothing_on_ssd() -> None:
    config = Config()
    assert (config.pool_nbytes, config.ssd_cache_paths) == (GIB, ())
    assert (config.save_pipeline, config.restore_pipeline) == ("save", "restore")


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().pool_nbytes = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pool_nbytes": 0}, "pool_nbytes: 0; accepted: a positive number of bytes"),
        ({"pool_nbytes": -1}, "pool_nbytes: -1; accepted: a positive"),
        ({"pool_nbytes": 1.5}, "pool_nbytes: 1.5; accepted: a positive"),
        ({"pool_nbytes": True}, "pool_nbytes: True; accepted: a positive"),
        ({"pool_nbytes": "8gb"}, "pool_nbytes: '8gb'; accepted: a positive"),
        ({"ssd_cache_capacity_nbytes": 0}, "ssd_cache_capacity_nbytes: 0; accepted: a positive"),
        ({"storage_codec_budget_nbytes": 0}, "storage_codec_budget_nbytes: 0; accepted: a"),
        ({"ssd_backend": "aio"}, "ssd_backend: 'aio'; accepted: auto, uring, preadv"),
        ({"storage_codec": "zip"}, "storage_codec: 'zip'; accepted: none"),
        ({"nvcomp_library": ""}, "nvcomp_library: ''; accepted: a path or name, or None"),
        ({"nvcomp_library": Path("a")}, "nvcomp_library: PosixPath('a'); accepted: a path or"),
        (
            {"pool_nbytes": 4096, "query_budget_nbytes": 4097},
            "query_budget_nbytes: 4097; accepted: no more than the pool, which is 4096",
        ),
        (
            {"pool_nbytes": 4096, "query_instance_budget_nbytes": 8192},
            "query_instance_budget_nbytes: 8192; accepted: no more than the pool, which is 4096",
        ),
        ({"pool_wait_s": -0.1}, "pool_wait_s: -0.1; accepted: zero or more seconds"),
        ({"ssd_checkpoint_interval_s": 0}, "ssd_checkpoint_interval_s: 0; accepted: more than"),
        ({"ssd_checkpoint_interval_s": float("nan")}, "ssd_checkpoint_interval_s: nan; accepted"),
        ({"ssd_checkpoint_interval_s": True}, "ssd_checkpoint_interval_s: True; accepted: more"),
        (
            {"ssd_persist": True},
            "ssd_persist: True without ssd_cache_paths; accepted: with one or more",
        ),
    ],
)
def test_a_setting_that_is_not_accepted_is_said_in_one_line(
    settings: dict[str, Any], said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**settings)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, OrbitError)


@pytest.mark.parametrize("backend", ["auto", "uring", "preadv"])
def test_every_documented_value_is_accepted(backend: Any, tmp_path: Path) -> None:  # noqa: ANN401
    config = Config(
        pool_nbytes=1,
        ssd_cache_paths=tmp_path / "ssd",
        ssd_backend=backend,
        ssd_persist=True,
        pool_wait_s=0,
    )
    assert config.ssd_backend == backend


def test_a_wait_that_is_no_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="pool_wait_s"):
        Config(pool_wait_s=float("nan"))
