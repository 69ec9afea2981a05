"""Simulation: the same as the policies' own objects, and as plain lists, call by call."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orbitkv import Manager
from orbitkv.cache import admission
from orbitkv.cache.admission import TinyLfu
from orbitkv.cache.catalogue import Tier
from orbitkv.cache.order import MAX_NBYTES
from orbitkv.errors import ConfigError
from orbitkv.runtime.simulate import STORED_SHARE, Simulated, Simulation, cut, simulate
from orbitkv.runtime.traces import RequestTrace, read_trace
from orbitkv.stages.ticket import Restored
from tests.builders import BLOCK, REST_S, Engine, counters, page_hash, rest
from tests.conftest import ManagerFactory
from tests.runtime.one_by_one import HISTORY, WIDTH, OneByOne, by_lists, by_objects
from tests.runtime.traffic import TRACES, conversations, trace_of, written

ROOT = Path(__file__).parents[2]


def requests_of(trace: RequestTrace) -> Iterator[tuple[list[int], int]]:
    for start, end, tokens in zip(
        trace.starts[:-1], trace.starts[1:], trace.input_tokens, strict=True
    ):
        yield trace.blocks[start:end].tolist(), int(tokens)


def assert_same(found: Simulated, plain: OneByOne) -> None:
    wanted = plain.figures()
    assert {name: getattr(found, name) for name in wanted} == wanted
    assert found.ssd_read_blocks == found.ssd_hit_blocks


# Any blocks at all, or prompts that share what comes first, as real ones do.
ANY_PROMPTS = st.lists(st.lists(st.integers(0, 11), max_size=8, unique=True), min_size=1)
SHARED_PROMPTS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 9)).map(
        lambda each: [each[0] * 10 + at if at > 2 else at for at in range(each[1])]
    ),
    min_size=1,
    max_size=30,
)


@st.composite
def simulations(draw: st.DrawFn, **given: object) -> Simulation:
    """Settings of every kind, with tiers of a few pages, and bytes left over."""
    blocks = draw(st.integers(1, 3))
    nbytes = blocks * BLOCK
    ssd_pages = draw(st.integers(0, 6))
    chosen: dict[str, object] = {
        "pool_nbytes": draw(st.integers(1, 8)) * nbytes + draw(st.integers(0, nbytes - BLOCK)),
        "ssd_cache_capacity_nbytes": (
            ssd_pages * nbytes + draw(st.integers(0, nbytes - BLOCK)) if ssd_pages else 0
        ),
        "cache_protected_percent": draw(st.sampled_from([0, 30, 50, 80, 100])),
        "enable_lfu_admission": draw(st.booleans()),
        "ssd_write_policy": draw(st.sampled_from(["all", "reuse"])),
        "gpu_pages": draw(st.integers(0, 5)),
        "recency": draw(st.sampled_from(["head-first", "tail-first"])),
        "bytes_per_token": 8 * blocks,
    }
    return Simulation(**(chosen | given))  # type: ignore[arg-type]


@pytest.fixture
def _small_policies(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short history and a narrow sketch. All examples of a test may share them."""
    monkeypatch.setattr(admission, "HISTORY_KEYS", HISTORY)
    monkeypatch.setattr(admission, "_MIN_WIDTH", WIDTH)


def examples(count: int) -> settings:
    shared = [HealthCheck.function_scoped_fixture]
    return settings(max_examples=count, deadline=None, suppress_health_check=shared)


@pytest.mark.usefixtures("_small_policies")
@pytest.mark.parametrize("compiled", [False, True], ids=["interpreted", "compiled"])
@pytest.mark.parametrize("prompts", [ANY_PROMPTS, SHARED_PROMPTS], ids=["any", "shared"])
@examples(250)
@given(data=st.data(), made=simulations())
def test_any_trace_gives_what_plain_lists_give(
    prompts: st.SearchStrategy[list[list[int]]],
    data: st.DataObject,
    made: Simulation,
    *,
    compiled: bool,
) -> None:
    drawn = data.draw(prompts)
    unfilled = data.draw(st.integers(0, 511))  # of each prompt's last block
    trace = trace_of(drawn, [max(len(each) * 512 - unfilled, 0) for each in drawn])
    plain = by_lists(made)
    for pages, tokens in requests_of(trace):
        plain.request(pages, tokens)
    assert_same(simulate(cut(trace, 512, compiled=compiled), made, compiled=compiled), plain)


