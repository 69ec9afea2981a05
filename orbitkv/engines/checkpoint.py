"""A local checkpoint as an engine: loaded without a network, decoding greedily on a CPU or a GPU.

What the demo and the tests of quality put OrbitKV beside; imports torch and transformers only
when a model is loaded.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.resources
import importlib.util
import inspect
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from orbitkv.errors import ConfigError

DEFAULT_MODEL = Path(".models/smollm2")
TEXT = "texts/qualify.txt"
NEEDED = ("torch", "transformers")
NEEDED_FOR_GGUF = ("gguf", "accelerate")

Model = Any  # transformers.PreTrainedModel
Cache = Any  # transformers.DynamicCache
Logits = npt.NDArray[np.float32]


def check_installed(names: Sequence[str]) -> None:
    """Refuse, in one line, to go on without these modules."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"not installed: {', '.join(missing)}; to get all that a real model needs: "
            "pip install 'orbitkv[transformers]'"
        )


def read_text(path: Path | None, *, flag: str) -> tuple[str, str]:
    """Read a text, and name it; the one that comes with OrbitKV where no path is given.

    Args:
        flag: The option that named the path, for errors.
    """
    if path is None:
        packaged = importlib.resources.files("orbitkv") / TEXT
        # The first paragraph says what the text is made of.
        return packaged.read_text(encoding="utf-8").partition("\n\n")[2], f"orbitkv/{TEXT}"
    try:
        return path.read_text(encoding="utf-8"), str(path)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: {error}; accepted: UTF-8 text") from error
    except OSError as error:
        accepted = "a readable text file"
        raise ConfigError(f"{flag} {path}: {error.strerror}; accepted: {accepted}") from error


def find_model(path: Path) -> tuple[Path, Path | None]:
    """Tell a GGUF file from a checkpoint directory; the second of the pair is the GGUF file."""
    accepted = "a directory with one .gguf file, or with a checkpoint's config.json"
    if path.is_file() and path.suffix == ".gguf":
        return path, path
    if not path.is_dir():
        how = "; `make model` fetches it" if path == DEFAULT_MODEL else ""
        raise ConfigError(f"--model {path}: no such directory; accepted: {accepted}{how}")
    found = sorted(path.glob("*.gguf"))
    if len(found) == 1:
        return found[0], found[0]
    if found:
        names = ", ".join(file.name for file in found)
        raise ConfigError(f"--model {path}: {names}; accepted: one .gguf file, named by its path")
    if not (path / "config.json").is_file():
        raise ConfigError(f"--model {path}: holds neither; accepted: {accepted}")
    return path, None


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Keep transformers' bars out of ours, and turn whatever a damaged file raises into a line."""
    import transformers

    logging: Any = transformers.utils.logging
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--model {path}: {type(error).__name__}: {first}; "
            "accepted: a causal language model with its tokenizer that transformers loads"
        ) from error


def _source(path: Path) -> dict[str, Any]:
    """Arguments that name local files to transformers, and keep it off the network."""
    if path.is_file():
        where = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    else:
        where = {"pretrained_model_name_or_path": str(path)}
    return where | {"local_files_only": True}


def tokenize(path: Path, gguf_file: Path | None, text: str) -> tuple[list[int], Any]:
    """Token ids of a text, and the tokenizer that gives text back."""
    from transformers import AutoTokenizer

    with _loading(path):
        tokenizer = AutoTokenizer.from_pretrained(**_source(gguf_file or path))
        return list(tokenizer(text).input_ids), tokenizer


def load_model(path: Path, dtype: str, device: str = "cpu") -> Model:
    """Load a model; a GGUF's weights dequantised, else every forward unpacks them.

    Args:
        device: ``cpu`` or ``cuda``, which ``check_device`` let pass.
    """
    import torch
    import transformers

    options = _source(path) | {"dtype": getattr(torch, dtype)}
    if path.is_file():
        options["quantization_config"] = transformers.GgufConfig(dequantize=True)
    loader: Any = transformers.AutoModelForCausalLM
    with _loading(path):
        return loader.from_pretrained(**options).eval().to(device)


