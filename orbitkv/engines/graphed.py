"""GraphedStep: a restored prompt's last token, computed by CUDA graphs instead of by Python."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import torch
from transformers import DynamicCache

from orbitkv.engines.checkpoint import GreedyEngine
from orbitkv.engines.landing import Arrival, Landing, make_cache
from orbitkv.errors import ConfigError

_WARM_UP_ROUNDS = 3


class GraphedStep:
    """The forward of the one token after a prefix, as CUDA graphs: one a band of the landing.

    To launch the kernels of one token takes Python several times as long as they run. A graph
    launches those of a band at once, and as soon as the band is there, so that the GPU computes on
    it while the bands after it are on their way.

    The graphs hold for one length of prefix, and for the landing's own tensors.

    Args:
        engine: With a model on a GPU, whose ``base_model.layers`` run in order.
        pages: Of the prefix, all of them in the landing.

    Raises:
        ConfigError: the model is on a CPU, or its layers cannot be found.
    """

    def __init__(self, engine: GreedyEngine, landing: Landing, pages: int) -> None:
        self.pages = pages
        self._engine = engine
        self._landing = landing
        if landing.device.type != "cuda":
            raise ConfigError(f"a graph of a model on {landing.device}; accepted: on cuda")
        layers = getattr(engine.model.base_model, "layers", ())
        if len(layers) != len(landing.tensors) // 2:
            kind = type(engine.model).__name__
            raise ConfigError(f"a graph of a {kind}; accepted: a model with base_model.layers")
        self._token = torch.zeros((1, 1), dtype=torch.int64, device=landing.device)
        self._graphs: list[Any] = []  # torch.cuda.CUDAGraph
        self._capture([layers[first] for first in landing.first_layers[1:]])

    def run(self, token_id: int, arrival: Arrival | None = None) -> int | None:
        """Compute the token; return the likeliest next one.

        Args:
            token_id: The one after the prefix.
            arrival: Of the prefix, in this landing. None: the prefix is there.

        Returns:
            None where the arrival brought fewer pages than the graphs read: the token is still to
            be computed, and the arrival tells what there is.

        Raises:
            OrbitError: the restore failed.
        """
        self._token.fill_(token_id)
        for band, graph in enumerate(self._graphs):
            if arrival is not None and arrival.wait(band) < self.pages:
                return None
            graph.replay()
        return int(self._next)

    def grown_cache(self) -> DynamicCache:
        """The prefix and the token that was computed last, until the next one is."""
        return make_cache(self._engine.model.config, self._grown)

    def _capture(self, later_bands: list[Any]) -> None:
        """Record one forward, and cut it before the first layer of each later band."""
        cuda: Any = torch.cuda  # partly without types
        pool = cuda.graph_pool_handle()

        def begin() -> None:
            self._graphs.append(cuda.CUDAGraph())
            # The manager's threads go on with what they do; only this one is restricted.
            self._graphs[-1].capture_begin(pool=pool, capture_error_mode="thread_local")

        def cut(*_: object) -> None:
            self._graphs[-1].capture_end()
            begin()

        # Nothing can be captured on the default stream.
        stream = cuda.Stream(self._landing.device)
        stream.wait_stream(cuda.current_stream(self._landing.device))
        with cuda.stream(stream):
            for _ in range(_WARM_UP_ROUNDS):  # what first calls allocate must not be captured
                self._forward().item()
            gc.collect()  # nor what a collection would free
            begin()
            try:
                with _hooks(later_bands, cut):
                    self._next = self._forward()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # it would only say that it is broken
                    self._graphs[-1].capture_end()
                raise
            self._graphs[-1].capture_end()
        cuda.current_stream(self._landing.device).wait_stream(stream)

    def _forward(self) -> torch.Tensor:
        cache = self._landing.cache(self._engine.model.config, self.pages)
        found: torch.Tensor = self._engine.likeliest(self._token, cache)
        layers: list[Any] = cache.layers
        # Kept from here on: tensors of a graph that nobody holds are given to the next one.
        self._grown = [tensor for layer in layers for tensor in (layer.keys, layer.values)]
        return found


@contextlib.contextmanager
def _hooks(layers: list[Any], call: Any) -> Iterator[None]:  # noqa: ANN401 - torch's hook
    """Call before the forward of each of these layers."""
    handles = [layer.register_forward_pre_hook(call) for layer in layers]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