@pytest.mark.usefixtures("_small_policies")
@examples(150)
@given(prompts=SHARED_PROMPTS, made=simulations())
def test_walk_gives_what_the_managers_objects_give_call_by_call(
    prompts: list[list[int]], made: Simulation
) -> None:
    trace = trace_of(prompts)
    with tempfile.TemporaryDirectory() as folder:
        for objects in by_objects(made, Path(folder)):
            for pages, tokens in requests_of(trace):
                objects.request(pages, tokens)
            assert_same(simulate(cut(trace, 512), made), objects)


@pytest.mark.usefixtures("_small_policies")
@pytest.mark.parametrize("lfu", [False, True], ids=["all are admitted", "lfu"])
@pytest.mark.parametrize("policy", ["all", "reuse"])
@pytest.mark.parametrize("percent", [0, 80])
@pytest.mark.parametrize("recency", ["head-first", "tail-first"])
def test_long_trace_gives_what_the_managers_objects_give(
    tmp_path: Path, recency: str, percent: int, policy: str, *, lfu: bool
) -> None:
    path = written(tmp_path / "trace.jsonl", conversations(requests=150))
    trace = read_trace(path)
    made = Simulation(
        pool_nbytes=60 * BLOCK,
        ssd_cache_capacity_nbytes=150 * BLOCK,
        cache_protected_percent=percent,
        enable_lfu_admission=lfu,
        ssd_write_policy=policy,  # type: ignore[arg-type]
        gpu_pages=30,
        bytes_per_token=8,
        recency=recency,  # type: ignore[arg-type]
    )
    for objects in by_objects(made, tmp_path):
        objects.lfu = TinyLfu(60, compiled=False)
        for pages, tokens in requests_of(trace):
            objects.request(pages, tokens)
        found = simulate(cut(trace, 512), made)
        assert_same(found, objects)
        assert min(found.gpu_hit_blocks, found.dram_hit_blocks, found.ssd_write_blocks) > 0


@pytest.mark.parametrize("policy", ["all", "reuse"])
@pytest.mark.parametrize("percent", [0, 80])
def test_manager_itself_finds_and_writes_what_was_simulated(
    open_manager: ManagerFactory, ssd_path: Path, policy: str, percent: int
) -> None:
    requests = conversations(requests=80)
    trace = trace_of([each["hash_ids"] for each in requests])
    pages = cut(trace, 512)
    made = Simulation(
        pool_nbytes=90 * BLOCK,
        ssd_cache_capacity_nbytes=120 * BLOCK,
        cache_protected_percent=percent,
        ssd_write_policy=policy,  # type: ignore[arg-type]
        bytes_per_token=8,
        recency="tail-first",
    )
    manager = open_manager(
        pool_nbytes=made.pool_nbytes,
        ssd_cache_paths=ssd_path,
        ssd_cache_capacity_nbytes=made.ssd_cache_capacity_nbytes,
        cache_protected_percent=percent,
        ssd_write_policy=policy,
    )
    engine = Engine.register(manager, pages=pages.longest)
    hits = dict.fromkeys(Tier, 0)
    for blocks, _ in requests_of(trace):
        hashes = [page_hash(block) for block in blocks]
        lease = manager.query(engine.instance, hashes)
        found = len(lease.hashes)
        for tier, count in lease.tiers().items():
            hits[tier] += count
        if found:
            indices = {each: index for index, each in enumerate(lease.hashes)}
            assert isinstance(manager.restore(lease, indices).result(), Restored)
        else:
            lease.release()
        at_rest(manager)
        engine.save({each: index for index, each in enumerate(hashes) if index >= found})
        at_rest(manager)
    simulated = simulate(pages, made)
    assert hits == {Tier.DRAM: simulated.dram_hit_blocks, Tier.SSD: simulated.ssd_hit_blocks}
    told = counters(manager)
    assert told["ssd_writes"] == simulated.ssd_write_blocks > 0
    assert told["evicted_ssd"] == simulated.ssd_overwritten_blocks
    assert told["ssd_read_nbytes"] == simulated.ssd_read_bytes > 0
    assert told["promotions"] == simulated.promotions
    assert told["demotions"] == simulated.demotions
    assert told["evicted_probationary"] == simulated.evicted_probationary


