"""What a model computed comes back as it was, or is computed again: never anything else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from transformers import (  # noqa: E402
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    StaticCache,
)

from orbitkv import Config, Manager, Saved  # noqa: E402
from orbitkv.cache.catalogue import Copy, Tier  # noqa: E402
from orbitkv.config import MIB  # noqa: E402
from orbitkv.engines.landing import SaveTicket  # noqa: E402
from orbitkv.engines.transformers import OrbitKVCache, cache_keyword  # noqa: E402
from orbitkv.errors import Cancelled, ConfigError, GeometryError, ImpossibleRequest  # noqa: E402
from orbitkv.segment import StateKey, hash_pages  # noqa: E402
from orbitkv.stages.ticket import Failed, Outcome, Ticket  # noqa: E402

PAGE = 32
SHAPE = {
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 211,
    "initializer_range": 0.3,  # wide, so that no two tokens are about equally likely
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make_model(
    seed: int = 0, dtype: torch.dtype = torch.float32, **changes: object
) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).to(dtype).eval()


def make_tokens(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, SHAPE["vocab_size"], (1, count), generator=generator)


def forward(model: LlamaForCausalLM, tokens: torch.Tensor, cache: DynamicCache) -> torch.Tensor:
    with torch.inference_mode():
        rest = tokens[:, cache.get_seq_length() :]
        return model(rest, **{cache_keyword(model): cache}).logits


def prefill(model: LlamaForCausalLM, tokens: torch.Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    forward(model, tokens, cache)
    return cache


def decode(
    model: LlamaForCausalLM, tokens: torch.Tensor, cache: DynamicCache | None = None
) -> list[int]:
    """Continue greedily; from nothing where no cache is given."""
    if cache is None:
        cache = DynamicCache(config=model.config)
    grown = tokens
    for _ in range(12):
        next_token = forward(model, grown, cache)[0, -1].argmax()
        grown = torch.cat([grown, next_token.reshape(1, 1)], dim=1)
    new: list[int] = grown[0, tokens.shape[1] :].tolist()
    return new


def assert_same_prefix(cache: DynamicCache, wanted: DynamicCache, tokens: int) -> None:
    assert cache.get_seq_length() == tokens
    for layer, wanted_layer in zip(cache.layers, wanted.layers, strict=True):
        assert torch.equal(layer.keys, wanted_layer.keys[:, :, :tokens])
        assert torch.equal(layer.values, wanted_layer.values[:, :, :tokens])


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return make_model()


@pytest.fixture
def manager() -> Iterator[Manager]:
    with Manager(Config(pool_nbytes=8 * MIB, lock_memory=False)) as manager:
        yield manager


@pytest.fixture
def kv(manager: Manager, model: LlamaForCausalLM) -> Iterator[OrbitKVCache]:
    with OrbitKVCache(manager, model) as kv:
        yield kv
    assert manager.leaks() == []


def in_dram(
    manager: Manager, kv: OrbitKVCache, tokens: torch.Tensor, page: int, band: int = 0
) -> Copy:
    """Find a saved page's object."""
    page_hash = hash_pages(kv.namespace, tokens[0].tolist(), PAGE)[page]
    key = StateKey(kv._homes[band].namespace, page_hash, "attention")
    copy = manager.core.catalogue.find(key.digest, Tier.DRAM)
    assert copy is not None
    return copy


def corrupt(copy: Copy) -> None:
    """Flip one bit in the middle."""
    assert copy.memory is not None
    copy.memory[copy.nbytes // 2] ^= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_what_was_saved_comes_back_as_the_same_tensors_and_tokens(
    manager: Manager, dtype: torch.dtype
) -> None:
    model = make_model(dtype=dtype)
    tokens = make_tokens(3 * PAGE + 5)
    with OrbitKVCache(manager, model) as kv:
        cold = prefill(model, tokens)
        outcome = kv.save(tokens, cold).result()
        assert isinstance(outcome, Saved)
        assert len(outcome.stored) == 3

        restoration = kv.restore(tokens)
        assert (restoration.tokens, restoration.pages_restored) == (3 * PAGE, 3)
        assert restoration.pages_missed == 0
        assert restoration.sources == {Tier.DRAM: 3, Tier.SSD: 0}
        assert_same_prefix(restoration.cache, cold, 3 * PAGE)
        if dtype is torch.float32:
            restored_tokens = decode(model, tokens, restoration.cache)
            assert restored_tokens == decode(model, tokens)
            assert len(set(restored_tokens)) > 3
    assert manager.leaks() == []


