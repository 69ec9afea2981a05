"""The doctor looks at any machine, however broken, and always comes back with a verdict."""

from __future__ import annotations

import ctypes
import io
import json
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from orbitkv import doctor, probe
from orbitkv.probe import Finding

NAMES = [
    "Python",
    "torch",
    "GPU",
    "CUDA",
    "cuFile",
    "io_uring",
    "SSD route",
    "nvCOMP",
    "Mooncake",
    "huge pages",
    "memlock",
    "free disk",
    "O_DIRECT",
]
SPIN = "while True: pass\n"


def rendered(findings: list[Finding], nodes: dict[str, str] | None = None) -> str:
    console = Console(file=io.StringIO(), width=200)
    doctor.render(findings, console, nodes)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def module(directory: Path, name: str, source: str) -> None:
    package = directory / name
    package.mkdir()
    (package / "__init__.py").write_text(source)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Let this process believe in a GPU; gives a directory on sys.path for fake libraries."""
    monkeypatch.setattr(probe, "driver_unavailable", lambda: None)
    libraries = tmp_path / "libraries"
    libraries.mkdir()
    monkeypatch.syspath_prepend(str(libraries))
    return libraries


def test_every_capability_has_a_finding(tmp_path: Path) -> None:
    assert [finding.name for finding in doctor.examine(tmp_path)] == NAMES


def test_what_is_missing_says_how_to_get_it(tmp_path: Path) -> None:
    for finding in doctor.examine(tmp_path / "absent" / "pool", limit_s=5):
        assert finding.verdict
        assert finding.evidence
        assert finding.available or finding.remedy


def test_json_holds_findings_and_the_nodes_that_are_off() -> None:
    findings = [Finding("GPU", available=False, verdict="none", evidence="looked", remedy="buy")]
    assert json.loads(doctor.to_json(findings, {"S": "no driver"})) == {
        "findings": [
            {
                "name": "GPU",
                "available": False,
                "verdict": "none",
                "evidence": "looked",
                "remedy": "buy",
            }
        ],
        "nodes": {"S": "no driver"},
    }


def test_table_keeps_the_brackets_of_an_extra() -> None:
    remedy = "pip install 'orbitkv[cuda13]'"
    finding = Finding("CUDA", available=False, verdict="none", evidence="looked", remedy=remedy)
    table = rendered([finding], {"S": f"kvikio is not installed: {remedy}"})
    assert table.count("orbitkv[cuda13]") == 2
    assert "Switched off here" in table


def test_table_names_no_nodes_where_none_is_off() -> None:
    assert "Switched off" not in rendered([probe.python()])


@pytest.mark.usefixtures("no_driver")
def test_missing_driver_is_the_reason_whatever_else_is_missing() -> None:
    reason = "no NVIDIA driver: libcuda.so.1 not found; install the NVIDIA driver"
    assert probe.cuda_unavailable() == reason
    assert probe.kvikio_unavailable() == reason


@pytest.mark.usefixtures("no_driver")
def test_without_a_driver_nothing_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def tried(*arguments: object, **limits: object) -> None:
        pytest.fail(f"asked a child {arguments}")

    monkeypatch.setattr(probe, "_ask", tried)
    for finding in (
        probe.gpu(limit_s=5),
        probe.cuda(limit_s=5),
        probe.cufile(tmp_path, limit_s=5),
    ):
        assert not finding.available
        assert finding.remedy == "install the NVIDIA driver"


def test_a_driver_without_its_device_is_told_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: name)
    monkeypatch.setattr(probe, "_DEVICE_NODES", (tmp_path / "nvidiactl",))
    reason = probe.driver_unavailable()
    assert reason is not None
    assert reason.startswith(f"no GPU: {tmp_path}/nvidiactl not found")


def test_reasons_name_the_extra_to_install(monkeypatch: pytest.MonkeyPatch, driver: Path) -> None:
    monkeypatch.setattr(probe, "_installed", lambda name: name == "cupy")
    assert probe.cuda_unavailable() is None
    assert "orbitkv[cuda13]" in str(probe.kvikio_unavailable())
    assert "orbitkv[peer]" in str(probe.mooncake_unavailable())
    monkeypatch.setattr(probe, "_installed", lambda name: False)
    assert str(probe.cuda_unavailable()).startswith("CuPy is not installed: pip install")


def test_a_directory_of_a_library_s_name_is_not_the_library(
    monkeypatch: pytest.MonkeyPatch, driver: Path
) -> None:
    monkeypatch.setattr(sys, "path", [str(driver)])
    (driver / "kvikio").mkdir()
    module(driver, "cupy", "")
    assert probe.kvikio_unavailable() is not None


def test_a_cufile_that_spins_for_ever_costs_only_the_limit(driver: Path, tmp_path: Path) -> None:
    module(driver, "cupy", "uint8 = 'uint8'\nclass zeros:\n    def __init__(self, *a, **k): pass\n")
    module(
        driver,
        "kvikio",
        "__version__ = '26.10.0'\n"
        "import contextlib\n"
        "class CompatMode: OFF, ON = range(2)\n"
        f"def CuFile(*arguments):\n    {SPIN}",
    )
    (driver / "kvikio" / "defaults.py").write_text(
        "import contextlib\ndef set(*arguments): return contextlib.nullcontext()\n"
    )
    target = tmp_path / "ssd"
    target.mkdir()
    began = time.monotonic()
    finding = probe.cufile(target, limit_s=1)
    assert time.monotonic() - began < 5
    assert not finding.available
    assert finding.evidence == "no answer within 1 s"
    assert not list(target.iterdir())


@pytest.mark.parametrize(
    ("nvidia_fs", "off_fails", "verdict"),
    [(True, False, "native"), (False, False, "compat"), (True, True, "compat")],
)
def test_cufile_is_native_only_with_nvidia_fs_and_a_write_that_proves_it(
    monkeypatch: pytest.MonkeyPatch,
    driver: Path,
    tmp_path: Path,
    *,
    nvidia_fs: bool,
    off_fails: bool,
    verdict: str,
) -> None:
    module(driver, "cupy", "")
    module(driver, "kvikio", "")
    off = "RuntimeError: file descriptor is not registered" if off_fails else None
    answer = {"kvikio": "26.10.0", "off": off, "on": None}
    monkeypatch.setattr(probe, "_ask", lambda *arguments, limit_s: answer)
    monkeypatch.setattr(probe, "_NVIDIA_FS", (tmp_path if nvidia_fs else tmp_path / "absent",))
    finding = probe.cufile(tmp_path, limit_s=5)
    assert finding.available
    assert finding.verdict == f"{verdict}, KvikIO 26.10.0"
    assert (finding.remedy is None) == (verdict == "native")


def test_direct_route_needs_cufile_on_every_filesystem_and_is_tried_once_on_each(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[str] = []
    fails: set[str] = {"slow"}

    def cufile(path: Path, *, limit_s: float) -> probe.Finding:
        asked.append(path.parent.name)
        stands = path.parent.name not in fails
        return probe.Finding("cuFile", stands, "native" if stands else "fails", "tried")

    monkeypatch.setattr(probe, "kvikio_unavailable", lambda: None)
    monkeypatch.setattr(probe, "_NVIDIA_FS", (tmp_path,))
    monkeypatch.setattr(probe, "cufile", cufile)
    monkeypatch.setattr(probe, "_filesystem", lambda path: (len(path.parent.name), None))
    paths = tuple(tmp_path / name for name in ("a/0", "b/1", "slow/2", "a/3"))
    for _ in range(2):  # a failure is not kept
        reason = probe.direct_unavailable(paths, "auto")
        assert reason == f"cuFile fails: tried ({paths[2]})"
    assert asked.count("slow") == 2
    assert probe.direct_unavailable(paths[:2], "auto") is None
    assert asked.count("b") == 0, "it is on the filesystem of another"
    fails.clear()
    asked.clear()
    for _ in range(2):  # a success is
        assert probe.direct_unavailable(paths, "auto") is None
    assert asked == ["slow"]


def test_shards_on_two_filesystems_are_told_apart(tmp_path: Path) -> None:
    elsewhere = Path("/dev/shm")
    assert probe._filesystem(tmp_path / "a") == probe._filesystem(tmp_path / "b")
    if elsewhere.stat().st_dev != tmp_path.stat().st_dev:
        assert probe._filesystem(tmp_path / "a") != probe._filesystem(elsewhere / "a")
    gone = tmp_path / "none"
    assert probe._filesystem(gone / "a") == probe._filesystem(gone / "b")


def test_a_cufile_that_fails_either_way_is_not_available(
    monkeypatch: pytest.MonkeyPatch, driver: Path, tmp_path: Path
) -> None:
    module(driver, "cupy", "")
    module(driver, "kvikio", "")
    answer = {"kvikio": "26.10.0", "off": "OSError: no", "on": "OSError: disk full"}
    monkeypatch.setattr(probe, "_ask", lambda *arguments, limit_s: answer)
    finding = probe.cufile(tmp_path, limit_s=5)
    assert not finding.available
    assert finding.verdict.startswith("fails: OSError: disk full")


def test_a_child_that_crashes_is_a_verdict(driver: Path) -> None:
    module(driver, "cupy", "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    assert probe.cuda(limit_s=5).evidence == "crashed: SIGSEGV"


def test_what_a_library_prints_is_not_the_answer(driver: Path) -> None:
    module(driver, "cupy", "print('{}')\nraise RuntimeError('no device\\nand a long story')\n")
    assert probe.cuda(limit_s=5).evidence == "RuntimeError: no device"


def test_the_doctor_needs_no_program_on_path(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    found = {finding.name: finding for finding in doctor.examine(tmp_path)}
    assert found["free disk"].evidence == str(tmp_path)


def test_the_doctor_goes_on_where_no_child_can_be_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("sys.executable", str(tmp_path / "absent"))
    assert [finding.name for finding in doctor.examine(tmp_path)] == NAMES


def test_an_explicit_nvcomp_never_becomes_another(tmp_path: Path) -> None:
    library = str(tmp_path / "libnvcomp.so.5")
    assert probe.nvcomp_candidates(library) == (library,)
    finding = probe.nvcomp(library, limit_s=10)
    assert not finding.available
    assert library in finding.evidence


def test_the_packaged_nvcomp_is_tried_before_the_loader_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "nvidia/libnvcomp/lib64/libnvcomp.so.5"
    library.parent.mkdir(parents=True)
    library.touch()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "nvidia", raising=False)
    assert probe.nvcomp_candidates(None) == (str(library), "libnvcomp.so.5")


@pytest.mark.parametrize(
    ("version", "verdict", "available"),
    [(5300, "5.3.0", True), (6012, "6.0.12: ABI unknown, wanted 5.x", False)],
)
def test_an_nvcomp_of_unknown_abi_is_not_available(
    monkeypatch: pytest.MonkeyPatch, version: int, verdict: str, *, available: bool
) -> None:
    answer = {"library": "libnvcomp.so.5", "version": version}
    monkeypatch.setattr(probe, "_ask", lambda *arguments, limit_s: answer)
    finding = probe.nvcomp(None, limit_s=5)
    assert (finding.verdict, finding.available) == (verdict, available)


def test_torch_is_described_without_importing_it(
    driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # as in a process that has none
    module(driver, "torch", SPIN)
    (driver / "torch" / "version.py").write_text(
        "from typing import Optional\n__version__ = '2.13.0+cu130'\ncuda: Optional[str] = '13.0'\n"
    )
    assert probe.torch().verdict == "2.13.0+cu130, CUDA 13.0 build"


def test_a_missing_directory_is_named(tmp_path: Path) -> None:
    for finding in probe.disk(tmp_path / "absent" / "pool", limit_s=5):
        assert not finding.available
        assert str(tmp_path / "absent") in finding.evidence


def test_the_disk_of_a_file_to_be_is_its_directory_s(tmp_path: Path) -> None:
    free, _ = probe.disk(tmp_path / "pool", limit_s=5)
    assert free.evidence == str(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_disk_that_refuses_direct_io_is_told() -> None:
    # No filesystem to write on refuses it everywhere, so the one that cannot be written stands in.
    free, direct = probe.disk(Path("/proc"), limit_s=5)
    assert not free.available
    assert not direct.available


@pytest.mark.parametrize(
    ("free", "mode", "available"),
    [("0", "always [madvise] never", True), ("0", "always madvise [never]", False)],
)
def test_transparent_huge_pages_count(
    tmp_path: Path, free: str, mode: str, *, available: bool
) -> None:
    meminfo, transparent = tmp_path / "meminfo", tmp_path / "enabled"
    meminfo.write_text(f"HugePages_Total: 0\nHugePages_Free: {free}\nHugepagesize: 2048 kB\n")
    transparent.write_text(mode)
    finding = probe.huge_pages(meminfo, transparent)
    assert finding.available is available
    assert finding.verdict.startswith("0 of 0 free, 2048 kB each")


def test_a_kernel_that_tells_nothing_is_a_verdict(tmp_path: Path) -> None:
    assert not probe.huge_pages(tmp_path / "a", tmp_path / "b").available
    assert probe.memlock(tmp_path / "c").verdict


@pytest.mark.parametrize(("capabilities", "available"), [("4000", True), ("0", False)])
def test_ipc_lock_lifts_the_memlock_limit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capabilities: str, *, available: bool
) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda limit: (8 * 2**20, 8 * 2**20))
    status = tmp_path / "status"
    status.write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    finding = probe.memlock(status)
    assert finding.available is available
    assert "8192 KiB" in finding.evidence