def at_rest(manager: Manager) -> None:
    """Wait until no write is queued: in a simulation every transfer ends at once."""
    deadline = time.monotonic() + REST_S
    while manager.core.catalogue.queued_writes():
        assert time.monotonic() < deadline, "writes did not come to an end"
        time.sleep(0.001)
    assert rest(manager) == []


# What theory gives ------------------------------------------------------------------------------


@given(prompts=st.one_of(ANY_PROMPTS, SHARED_PROMPTS))
def test_more_dram_never_gives_a_plain_lru_fewer_hits(prompts: list[list[int]]) -> None:
    pages = cut(trace_of(prompts), 512)
    rates = [
        simulate(pages, Simulation(pool_nbytes=most * BLOCK, bytes_per_token=8)).prefix_hit_rate
        for most in range(1, 14)
    ]
    assert rates == sorted(rates)
    assert rates[-1] <= pages.unlimited_hits / max(len(pages.pages), 1)


@given(prompts=st.one_of(ANY_PROMPTS, SHARED_PROMPTS), made=simulations())
def test_nothing_finds_more_than_an_unlimited_cache(
    prompts: list[list[int]], made: Simulation
) -> None:
    found = simulate(cut(trace_of(prompts), 512), made)
    assert found.prefix_hit_rate <= found.unlimited_prefix_hit_rate


@given(
    prompts=st.one_of(ANY_PROMPTS, SHARED_PROMPTS),
    made=simulations(
        pool_nbytes=10**6, ssd_cache_capacity_nbytes=10**6, enable_lfu_admission=False
    ),
)
def test_cache_that_holds_everything_finds_what_an_unlimited_one_does(
    prompts: list[list[int]], made: Simulation
) -> None:
    found = simulate(cut(trace_of(prompts), 512), made)
    assert found.prefix_hit_rate == found.unlimited_prefix_hit_rate
    assert found.evicted_probationary == found.evicted_protected == 0
    if made.ssd_write_policy == "all" and made.gpu_pages == 0:
        assert found.ssd_write_blocks == found.unique_blocks
        assert found.write_amplification == float(found.unique_blocks > 0)


@given(prompts=SHARED_PROMPTS, made=simulations())
def test_reuse_never_writes_what_was_neither_found_nor_saved_again(
    prompts: list[list[int]], made: Simulation
) -> None:
    once = [[number * 100 + at for at in range(len(each))] for number, each in enumerate(prompts)]
    found = simulate(cut(trace_of(once), 512), made)
    if made.ssd_write_policy == "reuse":
        assert found.ssd_write_blocks == 0
        assert found.skipped_cold == (found.saved_blocks if made.ssd_pages else 0)


