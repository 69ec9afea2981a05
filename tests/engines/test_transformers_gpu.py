"""On a GPU the same comes back as on a CPU, in order with what torch's stream does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
transformers = pytest.importorskip("transformers", reason="transformers is not installed")

from orbitkv import Config, Manager, Saved  # noqa: E402
from orbitkv.cache.catalogue import Tier  # noqa: E402
from orbitkv.config import MIB  # noqa: E402
from orbitkv.engines.checkpoint import GreedyEngine  # noqa: E402
from orbitkv.engines.graphed import GraphedStep  # noqa: E402
from orbitkv.engines.landing import Landing, make_cache  # noqa: E402
from orbitkv.engines.transformers import OrbitKVCache, fingerprint  # noqa: E402
from orbitkv.errors import ConfigError, GeometryError  # noqa: E402
from orbitkv.probe import cuda_unavailable  # noqa: E402
from orbitkv.segment import StateKey, hash_pages  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # kernels are compiled
    pytest.mark.skipif(cuda_unavailable() is not None, reason=str(cuda_unavailable())),
]

PAGE = 32
NEW_TOKENS = 12
SLEEP_CYCLES = 200_000_000  # about a tenth of a second
INTEGERS = {2: torch.int16, 4: torch.int32}
SHAPE = {
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 128,
    "head_dim": 64,
    "intermediate_size": 192,
    "vocab_size": 499,
    "initializer_range": 0.2,  # wide, so that no two tokens are about equally likely
    "max_position_embeddings": 1024,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def make_model(
    kind: str = "Qwen3", dtype: torch.dtype = torch.bfloat16, device: str = "cuda", seed: int = 0
) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    config = getattr(transformers, f"{kind}Config")(**SHAPE)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)  # on the CPU: the same everywhere
    return model.to(dtype).to(device).eval()


def make_tokens(count: int, seed: int = 1) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(1, 499, (count,), generator=generator).tolist()
    return tokens


def tensors_of(cache: transformers.DynamicCache, tokens: int) -> list[torch.Tensor]:
    """K and V of each layer in turn, as they are now: copies of their first tokens."""
    return [
        tensor[:, :, :tokens].clone()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    ]


def assert_same_bytes(ones: list[torch.Tensor], others: list[torch.Tensor]) -> None:
    for one, other in zip(ones, others, strict=True):
        integers = INTEGERS[one.element_size()]
        assert torch.equal(one.view(integers), other.view(integers))


def poison(landing: Landing) -> None:
    for tensor in landing.tensors:
        tensor.fill_(float("nan"))


class Prompt:
    """Tokens, computed once by a model and saved."""

    def __init__(self, kv: OrbitKVCache, engine: GreedyEngine, tokens: list[int]) -> None:
        self.engine, self.tokens = engine, tokens
        self.prefix = (len(tokens) - 1) // PAGE * PAGE
        cache = engine.empty_cache()
        first = engine.next_token(tokens, cache)
        self.saved = kv.save(tokens, cache).result()
        self.states = tensors_of(cache, self.prefix)
        self.cold = engine.decode(tokens, first, NEW_TOKENS, cache)
        # A token that is computed by itself takes other kernels than one in a prompt, which in
        # bfloat16 may round otherwise: so this, and not the cold run, is what must come out.
        self.kept = self.go_on(make_cache(engine.model.config, self.states))

    def go_on(self, cache: transformers.DynamicCache, first: int | None = None) -> list[int]:
        if first is None:
            first = self.engine.next_token(self.tokens, cache)
        return self.engine.decode(self.tokens, first, NEW_TOKENS, cache)


@pytest.fixture(scope="module")
def model() -> transformers.PreTrainedModel:
    return make_model()


@pytest.fixture
def engine(model: transformers.PreTrainedModel) -> GreedyEngine:
    return GreedyEngine(model)


@pytest.fixture
def manager() -> Iterator[Manager]:
    with Manager(Config(pool_nbytes=32 * MIB, lock_memory=False)) as manager:
        yield manager


@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bands", [1, 2])
def test_what_was_saved_comes_back_as_the_same_bytes_and_tokens(
    manager: Manager, kind: str, dtype: torch.dtype, bands: int
) -> None:
    model = make_model(kind, dtype)
    with OrbitKVCache(manager, model, bands=bands) as kv:
        prompt = Prompt(kv, GreedyEngine(model), make_tokens(3 * PAGE + 5))
        assert isinstance(prompt.saved, Saved)
        assert len(prompt.saved.stored) == 3
        restoration = kv.restore(prompt.tokens)
        assert (restoration.tokens, restoration.pages_restored) == (3 * PAGE, 3)
        assert restoration.sources == {Tier.DRAM: 3, Tier.SSD: 0}
        assert_same_bytes(tensors_of(restoration.cache, 3 * PAGE), prompt.states)
        restored = prompt.go_on(restoration.cache)
        assert restored == prompt.kept
        assert len(set(restored)) > 3
        if dtype is torch.float32:
            assert restored == prompt.cold
    assert manager.leaks() == []


@pytest.mark.parametrize("bands", [1, 3])
def test_a_landing_is_filled_again_and_again(
    manager: Manager, engine: GreedyEngine, bands: int
) -> None:
    with OrbitKVCache(manager, engine.model, bands=bands) as kv:
        prompts = [Prompt(kv, engine, make_tokens(3 * PAGE + 1, seed)) for seed in (2, 3)]
        landing = kv.make_landing(3 * PAGE)
        for prompt in (*prompts, *prompts):
            poison(landing)
            restoration = kv.restore(prompt.tokens, landing)
            assert restoration.pages_restored == 3
            assert_same_bytes(list(landing.tensors), prompt.states)
            assert prompt.go_on(restoration.cache) == prompt.kept
    assert manager.leaks() == []


def test_a_save_waits_on_the_gpu_for_what_the_stream_still_has_to_write(
    manager: Manager, engine: GreedyEngine
) -> None:
    tokens = make_tokens(4 * PAGE + 1)
    with OrbitKVCache(manager, engine.model) as kv:
        cache = engine.empty_cache()
        engine.next_token(tokens, cache)
        written = torch.cuda.Event()
        torch.cuda._sleep(SLEEP_CYCLES)
        with torch.inference_mode():
            for layer in cache.layers:
                layer.keys.fill_(1.5)
                layer.values.fill_(-2.5)
        written.record()
        ticket = kv.save(tokens, cache)
        assert not written.query()  # nothing on the host has waited for it
        for layer in cache.layers:
            layer.keys, layer.values = layer.keys + 1, layer.values + 1  # as a cache grows
        assert isinstance(ticket.result(), Saved)
        layers = kv.restore(tokens).cache.layers
        assert all((layer.keys == 1.5).all() and (layer.values == -2.5).all() for layer in layers)
    assert manager.leaks() == []


def test_a_restore_waits_for_what_the_stream_still_has_to_read(
    manager: Manager, engine: GreedyEngine
) -> None:
    with OrbitKVCache(manager, engine.model) as kv:
        one, two = (Prompt(kv, engine, make_tokens(4 * PAGE + 1, seed)) for seed in (4, 5))
        landing = kv.make_landing(4 * PAGE)
        restoration = kv.restore(one.tokens, landing)
        torch.cuda._sleep(SLEEP_CYCLES)
        read = tensors_of(restoration.cache, 4 * PAGE)
        kv.restore(two.tokens, landing)
        assert_same_bytes(read, one.states)
        assert_same_bytes(list(landing.tensors), two.states)
    assert manager.leaks() == []


def test_fp8_comes_back_nearly(engine: GreedyEngine) -> None:
    config = Config(pool_nbytes=32 * MIB, lock_memory=False, storage_codec="fp8")
    with Manager(config) as manager, OrbitKVCache(manager, engine.model, bands=2) as kv:
        prompt = Prompt(kv, engine, make_tokens(3 * PAGE + 1))
        restoration = kv.restore(prompt.tokens)
        assert restoration.pages_restored == 3
        for seen, wanted in zip(
            tensors_of(restoration.cache, 3 * PAGE), prompt.states, strict=True
        ):
            error = (seen.float() - wanted.float()).norm() / wanted.float().norm()
            assert 0.01 < error < 0.04
        assert len(prompt.go_on(restoration.cache)) == NEW_TOKENS
        assert manager.leaks() == []


def test_pages_come_back_from_ssd(engine: GreedyEngine, tmp_path: Path) -> None:
    config = Config(
        pool_nbytes=32 * MIB,
        lock_memory=False,
        ssd_cache_paths=tmp_path / "kv",
        ssd_cache_capacity_nbytes=32 * MIB,
    )
    with Manager(config) as manager, OrbitKVCache(manager, engine.model) as kv:
        prompt = Prompt(kv, engine, make_tokens(4 * PAGE + 1))
        assert manager.flush(evict_dram=True).unwritten == 0
        restoration = kv.restore(prompt.tokens)
        assert restoration.sources == {Tier.DRAM: 0, Tier.SSD: 4}
        assert_same_bytes(tensors_of(restoration.cache, 4 * PAGE), prompt.states)
        assert manager.leaks() == []


def test_generate_restores_what_an_earlier_one_saved(
    manager: Manager, engine: GreedyEngine
) -> None:
    tokens = make_tokens(2 * PAGE + 4)
    with OrbitKVCache(manager, engine.model) as kv:
        kv.generate(tokens, max_new_tokens=PAGE).ticket.result()
        again = kv.generate(torch.tensor([tokens], device="cuda"), max_new_tokens=PAGE)
        assert again.restoration.pages_restored == 2
        assert again.sequences.device.type == "cuda"
        assert again.sequences.shape == (1, 3 * PAGE + 4)
        again.ticket.result()
    assert manager.leaks() == []


def test_a_model_has_one_fingerprint_wherever_it_is(model: transformers.PreTrainedModel) -> None:
    assert fingerprint(make_model(device="cpu")) == fingerprint(model)
    assert fingerprint(make_model(seed=7)) != fingerprint(model)


def test_a_model_on_two_devices_is_refused(manager: Manager) -> None:
    spread = make_model()
    spread.model.layers[1].to("cpu")
    with pytest.raises(GeometryError, match="on cpu, cuda:0; accepted: the CPU, or one NVIDIA GPU"):
        OrbitKVCache(manager, spread)
    assert manager.leaks() == []


# Graphs: the last token's forward, a band at a time.


@pytest.mark.parametrize("bands", [1, 3, 5])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3"])
def test_graphs_find_the_tokens_that_python_finds(manager: Manager, kind: str, bands: int) -> None:
    engine = GreedyEngine(make_model(kind))
    with OrbitKVCache(manager, engine.model, bands=bands) as kv:
        prompts = [Prompt(kv, engine, make_tokens(3 * PAGE + 1, seed)) for seed in (6, 7, 8)]
        landing = kv.make_landing(3 * PAGE)
        step = GraphedStep(engine, landing, pages=3)
        for prompt in (*prompts, *prompts):
            poison(landing)
            first = step.run(prompt.tokens[-1], kv.begin(prompt.tokens, landing))
            assert first == prompt.kept[0]
            assert_same_bytes(list(landing.tensors), prompt.states)
            assert step.run(prompt.tokens[-1]) == first  # what is there can be asked again
            cache = step.grown_cache()
            assert cache.get_seq_length() == 3 * PAGE + 1
            assert prompt.go_on(cache, first) == prompt.kept
    assert manager.leaks() == []


@pytest.mark.parametrize("band", [0, 2])
def test_graphs_stop_where_a_page_was_lost(
    manager: Manager, engine: GreedyEngine, band: int
) -> None:
    with OrbitKVCache(manager, engine.model, bands=3) as kv:
        prompt = Prompt(kv, engine, make_tokens(3 * PAGE + 1))
        landing = kv.make_landing(3 * PAGE)
        step = GraphedStep(engine, landing, pages=3)
        page_hash = hash_pages(kv.namespace, prompt.tokens, PAGE)[1]
        key = StateKey(kv._homes[band].namespace, page_hash, "attention")
        copy = manager.core.catalogue.find(key.digest, Tier.DRAM)
        assert copy is not None
        assert copy.memory is not None
        copy.memory[copy.nbytes // 2] ^= 1
        arrival = kv.begin(prompt.tokens, landing)
        assert step.run(prompt.tokens[-1], arrival) is None
        assert arrival.wait_for_all() == 1
        restoration = kv.restore(prompt.tokens, landing)
        assert (restoration.pages_restored, restoration.pages_missed) == (1, 2)
        assert_same_bytes(
            tensors_of(restoration.cache, PAGE), [state[:, :, :PAGE] for state in prompt.states]
        )
        assert len(prompt.go_on(restoration.cache)) == NEW_TOKENS
    assert manager.leaks() == []


def test_graphs_of_a_model_on_a_cpu_are_refused(manager: Manager) -> None:
    model = make_model(device="cpu")
    with OrbitKVCache(manager, model) as kv:
        landing = kv.make_landing(PAGE)
        with pytest.raises(ConfigError, match="a graph of a model on cpu; accepted: on cuda"):
            GraphedStep(GreedyEngine(model), landing, pages=1)
    assert manager.leaks() == []
