"""What every test on a GPU needs."""

from __future__ import annotations

from types import ModuleType

import pytest

from orbitkv.codecs.cuda.kernels import Kernels, Launcher


@pytest.fixture(scope="session")
def cupy() -> ModuleType:
    """CuPy, where there is a GPU."""
    module = pytest.importorskip("cupy", reason="no CuPy")
    if not module.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    return module


@pytest.fixture(scope="session")
def launchers(cupy: ModuleType) -> Launcher:
    """The kernels of the current device, on its default stream."""
    return Kernels(cupy.cuda.Device().id).on(cupy.cuda.Stream.null.ptr)