@given(prompts=SHARED_PROMPTS, pool_pages=st.integers(1, 8), codec=st.sampled_from(["fp8"]))
def test_codec_changes_bytes_and_nothing_else_where_as_many_pages_fit(
    prompts: list[list[int]], pool_pages: int, codec: str
) -> None:
    pages = cut(trace_of(prompts), 512)
    sizes = {"pool_nbytes": pool_pages * 2 * BLOCK, "ssd_cache_capacity_nbytes": 8 * BLOCK}
    raw = simulate(pages, Simulation(**sizes, bytes_per_token=16))  # type: ignore[arg-type]
    sizes = {name: nbytes // 2 for name, nbytes in sizes.items()}
    encoded = simulate(
        pages,
        Simulation(**sizes, bytes_per_token=16, storage_codec=codec),  # type: ignore[arg-type]
    )
    assert encoded.prefix_hit_rate == raw.prefix_hit_rate
    assert encoded.ssd_write_raw_bytes == raw.ssd_write_bytes == 2 * encoded.ssd_write_bytes
    assert encoded.ssd_read_raw_bytes == raw.ssd_read_bytes == 2 * encoded.ssd_read_bytes


def test_codecs_store_the_shares_that_they_document() -> None:
    assert STORED_SHARE["none"] == 1
    assert STORED_SHARE["fp8"] == 0.5
    # 32 of 36 layers, K and V of 66 and 68 bytes in the place of 256 each.
    assert STORED_SHARE["turboquant-4"] == pytest.approx((32 * 134 / 512 + 4) / 36)
    assert STORED_SHARE["turboquant-3"] == pytest.approx((32 * 102 / 512 + 4) / 36)
    assert 1 / STORED_SHARE["ans"] == pytest.approx(1.48)


# Known figures ----------------------------------------------------------------------------------

FIGURES = (
    *("dram_hit_blocks", "ssd_hit_blocks", "recomputed_tokens", "ssd_write_blocks"),
    *("ssd_overwritten_blocks", "evicted_probationary", "evicted_protected", "lfu_rejected"),
)
BLOCKS = (7437, 1189)
GOLDEN = {
    # (protected, lfu, policy, recency): FIGURES
    (0, False, "all", "head-first"): (3421, 1180, 1351382, 2134, 1984, 3254, 0, 0),
    (0, False, "all", "tail-first"): (3546, 1087, 1334998, 2009, 1859, 3036, 0, 0),
    (0, False, "reuse", "head-first"): (3451, 1458, 1193686, 1555, 1405, 3569, 0, 0),
    (0, False, "reuse", "tail-first"): (3508, 1369, 1210070, 1507, 1357, 3411, 0, 0),
    (0, True, "all", "head-first"): (2187, 69, 2552022, 228, 78, 237, 0, 4953),
    (0, True, "all", "tail-first"): (2232, 116, 2504918, 238, 88, 294, 0, 4845),
    (0, True, "reuse", "head-first"): (2155, 41, 2582742, 169, 19, 213, 0, 5009),
    (0, True, "reuse", "tail-first"): (2201, 44, 2557654, 183, 33, 187, 0, 4981),
    (80, False, "all", "head-first"): (3276, 1777, 1119958, 1846, 1696, 3563, 0, 0),
    (80, False, "all", "tail-first"): (3454, 1754, 1040598, 1796, 1646, 3490, 0, 0),
    (80, False, "reuse", "head-first"): (3271, 1496, 1266390, 1539, 1389, 3798, 0, 0),
    (80, False, "reuse", "tail-first"): (3453, 1312, 1267414, 1519, 1369, 3605, 0, 0),
    (80, True, "all", "head-first"): (2160, 184, 2506966, 251, 101, 375, 0, 4818),
    (80, True, "all", "tail-first"): (2015, 236, 2554582, 194, 44, 370, 0, 4871),
    (80, True, "reuse", "head-first"): (2086, 63, 2606806, 119, 0, 213, 0, 5078),
    (80, True, "reuse", "tail-first"): (2138, 120, 2550998, 175, 25, 362, 0, 4872),
    (100, False, "all", "head-first"): (2042, 3003, 1124054, 1838, 1688, 4734, 47, 0),
    (100, True, "reuse", "tail-first"): (1931, 304, 2562774, 236, 86, 738, 20, 4685),
}


@pytest.mark.parametrize("choices", GOLDEN, ids=str)
def test_figures_of_a_generated_trace_do_not_change(choices: tuple[int, bool, str, str]) -> None:
    requests = conversations()
    trace = trace_of(
        [each["hash_ids"] for each in requests], [each["input_length"] for each in requests]
    )
    percent, lfu, policy, recency = choices
    made = Simulation(
        pool_nbytes=60 * BLOCK,
        ssd_cache_capacity_nbytes=150 * BLOCK,
        cache_protected_percent=percent,
        enable_lfu_admission=lfu,
        ssd_write_policy=policy,  # type: ignore[arg-type]
        bytes_per_token=8,
        recency=recency,  # type: ignore[arg-type]
    )
    found = simulate(cut(trace, 512), made)
    assert (found.blocks, found.unique_blocks) == BLOCKS
    assert tuple(getattr(found, name) for name in FIGURES) == GOLDEN[choices]


def test_same_inputs_give_the_same_figures() -> None:
    pages = cut(trace_of([each["hash_ids"] for each in conversations(requests=100)]), 512)
    made = Simulation(
        pool_nbytes=100 * BLOCK,
        ssd_cache_capacity_nbytes=200 * BLOCK,
        enable_lfu_admission=True,
        bytes_per_token=8,
    )
    assert simulate(pages, made) == simulate(pages, made)


def public(name: str) -> RequestTrace:
    path = TRACES / f"{name}_trace.jsonl"
    if not path.exists():
        pytest.skip(f"the public trace {path} is not here; it is no part of the repository")
    return read_trace(path)


@pytest.mark.parametrize(
    ("name", "requests", "blocks", "unique", "bound", "hits"),
    [
        ("conversation", 12_031, 288_500, 182_790, 36.64, (11.0, 28.7, 35.5)),
        ("synthetic", 3_993, 121_877, 43_924, 63.96, (27.9, 57.1, 64.0)),
    ],
)
def test_known_figures_of_public_traces(
    name: str, requests: int, blocks: int, unique: int, bound: float, hits: tuple[float, ...]
) -> None:
    pages = cut(public(name), 512)
    for capacity, wanted in zip((5_000, 20_000, 50_000), hits, strict=True):
        found = simulate(pages, Simulation(pool_nbytes=capacity * BLOCK, bytes_per_token=8))
        assert (found.requests, found.blocks, found.unique_blocks) == (requests, blocks, unique)
        assert round(100 * found.unlimited_prefix_hit_rate, 2) == bound
        assert round(100 * found.prefix_hit_rate, 1) == wanted


@pytest.mark.parametrize("name", ["conversation", "synthetic"])
def test_a_prompts_tail_that_leaves_first_is_a_little_better_than_a_plain_lru(name: str) -> None:
    pages = cut(public(name), 512)
    for capacity in (5_000, 20_000):
        head, tail = (
            simulate(
                pages,
                Simulation(pool_nbytes=capacity * BLOCK, bytes_per_token=8, recency=recency),  # type: ignore[arg-type]
            ).prefix_hit_rate
            for recency in ("head-first", "tail-first")
        )
        assert 0 < tail - head < 0.002


# Settings ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"page_tokens": 500}, "page_tokens: 500; accepted: a divisor or a multiple of 512"),
        ({"page_tokens": 0}, "page_tokens: 0; accepted: 1 to 1048576"),
        ({"cache_protected_percent": 101}, "cache_protected_percent: 101; accepted: 0 to 100"),
        ({"gpu_pages": -1}, "gpu_pages: -1; accepted: 0 to "),
        ({"bytes_per_token": 0}, "bytes_per_token: 0; accepted: 1 to 4294967296"),
        (
            {"bytes_per_token": 2**31, "pool_nbytes": 2**60},
            f"bytes_per_token: {2**31} make pages of {2**40} bytes; accepted: up to {MAX_NBYTES}",
        ),
        ({"pool_nbytes": 2**20}, r"pool_nbytes: 1048576; accepted: 75497472 \(one page\) to"),
        (
            {"ssd_cache_capacity_nbytes": 2**20},
            r"ssd_cache_capacity_nbytes: 1048576; accepted: 75497472 \(0, or a page\) to",
        ),
        ({"storage_codec": "zip"}, "storage_codec: 'zip'; accepted: none, fp8, "),
        ({"ssd_write_policy": "none"}, "ssd_write_policy: 'none'; accepted: all, reuse"),
        ({"recency": "random"}, "recency: 'random'; accepted: head-first, tail-first"),
        ({"enable_lfu_admission": "yes"}, "enable_lfu_admission: 'yes'; accepted: True, False"),
    ],
)
def test_setting_that_is_not_accepted_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Simulation(**changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("blocks", [[[]], [[], []], [[0]]])
def test_trace_of_next_to_nothing_is_simulated(blocks: Collection[list[int]]) -> None:
    found = simulate(cut(trace_of(list(blocks)), 512), Simulation(gpu_pages=1))
    assert found.prefix_hit_rate == 0.0
    assert found.saved_blocks == found.blocks


@pytest.mark.soak
@pytest.mark.parametrize(
    "of", ["every policy, a tenth in DRAM, all on SSD", "all in DRAM and on SSD"]
)
def test_ten_million_unique_pages_stay_under_500_mb(of: str) -> None:
    command = [sys.executable, "benchmarks/bench_simulate.py", "--probe", "memory", "--of", of]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert int(run.stdout.split()[0]) < 500e6
