"""OrbitKVCache: save and restore the KV cache of a Hugging Face causal language model.

A ``DynamicCache`` keeps one K and one V tensor a layer, [1, heads, tokens, head_dim]. Seen as
[heads, page, 32, head_dim] it is a paged cache, strided but in place: nothing is copied to save
it, and a restored one is filled where the model will read it.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

from orbitkv.cache.catalogue import Tier
from orbitkv.errors import Closed, ConfigError, GeometryError
from orbitkv.runtime.core import Instance
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
from orbitkv.stages.ticket import Failed, Restored, Ticket

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
        cache: A fresh ``DynamicCache``, the caller's own. Empty where nothing was restored.
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
    ticket: Ticket


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
        model: A causal model in evaluation mode, on the CPU, whose cache is a ``DynamicCache`` of
            full attention layers with equally wide K and V.
        salt: Keeps tenants apart that must not see each other's prefixes.
        page_tokens: Tokens of a page. A tail shorter than that is always computed.

    Raises:
        GeometryError: the model keeps another kind of cache, naming all that is not accepted.
        ImpossibleRequest: one page is larger than the manager's pool.
    """

    def __init__(
        self,
        manager: Manager,
        model: Model,
        *,
        salt: bytes = b"",
        page_tokens: int = PAGE_TOKENS,
    ) -> None:
        self._manager = manager
        self._model = model
        self.geometry = declare_geometry(model, page_tokens=page_tokens)
        # Of a local checkpoint the name alone: its path differs between hosts, the KV does not.
        name = Path(model.config.name_or_path or type(model).__name__).name
        self.identity = ModelIdentity(name, fingerprint(model), salt=salt)
        # One page, never filled: it asks what there is, before anything is allocated for it.
        self._home = self._register(self._allocate(1))
        self._housekeeper = ThreadPoolExecutor(1, thread_name_prefix="orbitkv-transformers")

    def restore(self, input_ids: TokenIds) -> Restoration:
        """Put the longest restorable prefix into a fresh cache, and wait until it is there.

        Args:
            input_ids: int[1, tokens] or int[tokens]: tensor, array or list.

        Raises:
            GeometryError: a batch of more than one sequence.
            OrbitError: the restore failed, as its text says; the prompt can still be computed.
        """
        tokens = _token_ids(input_ids)
        page_tokens = self.geometry.page_tokens
        hashes = hash_pages(self._home.namespace, tokens[:-1], page_tokens)
        cache = DynamicCache(config=self._model.config)
        with self._manager.query(self._home, hashes) as found:
            if not found.hashes:
                return Restoration(cache, 0, 0, len(hashes), dict.fromkeys(Tier, 0))
            tensors = self._allocate(len(found.hashes))
            instance = self._register(tensors)
            try:
                # `found` is held until here, so that this lease has no fewer pages.
                lease = self._manager.query(instance, found.hashes)
                pages = {page_hash: index for index, page_hash in enumerate(lease.hashes)}
                outcome = self._manager.restore(lease, pages).result()
            finally:
                self._forget(instance)
        if isinstance(outcome, Failed):
            raise outcome.error
        placed = frozenset(outcome.restored if isinstance(outcome, Restored) else ())
        whole = next((i for i, h in enumerate(lease.hashes) if h not in placed), len(lease.hashes))
        tiers = [copies[0].tier for copies in lease.copies[:whole]]
        if whole:
            layers: list[Any] = cache.layers
            for layer, keys, values in zip(layers, tensors[::2], tensors[1::2], strict=True):
                layer.lazy_initialization(keys, values)
                layer.keys = keys[:, :, : whole * page_tokens]
                layer.values = values[:, :, : whole * page_tokens]
        return Restoration(
            cache,
            whole * page_tokens,
            whole,
            len(hashes) - whole,
            {tier: tiers.count(tier) for tier in Tier},
        )

    def save(self, input_ids: TokenIds, cache: Cache) -> Ticket:
        """Save every full page of a cache, without waiting and without copying.

        Going on with the cache is safe: a ``DynamicLayer`` grows by making new tensors, and the
        old ones are kept until the ticket has ended. Only writing into them in place is not.

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
            return self._manager.publish(self._home, ())
        hashes = hash_pages(self._home.namespace, tokens[: pages * page_tokens], page_tokens)
        tensors = [
            tensor[:, :, : pages * page_tokens]
            for layer in layers
            for tensor in (layer.keys, layer.values)
        ]
        instance = self._register(tensors)
        try:
            return self._manager.publish(instance, list(zip(hashes, range(pages), strict=True)))
        finally:
            self._forget(instance)

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
        prompt = torch.tensor([_token_ids(input_ids)])
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
        self._forget(self._home)
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

    def _allocate(self, pages: int) -> list[torch.Tensor]:
        """Make the tensors of a cache of so many pages, K and V of each layer in turn.

        One a slot, from torch's own allocator: memory that earlier caches gave back is used
        again, where one mapping for all would be faulted in anew at every restore.
        """
        tokens = pages * self.geometry.page_tokens
        return [
            torch.empty((1, slot.heads, tokens, slot.head_dim), dtype=getattr(torch, slot.dtype))
            for slot in self.geometry.slots
        ]

    def _register(self, tensors: Sequence[torch.Tensor]) -> Instance:
        """Register tensors of shape [1, heads, pages * page_tokens, head_dim] as pages."""
        views = {}
        for slot, tensor in zip(self.geometry.slots, tensors, strict=True):
            heads, tokens, width = tensor.shape[1:]  # its own, for the manager to compare
            pages = tokens // self.geometry.page_tokens
            views[slot.name] = tensor[0].view(heads, pages, self.geometry.page_tokens, width)
        return self._manager.register(self.geometry, views, model=self.identity)

    def _forget(self, instance: Instance) -> None:
        """Let an instance and its tensors go once nothing reads or fills them, not waiting."""

        def forget() -> None:
            # A manager that is closed first has forgotten it already.
            with contextlib.suppress(Closed, CancelledError):
                self._manager.unregister(instance)

        with contextlib.suppress(RuntimeError):  # closed before, and so is the instance
            self._housekeeper.submit(forget)

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
    if model.device.type != "cpu":
        faults.append(f"a model on {model.device}; accepted in this release: cpu")
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
    return flat[picked.long()].view(torch.uint8).numpy().tobytes()


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
