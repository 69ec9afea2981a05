"""The client with pages on a GPU: two processes on one device, by CUDA IPC."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from orbitkv import Client  # noqa: E402
from orbitkv.errors import GeometryError  # noqa: E402
from orbitkv.probe import cuda_unavailable  # noqa: E402
from orbitkv.stages.ticket import Restored, Saved  # noqa: E402
from tests.builders import WAIT_S, model, numbered, toy_geometry  # noqa: E402
from tests.serving import ROOT, DaemonProcess, settled  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),  # kernels are compiled
    pytest.mark.skipif(cuda_unavailable() is not None, reason=str(cuda_unavailable())),
]

GEOMETRY = toy_geometry(layers=4, page_tokens=16, heads=4, head_dim=64)
PAGES = 32
PATHS = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[DaemonProcess]:
    daemon = DaemonProcess.start(tmp_path / "s")
    yield daemon
    code, said = daemon.end()
    assert code == 0, said
    assert "leaks=[]" in said, said


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[Client]:
    with Client(daemon.path) as client:
        yield client


def one_allocation(seed: int = 1) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """All slots as views into one allocation that begins somewhere inside torch's own."""
    torch.manual_seed(seed)
    shape = (len(GEOMETRY.slots), *GEOMETRY.shape(GEOMETRY.slots[0], PAGES))
    torch.empty(1000, device="cuda")
    whole = torch.randn(shape, device="cuda").half()
    torch.cuda.synchronize()
    return whole, {slot.name: whole[index] for index, slot in enumerate(GEOMETRY.slots)}


def save(client: Client, instance: object, **options: object) -> None:
    outcome = client.publish(instance, numbered(PAGES).items(), **options).result(WAIT_S)
    assert isinstance(outcome, Saved), outcome
    assert len(outcome.stored) == PAGES


def restore(client: Client, instance: object, **options: object) -> Restored:
    lease = client.query(instance, list(numbered(PAGES)))
    outcome = client.restore(lease, numbered(PAGES), **options).result(WAIT_S)
    assert isinstance(outcome, Restored), outcome
    assert len(outcome.restored) == PAGES
    return outcome


def test_pages_on_a_gpu_come_back_byte_for_byte(client: Client) -> None:
    whole, tensors = one_allocation()
    wanted = whole.clone()
    instance = client.register(GEOMETRY, tensors, model=model())
    save(client, instance)
    whole.zero_()
    torch.cuda.synchronize()
    restored = restore(client, instance)
    restored.ready.wait(torch.cuda.current_stream())
    assert torch.equal(whole, wanted)
    client.unregister(instance)
    assert settled(client.leaks) == []


def test_tensors_of_separate_allocations_come_back(client: Client) -> None:
    tensors = {
        slot.name: torch.randn(GEOMETRY.shape(slot, PAGES), device="cuda").half()
        for slot in GEOMETRY.slots
    }
    wanted = {name: tensor.clone() for name, tensor in tensors.items()}
    torch.cuda.synchronize()
    instance = client.register(GEOMETRY, tensors, model=model())
    save(client, instance)
    for tensor in tensors.values():
        tensor.zero_()
    torch.cuda.synchronize()
    restore(client, instance)
    assert all(torch.equal(tensors[name], wanted[name]) for name in tensors)


def test_arrays_of_cupy_come_back(client: Client, cupy: ModuleType) -> None:
    tensors = {
        slot.name: cupy.random.rand(*GEOMETRY.shape(slot, PAGES)).astype("float16")
        for slot in GEOMETRY.slots
    }
    wanted = {name: tensor.copy() for name, tensor in tensors.items()}
    cupy.cuda.Device().synchronize()
    instance = client.register(GEOMETRY, tensors, model=model())
    save(client, instance)
    for tensor in tensors.values():
        tensor[...] = 0
    cupy.cuda.Device().synchronize()
    restore(client, instance)
    assert all(bool((tensors[name] == wanted[name]).all()) for name in tensors)


def test_the_daemon_waits_for_an_event_of_the_engines_stream(client: Client) -> None:
    """The engine's events are torch's ordinary ones, which no other process could open."""
    whole, tensors = one_allocation()
    instance = client.register(GEOMETRY, tensors, model=model())
    heavy = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    whole.zero_()
    for _ in range(20):
        heavy = heavy @ heavy
    whole.fill_(3.0)
    save(client, instance, ready=torch.cuda.current_stream().record_event())
    whole.zero_()
    for _ in range(20):
        heavy = heavy @ heavy
    whole.fill_(5.0)
    restore(client, instance, ready=torch.cuda.current_stream().record_event())
    assert bool((whole == 3.0).all())


