"""OrbitKVCache: save and restore the KV cache of a Hugging Face causal language model.

A ``DynamicCache`` keeps one K and one V tensor a layer, [1, heads, tokens, head_dim], on the CPU or
on a GPU. Seen as [heads, page, 32, head_dim] it is a paged cache, strided but in place: nothing is
copied to save it, and a restored one is filled where the model will read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from orbitkv.cache.catalogue import Tier
from orbitkv.engines.device import DEVICES, mark_stream
from orbitkv.engines.landing import Arrival, Landing, SaveTicket
from orbitkv.errors import Closed, ConfigError, GeometryError
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.manager import Manager
from orbitkv.segment import (
    DTYPE_NBYTES,
    Axis,
    Geometry,
    ModelIdentity,
    Role,
    Slot,
    digest_fields,
    hash_pages,
)

PAGE_TOKENS = 32
SAMPLES = 64
# transformers types its models and caches by protocols too narrow to use; checked here instead.
Model = Any  # transformers.PreTrainedModel
Cache = Any  # transformers.DynamicCache
TokenIds = Any  # int[1, tokens] or int[tokens]: tensor, array or list

_AXES = (Axis.HEAD, Axis.PAGE, Axis.TOKEN, Axis.DIM)
_VOLATILE = ("_name_or_path", "transformers_version")


@dataclass(frozen=True, slots=True)
class Restoration:
    """A cache that holds a prompt's longest restorable prefix.

    Attributes:
        cache: A fresh ``DynamicCache``, the caller's own. Empty where nothing was restored. In a
            landing, its tensors are the landing's until the model has grown it.
        tokens: Tokens it holds: compute from ``input_ids[:, tokens:]`` on, always one or more.
        pages_restored: Pages it holds.
        pages_missed: Full pages after them that must be computed. The page of the last token is
            not counted: that token is always computed, because its logits are needed.
        sources: How many of the restored pages came from each tier.
    """

    cache: DynamicCache
    tokens: int
    pages_restored: int
    pages_missed: int
    sources: Mapping[Tier, int]


@dataclass(frozen=True, slots=True)
class Generation:
    """What ``OrbitKVCache.generate`` did.

    Attributes:
        sequences: int64[1, tokens]: the prompt, then what was generated.
        restoration: What did not have to be computed. Its cache is the one that was grown.
        ticket: The save of the full pages of both; it may still be under way.
    """

    sequences: torch.Tensor
    restoration: Restoration
    ticket: SaveTicket


class OrbitKVCache:
    """Saves and restores the cache of one model; use it as a context manager.

    ::

        with Manager(Config(pool_nbytes=2 * GIB)) as manager, OrbitKVCache(manager, model) as kv:
            restoration = kv.restore(input_ids)
            output = model(input_ids[:, restoration.tokens :], cache=restoration.cache)
            kv.save(input_ids, restoration.cache)

    One sequence at a time (batch 1, no padding), but any number of caches at once, from any
    thread. Two models share pages only if name, configuration, dtype, attention implementation
    and a sample of every parameter agree. The sample is taken at construction: after changing
    weights, make a new one.

    Args:
        manager: Stays the caller's, and must outlive this.
        model: A causal model in evaluation mode, on the CPU or on one GPU, whose cache is a
            ``DynamicCache`` of full attention layers with equally wide K and V. On a GPU torch's
            current stream must be the one that the model runs on, whenever this is called.
        salt: Keeps tenants apart that must not see each other's prefixes.
        page_tokens: Tokens of a page. A tail shorter than that is always computed.
        bands: Parts that the layers are stored in, and come back in, one after the other: see
            ``begin``. Part of what a page is, so that other numbers do not find it.

    Raises:
        ConfigError: there are fewer layers than bands.
        GeometryError: the model keeps another kind of cache, naming all that is not accepted.
        ImpossibleRequest: one page is larger than the manager's pool.
        Unavailable: the model is on a GPU that the manager's lanes cannot use.
    """

    def __init__(
        self,
        manager: Manager,
        model: Model,
        *,
        salt: bytes = b"",
        page_tokens: int = PAGE_TOKENS,
        bands: int = 1,
    ) -> None:
        self._manager = manager
        self._model = model
        self.geometry = declare_geometry(model, page_tokens=page_tokens)
        layers = len(self.geometry.slots) // 2
        if not 1 <= bands <= layers:
            raise ConfigError(f"bands: {bands}; accepted: 1 to {layers}, the layers of this model")
        self._first_layers = [layers * band // bands for band in range(bands)]
        ends = [*self._first_layers[1:], layers]
        self._bands = [
            slice(2 * first, 2 * end) for first, end in zip(self._first_layers, ends, strict=True)
        ]
        self._geometries = [Geometry(page_tokens, self.geometry.slots[b]) for b in self._bands]
        # Of a local checkpoint the name alone: its path differs between hosts, the KV does not.
        name = Path(model.config.name_or_path or type(model).__name__).name
        self.identity = ModelIdentity(name, fingerprint(model), salt=salt)
        # One page, never filled: it asks what there is, before anything is allocated for it.
        self._homes = self._register(self._allocate(1))
        self._instances = list(self._homes)
        self._housekeeper = ThreadPoolExecutor(1, thread_name_prefix="orbitkv-transformers")

    @property
    def namespace(self) -> str:
        """Of the first band; the pages of all bands go by hashes made in it."""
        return self._homes[0].namespace

    def restore(self, input_ids: TokenIds, landing: Landing | None = None) -> Restoration:
        """Put the longest restorable prefix into a fresh cache, and wait until it is there.

        Args:
            input_ids: int[1, tokens] or int[tokens]: tensor, array or list.
            landing: Where to put it, of this object's own making. None: into tensors of its own,
                which takes some milliseconds more on a GPU.

        Raises:
            GeometryError: a batch of more than one sequence.
            OrbitError: the restore failed, as its text says; the prompt can still be computed.
        """
        hashes = self._hashes(input_ids)
        if landing is not None:
            return self._restoration(Arrival(self._manager, landing, hashes), landing, hashes)
        # Held until the arrival holds them, so that it finds no fewer pages.
        with self._manager.query(self._homes[0], hashes) as found:
            if not found.hashes:
                cache = DynamicCache(config=self._model.config)
                return Restoration(cache, 0, 0, len(hashes), dict.fromkeys(Tier, 0))
            landing = self._land(len(found.hashes))
            try:
                arrival = Arrival(self._manager, landing, hashes)
                found.release()
                return self._restoration(arrival, landing, hashes)
            finally:
                self._forget(landing.instances)

    def begin(self, input_ids: TokenIds, landing: Landing) -> Arrival:
        """Start to put the longest restorable prefix into a landing, and wait for nothing.

        For engines that can work on the first bands while the others are on their way. One
        arrival at a time: the next into the same landing waits for this one.
        """
        return Arrival(self._manager, landing, self._hashes(input_ids))

    def make_landing(self, tokens: int) -> Landing:
        """Make tensors for prefixes of up to so many tokens, for use again and again.

        They are kept until this object is closed.

        Raises:
            ConfigError: fewer tokens than a page has.
        """
        pages = tokens // self.geometry.page_tokens
        if pages < 1:
            accepted = f"{self.geometry.page_tokens} or more, a page"
            raise ConfigError(f"landing for {tokens} tokens; accepted: {accepted}")
        landing = self._land(pages)
        self._instances += landing.instances
        return landing

    def save(self, input_ids: TokenIds, cache: Cache) -> SaveTicket:
        """Save every full page of a cache, without waiting and without copying.

        Going on with the cache is safe: a ``DynamicLayer`` grows by making new tensors, and the
        old ones are kept until the ticket has ended. Only writing into them in place is not. On a
        GPU the save begins where the current stream is now, and nothing waits for it.

        Args:
            input_ids: The tokens whose states the cache holds, as for ``restore``. One more than
                it holds (the last that was generated) is accepted, as is any other number: the
                shorter of the two counts.
            cache: A ``DynamicCache`` of this model, batch 1.

        Raises:
            GeometryError: another kind of cache or batch, or tensors other than declared.
        """
        tokens = _token_ids(input_ids)
        layers = self._layers(cache)
        page_tokens = self.geometry.page_tokens
        pages = min(len(tokens), cache.get_seq_length()) // page_tokens
        if pages == 0:
            return SaveTicket((), [self._manager.publish(home, ()) for home in self._homes])
        hashes = hash_pages(self.namespace, tokens[: pages * page_tokens], page_tokens)
        tensors = [
            tensor[:, :, : pages * page_tokens]
            for layer in layers
            for tensor in (layer.keys, layer.values)
        ]
        places = list(zip(hashes, range(pages), strict=True))
        ready = mark_stream(self._model.device)
        instances = self._register(tensors)
        try:
            tickets = [
                self._manager.publish(instance, places, ready=ready) for instance in instances
            ]
        finally:
            self._forget(instances)
        return SaveTicket(hashes, tickets)

    def generate(
        self, input_ids: TokenIds, *, max_new_tokens: int, **options: object
    ) -> Generation:
        """Restore what is there, generate greedily with ``model.generate``, save what is new.

        Args:
            input_ids: As for ``restore``.
            options: More for ``model.generate``.

        Raises:
            ConfigError: an option asks for several sequences.
            GeometryError, OrbitError: as ``restore`` and ``save``.
        """
        for option in ("num_beams", "num_return_sequences"):
            if options.get(option, 1) != 1:
                raise ConfigError(f"{option}: {options[option]!r}; accepted: 1 sequence at a time")
        restoration = self.restore(input_ids)
        prompt = torch.tensor([_token_ids(input_ids)], device=self._model.device)
        settings = {
            "do_sample": False,
            "attention_mask": torch.ones_like(prompt),
            cache_keyword(self._model): restoration.cache,
            **options,
            "return_dict_in_generate": True,
        }
        sequences = self._model.generate(
            prompt, max_new_tokens=max_new_tokens, **settings
        ).sequences
        return Generation(sequences, restoration, self.save(sequences, restoration.cache))

    def close(self) -> None:
        """Wait for the saves under way, and forget the model. Idempotent."""
        self._forget(self._instances)
        self._housekeeper.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _hashes(self, input_ids: TokenIds) -> list[bytes]:
        """Hash the full pages before the last token, which is always computed."""
        tokens = _token_ids(input_ids)[:-1]
        return hash_pages(self.namespace, tokens, self.geometry.page_tokens)

    def _restoration(
        self, arrival: Arrival, landing: Landing, hashes: Sequence[bytes]
    ) -> Restoration:
        """Wait until all of it has come, and make a cache of it."""
        pages = arrival.wait_for_all()
        if pages:
            cache = landing.cache(self._model.config, pages)
        else:
            cache = DynamicCache(config=self._model.config)
        tokens = pages * self.geometry.page_tokens
        return Restoration(cache, tokens, pages, len(hashes) - pages, arrival.sources())

    def _land(self, pages: int) -> Landing:
        tensors = self._allocate(pages)
        return Landing(tensors, pages, self._first_layers, self._register(tensors))

    def _allocate(self, pages: int) -> list[torch.Tensor]:
        """Make the tensors of a cache of so many pages, K and V of each layer in turn.

        One a slot, from torch's own allocator: memory that earlier caches gave back is used
        again, where one mapping for all would be faulted in anew at every restore.
        """
        tokens = pages * self.geometry.page_tokens
        return [
            torch.empty(
                (1, slot.heads, tokens, slot.head_dim),
                dtype=getattr(torch, slot.dtype),
                device=self._model.device,
            )
            for slot in self.geometry.slots
        ]

    def _register(self, tensors: Sequence[torch.Tensor]) -> list[Instance]:
        """Register tensors of shape [1, heads, pages * page_tokens, head_dim] as pages of bands."""
        instances: list[Instance] = []
        try:
            for geometry, band in zip(self._geometries, self._bands, strict=True):
                views = {
                    slot.name: _as_pages(tensor, geometry.page_tokens)
                    for slot, tensor in zip(geometry.slots, tensors[band], strict=True)
                }
                instances.append(self._manager.register(geometry, views, model=self.identity))
        except BaseException:
            for instance in instances:
                self._manager.unregister(instance)
            raise
        return instances

    def _forget(self, instances: Iterable[Instance]) -> None:
        """Let instances and their tensors go once nothing reads or fills them, not waiting."""

        def forget(instance: Instance) -> None:
            # A manager that is closed first has forgotten it already.
            with contextlib.suppress(Closed, CancelledError):
                self._manager.unregister(instance)

        with contextlib.suppress(RuntimeError):  # closed before, and so are the instances
            for instance in instances:
                self._housekeeper.submit(forget, instance)

    def _layers(self, cache: Cache) -> list[Any]:
        """Check that a cache is of the kind that was declared.

        Raises:
            GeometryError: naming what it is, and what is accepted.
        """
        if not isinstance(cache, DynamicCache):
            raise GeometryError((f"cache {type(cache).__name__}; accepted: DynamicCache",))
        if faults := _layer_faults(cache):
            raise GeometryError(tuple(faults))
        layers: list[Any] = cache.layers
        declared = len(self.geometry.slots) // 2
        filled = [layer for layer in layers if layer.get_seq_length()]
        if filled and len(filled) != declared:
            faults.append(f"cache of {len(filled)} filled layers; declared: {declared}")
        lengths = {layer.get_seq_length() for layer in filled}
        if len(lengths) > 1:
            faults.append(f"layers of {sorted(lengths)} tokens; accepted: the same in each")
        batches = {layer.keys.shape[0] for layer in filled} - {1}
        faults += [f"cache of batch {batch}; accepted: 1" for batch in sorted(batches)]
        if faults:
            raise GeometryError(tuple(faults))
        return filled


def declare_geometry(model: Model, *, page_tokens: int = PAGE_TOKENS) -> Geometry:
    """Declare a model's pages from its configuration.

    Raises:
        GeometryError: with all that keeps the model's cache from being a plain ``DynamicCache``.
    """
    faults = []
    config = model.config.get_text_config(decoder=True)
    if model.config.is_encoder_decoder:
        faults.append("an encoder-decoder model; accepted: decoder only")
    if getattr(model, "_is_stateful", False):
        faults.append("a model with recurrent state; accepted: attention only")
    if getattr(config, "kv_lora_rank", None):
        faults.append(
            f"latent attention (kv_lora_rank {config.kv_lora_rank}); accepted: K and V of one width"
        )
    places = sorted({str(tensor.device) for _, tensor in _weights(model)})
    if len(places) > 1 or model.device.type not in DEVICES:
        faults.append(f"a model on {', '.join(places)}; accepted: the CPU, or one NVIDIA GPU")
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPE_NBYTES:
        faults.append(f"dtype {dtype}; accepted: {', '.join(DTYPE_NBYTES)}")
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    for name, value in (("num_key_value_heads", heads), ("head_dim", head_dim)):
        if not isinstance(value, int):
            faults.append(f"{name} {value!r}; accepted: one number for all layers")
    cache = DynamicCache(config=model.config)
    faults += _layer_faults(cache)
    if faults:
        raise GeometryError(tuple(faults))
    return Geometry(
        page_tokens,
        tuple(
            Slot(
                name=f"{layer}.{role}",
                layer=layer,
                role=role,
                dtype=dtype,
                heads=heads,
                head_dim=head_dim,
                axes=_AXES,
            )
            for layer in range(len(cache.layers) or config.num_hidden_layers)
            for role in (Role.K, Role.V)
        ),
    )


def fingerprint(model: Model) -> str:
    """Tell models apart whose KV differs: by configuration, attention, and sampled weights.

    Every parameter and buffer gives its name, shape, dtype and up to 64 evenly spaced elements.
    Training changes practically all elements of a tensor; an edit of a few single ones may go
    unseen, and then only ``salt`` tells the two models apart.
    """
    config = model.config
    settings = {name: value for name, value in config.to_dict().items() if name not in _VOLATILE}
    fields = [
        type(model).__qualname__.encode(),
        str(getattr(config, "_commit_hash", None)).encode(),
        str(getattr(config, "_attn_implementation", None)).encode(),
        json.dumps(settings, sort_keys=True, default=str).encode(),
    ]
    for name, tensor in _weights(model):
        fields += [name.encode(), str(tensor.dtype).encode(), str(tuple(tensor.shape)).encode()]
        fields.append(_sample(tensor))
    return hashlib.sha256(digest_fields(fields)).hexdigest()


def cache_keyword(model: Model) -> str:
    """The name by which this model's ``forward`` takes a cache: it changed in transformers 5."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _weights(model: Model) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _sample(tensor: torch.Tensor) -> bytes:
    """Bytes of up to 64 evenly spaced elements, the first and the last among them."""
    if tensor.is_meta:
        raise ConfigError("model: weights on the meta device; accepted: loaded weights")
    flat = tensor.detach().reshape(-1)
    if not flat.numel():
        return b""
    picked = torch.linspace(0, flat.numel() - 1, min(SAMPLES, flat.numel()), dtype=torch.float64)
    return flat[picked.long().to(flat.device)].view(torch.uint8).cpu().numpy().tobytes()


def _as_pages(tensor: torch.Tensor, page_tokens: int) -> torch.Tensor:
    """See [1, heads, tokens, head_dim] as [heads, page, token, head_dim], in place."""
    heads, tokens, width = tensor.shape[1:]  # its own, for the manager to compare
    return tensor[0].view(heads, tokens // page_tokens, page_tokens, width)


def _layer_faults(cache: DynamicCache) -> list[str]:
    kinds = sorted(
        {type(layer).__name__ for layer in cache.layers if type(layer) is not DynamicLayer}
    )
    return (
        [f"layers of {', '.join(kinds)}; accepted: DynamicLayer, full attention"] if kinds else []
    )


def _token_ids(input_ids: TokenIds) -> list[int]:
    """Token ids of the one sequence of a batch.

    Raises:
        GeometryError: there are more sequences than one, or no token.
    """
    tokens = input_ids.tolist() if hasattr(input_ids, "tolist") else list(input_ids)
    if tokens and isinstance(tokens[0], (list, tuple)):
        if len(tokens) > 1:
            raise GeometryError((f"batch of {len(tokens)} sequences; accepted: 1",))
        tokens = list(tokens[0])
    if not tokens:
        raise GeometryError(("input_ids without a token; accepted: 1 or more",))
    return tokens
