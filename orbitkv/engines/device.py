"""What an engine and the lanes owe each other where a model's tensors are in GPU memory.

The engine works on torch's current stream, the lanes on streams of their own, and nothing but what
is here orders the two. On a CPU, where a call that writes returns when it has written, none of it
does anything. Imports torch when it is called, never before.
"""

from __future__ import annotations

from typing import Any

from orbitkv.codecs import open_codec
from orbitkv.codecs.base import GpuCodec
from orbitkv.errors import ConfigError
from orbitkv.probe import cuda_unavailable

DEVICES = ("cpu", "cuda")

Device = Any  # torch.device


def check_device(name: str) -> None:
    """Refuse, in one line, to put a model where neither torch nor the lanes can reach it.

    Raises:
        ConfigError: with what is missing.
    """
    if name != "cuda":
        return
    import torch

    reason = cuda_unavailable()
    if reason is None and not torch.cuda.is_available():
        build = f"is built for CUDA {torch.version.cuda}, but finds no GPU that it can use"
        reason = f"torch {torch.__version__} {build if torch.version.cuda else 'has no CUDA'}"
    if reason:
        raise ConfigError(f"--device cuda: {reason}; accepted: cpu, or cuda where that can be had")


def check_codec(name: str, device: str, nvcomp_library: str | None) -> None:
    """Refuse, in one line and before the first minute has passed, a codec that cannot be had.

    Raises:
        ConfigError: no codec has this name, or it needs the model on a GPU.
        Unavailable: with what is missing.
    """
    opened = open_codec(
        name, rotation_seed=0, on_compile=lambda _: None, nvcomp_library=nvcomp_library
    )
    if isinstance(opened, GpuCodec) and device != "cuda":
        raise ConfigError(f"--codec {name}: with --device {device}; accepted: with --device cuda")


def describe_device(device: Device) -> str:
    """Name the processor that a model's tensors belong to: ``cpu``, or the GPU's own name."""
    import torch

    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def mark_stream(device: Device) -> Any:  # noqa: ANN401 - a torch.cuda.Event
    """An event of the current stream, after all that it was given so far; None on a CPU."""
    if device.type != "cuda":
        return None
    import torch

    return torch.cuda.current_stream(device).record_event()


def await_stream(device: Device) -> None:
    """Block until all is over that the current stream was given."""
    if device.type == "cuda":
        import torch

        torch.zeros((), device=device).item()  # one element is read behind everything else


def order_after(ready: Any, device: Device) -> None:  # noqa: ANN401 - ``Restored.ready``
    """Let what the current stream is given from here on read restored pages."""
    if ready is not None:
        import torch

        ready.wait(torch.cuda.current_stream(device))