class GreedyEngine:
    """A model that continues prompts greedily, one at a time."""

    def __init__(self, model: Model) -> None:
        from orbitkv.engines.transformers import cache_keyword

        self.model = model
        self._cache_keyword = cache_keyword(model)
        keeps = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._options = {"logits_to_keep": 1} if keeps else {}

    def logits(self, token_ids: Sequence[int], cache: Cache) -> Logits:
        """Compute the tokens that the cache does not hold.

        Returns:
            float32[tokens computed, vocabulary], host: what each expects to come next.
        """
        import torch

        with torch.inference_mode():
            output = self._forward(self._rest(token_ids, cache), cache)
            logits: Logits = output.logits[0].float().cpu().numpy()
            return logits

    def next_token(self, token_ids: Sequence[int], cache: Cache) -> int:
        """Compute the tokens that the cache does not hold; return the likeliest next one.

        On a GPU that waits until all of it has been computed.
        """
        return int(self.likeliest(self._rest(token_ids, cache), cache))

    def likeliest(self, rest: Any, cache: Cache) -> Any:  # noqa: ANN401 - tensors
        """Compute some more tokens, int64[1, tokens]; return the likeliest next one, int64[]."""
        import torch

        with torch.inference_mode():
            return self._forward(rest, cache, **self._options).logits[0, -1].argmax()

    def _rest(self, token_ids: Sequence[int], cache: Cache) -> Any:  # noqa: ANN401 - a tensor
        import torch

        return torch.tensor([token_ids[cache.get_seq_length() :]], device=self.model.device)

    def _forward(self, rest: Any, cache: Cache, **options: Any) -> Any:  # noqa: ANN401 - as above
        return self.model(rest, use_cache=True, **{self._cache_keyword: cache}, **options)

    def empty_cache(self) -> Cache:
        """What a prompt starts with that nothing is known of."""
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def cache_of(self, states: Sequence[Any]) -> Cache:
        """Make a cache of copies of K and V, each layer's in turn, in the model's own dtype.

        Args:
            states: Tensors of any dtype, [1, heads, tokens, head_dim], where the model is.
        """
        cache = self.empty_cache()
        for layer in range(len(states) // 2):
            keys, values = (state.to(self.model.dtype) for state in states[2 * layer :][:2])
            cache.update(keys.contiguous(), values.contiguous(), layer)
        return cache

    def decode(
        self, token_ids: Sequence[int], first: int, new_tokens: int, cache: Cache
    ) -> list[int]:
        """Go on after the first new token; return all of them."""
        grown = [*token_ids, first]
        while len(grown) < len(token_ids) + new_tokens:
            grown.append(self.next_token(grown, cache))
        return grown[len(token_ids) :]


def states_of(cache: Cache, dtype: str) -> list[Any]:
    """Copy a cache's K and V, each layer's in turn: tensors of ``dtype``, [1, heads, tokens, dim].

    Values past the range of ``dtype`` become infinite; the others are rounded to nearest even.
    """
    import torch

    return [
        tensor.to(getattr(torch, dtype), copy=True).contiguous()
        for layer in cache.layers
        for tensor in (layer.keys, layer.values)
    ]


def digest_pages(cache: Cache, pages: int, page_tokens: int) -> list[str]:
    """SHA-256 of each of a cache's first pages, over K and V of all its layers in turn."""
    import torch

    digests = [hashlib.sha256() for _ in range(pages)]
    for layer in cache.layers if pages else ():  # of an empty cache they hold no tensors
        for tensor in (layer.keys, layer.values):
            host = tensor[:, :, : pages * page_tokens].cpu()
            for digest, page in zip(digests, host.split(page_tokens, dim=2), strict=True):
                digest.update(page.contiguous().view(torch.uint8).numpy())
    return [digest.hexdigest() for digest in digests]