def test_events_are_used_again_and_again(client: Client) -> None:
    _, tensors = one_allocation()
    instance = client.register(GEOMETRY, tensors, model=model())
    save(client, instance)
    for _ in range(3000):  # more than a session may have open
        outcome = client.publish(
            instance, numbered(1).items(), ready=torch.cuda.current_stream().record_event()
        ).result(WAIT_S)
        assert isinstance(outcome, Saved), outcome


def test_two_engines_on_one_gpu_share_what_either_saved(daemon: DaemonProcess) -> None:
    code = """
import sys
from orbitkv import Client
from tests.builders import model
from tests.gpu.test_client import GEOMETRY, one_allocation, save
with Client(sys.argv[1]) as client:
    _, tensors = one_allocation(seed=9)
    save(client, client.register(GEOMETRY, tensors, model=model()))
"""
    command = [sys.executable, "-c", code, str(daemon.path)]
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": PATHS})
    wanted, _ = one_allocation(seed=9)
    with Client(daemon.path) as client:
        whole, tensors = one_allocation(seed=2)
        restore(client, client.register(GEOMETRY, tensors, model=model()))
        assert torch.equal(whole, wanted)


def test_a_killed_engine_on_a_gpu_is_noticed_by_nobody(daemon: DaemonProcess) -> None:
    code = """
import sys, time
from orbitkv import Client
from tests.builders import model, numbered
from tests.gpu.test_client import GEOMETRY, PAGES, one_allocation, save
client = Client(sys.argv[1])
_, tensors = one_allocation(seed=9)
instance = client.register(GEOMETRY, tensors, model=model("victim"))
save(client, instance)
print("ready", flush=True)
while True:
    first = int(time.time() * 1e6)
    client.publish(instance, numbered(PAGES, first=first).items())
    lease = client.query(instance, list(numbered(PAGES)))
    client.restore(lease, {page: numbered(PAGES)[page] for page in lease.hashes})
"""
    victim = subprocess.Popen(
        [sys.executable, "-c", code, str(daemon.path)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    assert victim.stdout
    assert victim.stdout.readline() == "ready\n"
    with Client(daemon.path) as client:
        whole, tensors = one_allocation()
        wanted = whole.clone()
        instance = client.register(GEOMETRY, tensors, model=model())
        time.sleep(0.3)
        victim.kill()
        victim.communicate()
        assert settled(lambda: ["open"] * (client.status().sessions - 1)) == []
        assert settled(client.leaks) == []
        save(client, instance)
        whole.zero_()
        torch.cuda.synchronize()
        restore(client, instance)
        assert torch.equal(whole, wanted)


def test_memory_that_cannot_be_exported_is_refused_with_the_remedy(daemon: DaemonProcess) -> None:
    code = """
import sys
from orbitkv import Client
from orbitkv.errors import DeviceFault
from tests.builders import model
from tests.gpu.test_client import GEOMETRY, one_allocation
with Client(sys.argv[1]) as client:
    try:
        client.register(GEOMETRY, one_allocation()[1], model=model())
    except DeviceFault as error:
        print(error)
"""
    said = subprocess.run(
        [sys.executable, "-c", code, str(daemon.path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={
            **os.environ,
            "PYTHONPATH": PATHS,
            "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        },
    ).stdout
    assert "set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False" in said


def test_a_gpu_that_the_daemon_does_not_serve_is_refused(tmp_path: Path) -> None:
    daemon = DaemonProcess.start(tmp_path / "s", "--devices", "7")
    with Client(daemon.path) as client, pytest.raises(Exception, match="accepted devices: 7"):
        client.register(GEOMETRY, one_allocation()[1], model=model())
    assert daemon.end()[0] == 0


def test_tensors_on_a_gpu_and_on_a_host_are_refused_together(client: Client) -> None:
    _, tensors = one_allocation()
    with pytest.raises(GeometryError, match="several devices"):
        client.register(GEOMETRY, {**tensors, "k0": tensors["k0"].cpu()}, model=model())