def test_a_longer_prompt_gets_the_shared_prefix_only(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    shared = make_tokens(2 * PAGE)
    first = torch.cat([shared, make_tokens(50, seed=2)], dim=1)
    second = torch.cat([shared, make_tokens(70, seed=3)], dim=1)
    kv.save(first, prefill(model, first)).result()
    restoration = kv.restore(second)
    assert restoration.tokens == 2 * PAGE
    assert (restoration.pages_restored, restoration.pages_missed) == (2, 2)
    cold = prefill(model, second)
    assert_same_prefix(restoration.cache, cold, 2 * PAGE)
    assert decode(model, second, restoration.cache) == decode(model, second)
    kv.save(second, cold).result()
    assert kv.restore(second).pages_restored == 4
    assert manager.leaks() == []


def test_a_first_token_that_differs_finds_nothing(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(2 * PAGE + 1)
    kv.save(tokens, prefill(model, tokens)).result()
    other = tokens.clone()
    other[0, 0] = tokens[0, 0] % 200 + 1
    assert kv.restore(other).tokens == 0
    assert manager.leaks() == []


def _changed_weight() -> LlamaForCausalLM:
    model = make_model()
    with torch.no_grad():
        model.model.layers[2].self_attn.k_proj.weight.mul_(1.001)
    return model


def _other_attention() -> LlamaForCausalLM:
    model = make_model()
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    ("other_model", "salt"),
    [
        (make_model, b"another tenant"),
        (lambda: make_model(seed=7), b""),
        (_changed_weight, b""),
        (lambda: make_model(rope_parameters={"rope_type": "default", "rope_theta": 5e5}), b""),
        (lambda: make_model(dtype=torch.bfloat16), b""),
        (_other_attention, b""),
    ],
    ids=["salt", "weights", "one weight", "rope", "dtype", "attention"],
)
def test_another_salt_or_model_never_hits(
    manager: Manager,
    kv: OrbitKVCache,
    model: LlamaForCausalLM,
    other_model: Callable[[], LlamaForCausalLM],
    salt: bytes,
) -> None:
    tokens = make_tokens(2 * PAGE + 1)
    kv.save(tokens, prefill(model, tokens)).result()
    with OrbitKVCache(manager, other_model(), salt=salt) as other:
        assert other.restore(tokens).tokens == 0
    assert manager.leaks() == []


def test_the_same_weights_hit_whatever_path_they_were_loaded_from(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM, tmp_path: Path
) -> None:
    tokens = make_tokens(2 * PAGE + 1)
    names = []
    for parent in ("one", "other"):
        path = tmp_path / parent / "checkpoint"
        model.save_pretrained(path)
        loaded = LlamaForCausalLM.from_pretrained(path, local_files_only=True).eval()
        with OrbitKVCache(manager, loaded) as saver:
            names.append(saver.identity)
            assert saver.restore(tokens).pages_restored == (2 if parent == "other" else 0)
            saver.save(tokens, prefill(loaded, tokens)).result()
    assert names[0] == names[1]
    assert manager.leaks() == []


@pytest.mark.parametrize(("count", "pages"), [(1, 0), (PAGE - 1, 0), (PAGE, 0), (PAGE + 1, 1)])
def test_a_prompt_about_as_long_as_a_page(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM, count: int, pages: int
) -> None:
    tokens = make_tokens(count)
    outcome = kv.save(tokens, prefill(model, tokens)).result()
    assert isinstance(outcome, Saved)
    assert len(outcome.stored) == count // PAGE
    restoration = kv.restore(tokens)
    assert (restoration.pages_restored, restoration.pages_missed) == (pages, 0)
    assert restoration.cache.get_seq_length() == pages * PAGE
    assert decode(model, tokens, restoration.cache) == decode(model, tokens)
    assert manager.leaks() == []


def test_a_prompt_of_whole_pages_leaves_its_last_page_to_compute(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(3 * PAGE)
    kv.save(tokens, prefill(model, tokens)).result()
    restoration = kv.restore(tokens)
    assert (restoration.tokens, restoration.pages_restored) == (2 * PAGE, 2)
    assert restoration.pages_missed == 0
    assert kv.restore(torch.cat([tokens, make_tokens(1, seed=9)], dim=1)).pages_restored == 3
    assert manager.leaks() == []


@pytest.mark.parametrize("page", [0, 2])
def test_a_corrupt_page_and_all_after_it_are_computed_again(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM, page: int
) -> None:
    tokens = make_tokens(4 * PAGE + 3)
    cold = prefill(model, tokens)
    kv.save(tokens, cold).result()
    corrupt(in_dram(manager, kv, tokens, page))
    restoration = kv.restore(tokens)
    assert (restoration.pages_restored, restoration.pages_missed) == (page, 4 - page)
    assert restoration.sources[Tier.DRAM] == page
    if page:
        assert_same_prefix(restoration.cache, cold, page * PAGE)
    assert decode(model, tokens, restoration.cache) == decode(model, tokens)
    kv.save(tokens, restoration.cache).result()
    assert kv.restore(tokens).pages_restored == 4
    assert manager.leaks() == []


def test_going_on_with_a_cache_does_not_disturb_its_save(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(5 * PAGE + 1)
    cache = prefill(model, tokens)
    before = prefill(model, tokens)
    ticket = kv.save(tokens, cache)
    decode(model, make_tokens(1, seed=8).repeat(1, 5 * PAGE + 2), cache)
    cache.crop(-40)
    del cache
    ticket.result()
    assert_same_prefix(kv.restore(tokens).cache, before, 5 * PAGE)
    assert manager.leaks() == []


def test_two_caches_at_once_stay_apart(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    other_model = make_model(seed=5)
    one, two = make_tokens(3 * PAGE + 7, seed=10), make_tokens(2 * PAGE + 9, seed=11)
    with OrbitKVCache(manager, other_model) as other_kv:
        tickets = [
            kv.save(one, prefill(model, one)),
            kv.save(two, prefill(model, two)),
            other_kv.save(one, prefill(other_model, one)),
        ]
        for ticket in tickets:
            assert isinstance(ticket.result(), Saved)
        restorations = [kv.restore(one), kv.restore(two), other_kv.restore(one)]
        assert [restoration.pages_restored for restoration in restorations] == [3, 2, 3]
        for restoration, by, tokens in zip(
            restorations, (model, model, other_model), (one, two, one), strict=True
        ):
            cold = prefill(by, tokens)
            assert_same_prefix(restoration.cache, cold, restoration.tokens)
            assert decode(by, tokens, restoration.cache) == decode(by, tokens)
    assert manager.leaks() == []


def test_generate_restores_what_an_earlier_one_saved(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(2 * PAGE + 4)
    first = kv.generate(tokens, max_new_tokens=PAGE)
    assert first.restoration.tokens == 0
    first.ticket.result()
    again = kv.generate(tokens, max_new_tokens=PAGE)
    assert again.restoration.pages_restored == 2
    assert torch.equal(again.sequences, first.sequences)
    assert first.sequences.shape == (1, 3 * PAGE + 4)
    again.ticket.result()
    further = kv.generate(first.sequences[0].tolist(), max_new_tokens=2)
    assert further.restoration.pages_restored == 3  # the generated tokens were saved as well
    further.ticket.result()
    assert manager.leaks() == []


def test_pages_come_back_from_ssd(model: LlamaForCausalLM, tmp_path: Path) -> None:
    config = Config(
        pool_nbytes=4 * MIB,
        lock_memory=False,
        ssd_cache_paths=tmp_path / "kv",
        ssd_cache_capacity_nbytes=4 * MIB,
    )
    tokens = make_tokens(4 * PAGE + 1)
    with Manager(config) as manager, OrbitKVCache(manager, model) as kv:
        cold = prefill(model, tokens)
        kv.save(tokens, cold).result()
        assert manager.flush(evict_dram=True).unwritten == 0
        restoration = kv.restore(tokens)
        assert restoration.sources == {Tier.DRAM: 0, Tier.SSD: 4}
        assert_same_prefix(restoration.cache, cold, 4 * PAGE)
        assert manager.leaks() == []


def test_a_batch_is_refused(manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM) -> None:
    batch = make_tokens(PAGE + 1).repeat(2, 1)
    cache = prefill(model, batch)
    with pytest.raises(GeometryError, match="batch of 2 sequences; accepted: 1"):
        kv.restore(batch)
    with pytest.raises(GeometryError, match="batch of 2 sequences; accepted: 1"):
        kv.save(batch, cache)
    with pytest.raises(GeometryError, match="cache of batch 2; accepted: 1"):
        kv.save(batch[:1], cache)
    with pytest.raises(ConfigError, match="num_beams: 3; accepted: 1"):
        kv.generate(batch[:1], max_new_tokens=1, num_beams=3)
    with pytest.raises(GeometryError, match="without a token"):
        kv.restore([])
    assert manager.leaks() == []


def test_another_kind_of_cache_is_refused(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(PAGE + 1)
    static = StaticCache(config=model.config, max_cache_len=64)
    with pytest.raises(GeometryError, match="cache StaticCache; accepted: DynamicCache"):
        kv.save(tokens, static)
    shorter = make_model(num_hidden_layers=2)
    with pytest.raises(GeometryError, match="cache of 2 filled layers; declared: 3"):
        kv.save(tokens, prefill(shorter, tokens))
    wider = make_model(head_dim=32)
    with pytest.raises(GeometryError, match=r"declared \(2, 1, 32, 16\)"):
        kv.save(tokens, prefill(wider, tokens))
    other_dtype = make_model(dtype=torch.bfloat16)
    with pytest.raises(GeometryError, match="dtype bfloat16; declared float32"):
        kv.save(tokens, prefill(other_dtype, tokens))
    assert manager.leaks() == []


def test_a_model_with_another_kind_of_cache_is_refused(
    manager: Manager, model: LlamaForCausalLM
) -> None:
    sliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=64))
    with pytest.raises(GeometryError, match="DynamicSlidingWindowLayer; accepted: DynamicLayer"):
        OrbitKVCache(manager, sliding)
    with pytest.raises(GeometryError, match="dtype float64; accepted: bfloat16"):
        OrbitKVCache(manager, make_model(dtype=torch.float64))
    latent = make_model()
    latent.config.kv_lora_rank = 8
    with pytest.raises(GeometryError, match="latent attention"):
        OrbitKVCache(manager, latent)
    with pytest.raises(GeometryError, match="on meta; accepted: the CPU, or one NVIDIA GPU"):
        OrbitKVCache(manager, make_model().to("meta"))
    spread = make_model()
    spread.model.layers[1].to("meta")
    with pytest.raises(GeometryError, match="on cpu, meta; accepted: the CPU, or one NVIDIA GPU"):
        OrbitKVCache(manager, spread)
    assert manager.leaks() == []


def test_a_pool_smaller_than_a_page_is_told_at_once(model: LlamaForCausalLM) -> None:
    with (
        Manager(Config(pool_nbytes=4096, lock_memory=False)) as manager,
        pytest.raises(ImpossibleRequest, match="one page"),
    ):
        OrbitKVCache(manager, model)


def test_close_waits_for_the_saves_under_way_and_may_come_twice(
    manager: Manager, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(4 * PAGE)
    kv = OrbitKVCache(manager, model)
    ticket = kv.save(tokens, prefill(model, tokens))
    kv.close()
    assert ticket.done
    kv.close()
    assert manager.leaks() == []


def test_a_manager_may_be_closed_first(model: LlamaForCausalLM) -> None:
    tokens = make_tokens(4 * PAGE)
    with Manager(Config(pool_nbytes=8 * MIB, lock_memory=False)) as manager:
        kv = OrbitKVCache(manager, model)
        ticket = kv.save(tokens, prefill(model, tokens))
    assert ticket.done
    kv.close()


# Bands: layers that are stored, and come back, one run after the other.


@pytest.mark.parametrize("bands", [2, 3])
def test_bands_come_back_as_the_same_tensors_and_tokens(
    manager: Manager, model: LlamaForCausalLM, bands: int
) -> None:
    tokens = make_tokens(3 * PAGE + 5)
    with OrbitKVCache(manager, model, bands=bands) as kv:
        cold = prefill(model, tokens)
        outcome = kv.save(tokens, cold).result()
        assert isinstance(outcome, Saved)
        assert (len(outcome.stored), outcome.resident, outcome.dropped) == (3, (), ())
        restoration = kv.restore(tokens)
        assert (restoration.pages_restored, restoration.pages_missed) == (3, 0)
        assert restoration.sources == {Tier.DRAM: 3, Tier.SSD: 0}
        assert_same_prefix(restoration.cache, cold, 3 * PAGE)
        assert decode(model, tokens, restoration.cache) == decode(model, tokens)
        again = kv.save(tokens, cold).result()
        assert isinstance(again, Saved)
        assert (again.stored, again.resident) == ((), outcome.stored)
    assert manager.leaks() == []


@pytest.mark.parametrize("bands", [0, 4])
def test_more_bands_than_layers_are_refused(
    manager: Manager, model: LlamaForCausalLM, bands: int
) -> None:
    with pytest.raises(ConfigError, match=f"bands: {bands}; accepted: 1 to 3"):
        OrbitKVCache(manager, model, bands=bands)
    assert manager.leaks() == []


def test_another_number_of_bands_finds_nothing(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(2 * PAGE + 1)
    kv.save(tokens, prefill(model, tokens)).result()
    with OrbitKVCache(manager, model, bands=3) as other:
        assert other.restore(tokens).tokens == 0
    assert manager.leaks() == []


@pytest.mark.parametrize("band", [0, 1, 2])
@pytest.mark.parametrize("page", [0, 2])
def test_a_page_is_there_only_if_all_its_bands_are(
    manager: Manager, model: LlamaForCausalLM, band: int, page: int
) -> None:
    tokens = make_tokens(4 * PAGE + 3)
    with OrbitKVCache(manager, model, bands=3) as kv:
        cold = prefill(model, tokens)
        kv.save(tokens, cold).result()
        corrupt(in_dram(manager, kv, tokens, page, band))
        restoration = kv.restore(tokens)
        assert (restoration.pages_restored, restoration.pages_missed) == (page, 4 - page)
        assert restoration.sources[Tier.DRAM] == page
        if page:
            assert_same_prefix(restoration.cache, cold, page * PAGE)
        assert decode(model, tokens, restoration.cache) == decode(model, tokens)
        outcome = kv.save(tokens, restoration.cache).result()  # which the damaged one is not in
        assert isinstance(outcome, Saved)
        assert (len(outcome.stored), len(outcome.resident)) == (1, 3)
        assert kv.restore(tokens).pages_restored == 4
    assert manager.leaks() == []


def test_where_bands_of_a_page_differ_the_slowest_tier_counts(
    model: LlamaForCausalLM, tmp_path: Path
) -> None:
    config = Config(
        pool_nbytes=4 * MIB,
        lock_memory=False,
        ssd_cache_paths=tmp_path / "kv",
        ssd_cache_capacity_nbytes=4 * MIB,
    )
    tokens = make_tokens(4 * PAGE + 1)
    with Manager(config) as manager, OrbitKVCache(manager, model, bands=3) as kv:
        cold = prefill(model, tokens)
        kv.save(tokens, cold).result()
        assert manager.flush().unwritten == 0
        manager.core.catalogue.hide(in_dram(manager, kv, tokens, page=3, band=1))
        restoration = kv.restore(tokens)
        assert restoration.sources == {Tier.DRAM: 3, Tier.SSD: 1}
        assert_same_prefix(restoration.cache, cold, 4 * PAGE)
        assert manager.leaks() == []


# Landings: where prefixes arrive again and again.


@pytest.mark.parametrize("bands", [1, 3])
def test_a_landing_is_filled_again_and_again(
    manager: Manager, model: LlamaForCausalLM, bands: int
) -> None:
    one, two = make_tokens(3 * PAGE + 7, seed=10), make_tokens(2 * PAGE + 9, seed=11)
    with OrbitKVCache(manager, model, bands=bands) as kv:
        landing = kv.make_landing(3 * PAGE + 31)
        assert landing.pages == 3
        for tokens in (one, two):
            kv.save(tokens, prefill(model, tokens)).result()
        for tokens in (one, two, one):
            restoration = kv.restore(tokens, landing)
            keys = restoration.cache.layers[0].keys
            assert keys.data_ptr() == landing.tensors[0].data_ptr()
            assert_same_prefix(restoration.cache, prefill(model, tokens), restoration.tokens)
            assert decode(model, tokens, restoration.cache) == decode(model, tokens)
    assert manager.leaks() == []


def test_a_landing_takes_as_many_pages_as_it_has_room_for(
    manager: Manager, kv: OrbitKVCache, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(4 * PAGE + 1)
    cold = prefill(model, tokens)
    landing = kv.make_landing(2 * PAGE)
    assert kv.restore(tokens, landing).tokens == 0
    kv.save(tokens, cold).result()
    restoration = kv.restore(tokens, landing)
    assert (restoration.pages_restored, restoration.pages_missed) == (2, 2)
    assert_same_prefix(restoration.cache, cold, 2 * PAGE)
    with pytest.raises(ConfigError, match="landing for 31 tokens; accepted: 32 or more"):
        kv.make_landing(PAGE - 1)
    assert manager.leaks() == []


def test_bands_can_be_waited_for_one_after_the_other(
    manager: Manager, model: LlamaForCausalLM
) -> None:
    tokens = make_tokens(3 * PAGE + 5)
    with OrbitKVCache(manager, model, bands=3) as kv:
        cold = prefill(model, tokens)
        kv.save(tokens, cold).result()
        landing = kv.make_landing(3 * PAGE)
        for tensor in landing.tensors:
            tensor.fill_(float("nan"))
        arrival = kv.begin(tokens, landing)
        for band, first in enumerate(landing.first_layers):
            assert first == band
            assert arrival.wait(band) == 3
            for index, layer in enumerate(cold.layers[: band + 1]):
                assert torch.equal(landing.tensors[2 * index], layer.keys[:, :, : 3 * PAGE])
                assert torch.equal(landing.tensors[2 * index + 1], layer.values[:, :, : 3 * PAGE])
        assert arrival.wait(0) == arrival.wait_for_all() == 3
    assert manager.leaks() == []


def test_an_arrival_that_nobody_waits_for_is_over_before_the_next(
    manager: Manager, model: LlamaForCausalLM
) -> None:
    one, two = make_tokens(3 * PAGE + 1, seed=10), make_tokens(3 * PAGE + 1, seed=11)
    with OrbitKVCache(manager, model, bands=2) as kv:
        for tokens in (one, two):
            kv.save(tokens, prefill(model, tokens)).result()
        landing = kv.make_landing(3 * PAGE)
        for _ in range(20):
            kv.begin(one, landing)
            restoration = kv.restore(two, landing)
        assert_same_prefix(restoration.cache, prefill(model, two), 3 * PAGE)
        kv.begin(one, landing)
    assert manager.leaks() == []


def test_a_save_of_bands_is_waited_for_like_one(manager: Manager, model: LlamaForCausalLM) -> None:
    tokens = make_tokens(2 * PAGE)
    with OrbitKVCache(manager, model, bands=3) as kv:
        ticket = kv.save(tokens, prefill(model, tokens))

        async def wait() -> Outcome:
            return await ticket

        assert asyncio.run(wait()) == ticket.result(60.0)
        assert ticket.done
        short = kv.save(tokens[:, : PAGE - 1], prefill(model, tokens[:, : PAGE - 1]))
        assert short.result() == Saved((), (), ())
    assert manager.leaks() == []


def test_what_is_missing_from_one_band_is_dropped() -> None:
    def ended(*, stored: tuple[bytes, ...] = (), **rest: tuple[bytes, ...]) -> Ticket:
        outcome = Saved(stored, rest.get("resident", ()), rest.get("dropped", ()))
        ticket = Ticket(lambda done, not_done: outcome)
        ticket.seal()
        return ticket

    save = SaveTicket(
        [b"a", b"b", b"c", b"d"],
        [
            ended(resident=(b"a", b"b"), stored=(b"c",), dropped=(b"d",)),
            ended(resident=(b"a", b"c"), stored=(b"d", b"b")),
        ],
    )
    assert save.result() == Saved(stored=(b"b", b"c"), resident=(b"a",), dropped=(b"d",))


def test_a_save_of_bands_that_is_late_or_fails_says_so() -> None:
    late = Ticket(lambda done, not_done: Saved(done, (), not_done))
    save = SaveTicket([b"a"], [late])
    assert not save.done
    with pytest.raises(TimeoutError):
        save.result(0.01)
    save.cancel()
    late.seal()
    outcome = save.result()
    assert isinstance(outcome, Failed)
    assert isinstance(outcome.error, Cancelled)
