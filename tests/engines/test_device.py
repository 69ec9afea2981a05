"""A GPU that cannot be had is refused in one line, and a CPU needs nothing of it."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from orbitkv.engines import device  # noqa: E402
from orbitkv.errors import ConfigError  # noqa: E402

CPU = torch.device("cpu")


def test_what_the_lanes_lack_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_unavailable", lambda: "CuPy is not installed")
    with pytest.raises(ConfigError, match="--device cuda: CuPy is not installed; accepted: cpu"):
        device.check_device("cuda")
    device.check_device("cpu")


@pytest.mark.parametrize(
    ("cuda", "told"),
    [(None, "torch 2.0 has no CUDA; "), ("13.0", "torch 2.0 is built for CUDA 13.0, but finds no")],
)
def test_what_torch_lacks_is_told(
    cuda: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "__version__", "2.0")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    with pytest.raises(ConfigError, match=told):
        device.check_device("cuda")


def test_a_gpu_that_all_can_use_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_unavailable", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    device.check_device("cuda")


def test_on_a_cpu_nothing_is_ordered_or_waited_for() -> None:
    assert device.mark_stream(CPU) is None
    device.await_stream(CPU)
    device.order_after(None, CPU)
    assert device.describe_device(CPU) == "cpu"
