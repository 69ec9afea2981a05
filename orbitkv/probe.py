"""What this machine can do, found out without trusting it to answer.

A driver in a bad state hangs whoever asks, and a library that does not fit may kill its process. So
what has to be tried is tried in a child process under a time limit: this file run as a script. What
an engine asks at its start (``cuda_unavailable`` and the like) only looks, and starts nothing.

Imports the standard library alone, as the child must.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import errno
import fcntl
import functools
import importlib.machinery
import importlib.metadata
import importlib.util
import json
import mmap
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_CUDA_EXTRA = "pip install 'orbitkv[cuda13]' ('orbitkv[cuda12]' for a driver older than 580)"
_DRIVER = "install the NVIDIA driver"
_DRIVER_LIBRARY = "libcuda.so.1"
_CUDA_ERROR_NO_DEVICE = 100
# The GPU's node in /dev: on a server, under WSL, on Tegra.
_DEVICE_NODES = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/nvmap"))
_PROBE_LIMIT_S = 30.0
_NVIDIA_FS = (Path("/proc/driver/nvidia-fs"), Path("/sys/module/nvidia_fs"))
_NVCOMP_LIBRARY = "libnvcomp.so.5"
_NVCOMP_MAJOR = 5
_MOONCAKE_PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
_CAP_IPC_LOCK = 14
_LEAST_FREE_NBYTES = 2**30
_LONGEST_MESSAGE = 200


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that this machine has or lacks.

    Attributes:
        name: What was looked for.
        available: OrbitKV can use it here.
        verdict: What was found, in a few words: a version, a mode, a number with its unit.
        evidence: What the verdict rests on: a path, a call's own message.
        remedy: How to get it, or more of it. None: nothing to be done.
    """

    name: str
    available: bool
    verdict: str
    evidence: str
    remedy: str | None = None


# Cheap: no child, no device call. A node asks these before it is bound.


def driver_unavailable() -> str | None:
    """Say why no GPU can be reached, or None.

    Opens the driver library and looks for the device's node. It does not initialise CUDA: that
    would break every process which the engine forks later.
    """
    try:
        ctypes.CDLL(_DRIVER_LIBRARY)
    except OSError:
        return f"no NVIDIA driver: {_DRIVER_LIBRARY} not found; {_DRIVER}"
    if not any(node.exists() for node in _DEVICE_NODES):
        return f"no GPU: {_DEVICE_NODES[0]} not found; give this container its GPU (--gpus all)"
    return None


def cuda_unavailable() -> str | None:
    """Say why CUDA lanes cannot run here, or None: they need a driver, a GPU and CuPy."""
    reason = driver_unavailable()
    if reason is None and not _installed("cupy"):
        reason = f"CuPy is not installed: {_CUDA_EXTRA}"
    return reason


def kvikio_unavailable() -> str | None:
    """Say why cuFile cannot be used here, or None: it needs what CUDA lanes need, and KvikIO.

    KvikIO may be touched only after this returned None. Without a driver ``CuFile()`` may spin for
    ever.
    """
    reason = cuda_unavailable()
    if reason is None and not _installed("kvikio"):
        reason = f"kvikio is not installed: {_CUDA_EXTRA}"
    return reason


def numba_unavailable() -> str | None:
    """Say why nothing can be compiled here, or None. numba itself is not imported."""
    if not _installed("numba"):
        return "numba is not installed"
    return None


def mooncake_unavailable() -> str | None:
    """Say why no peer can be reached from here, or None. Mooncake itself is not imported."""
    if not _installed("mooncake"):
        return "mooncake is not installed: pip install 'orbitkv[peer]'"
    return None


def nvcomp_candidates(library: str | None) -> tuple[str, ...]:
    """List what to open as nvCOMP, best first.

    Args:
        library: An explicit choice, which never silently becomes another. None: the pip package's
            library, then the loader's.
    """
    if library is not None:
        return (library,)
    spec = _spec("nvidia")  # a namespace package: each of NVIDIA's wheels adds to it
    roots = spec.submodule_search_locations if spec else None
    packaged = (Path(root) / "libnvcomp/lib64" / _NVCOMP_LIBRARY for root in roots or ())
    return (*(str(path) for path in packaged if path.exists()), _NVCOMP_LIBRARY)


# Findings that only look.


def python() -> Finding:
    """Find the interpreter."""
    version = ".".join(map(str, sys.version_info[:3]))
    return Finding("Python", available=True, verdict=version, evidence=sys.executable)


def torch() -> Finding:
    """Find torch and its build, without importing it: that takes seconds, and may start CUDA."""
    spec = _spec("torch")
    if spec is None or spec.origin is None:
        return Finding(
            "torch",
            available=False,
            verdict="not installed",
            evidence="no module torch on sys.path",
            remedy="the engine brings it; without one: pip install 'orbitkv[transformers]'",
        )
    source = Path(spec.origin).with_name("version.py")
    constants = _constants(source)
    version = constants.get("__version__") or _version("torch") or "of unknown version"
    if constants.get("cuda"):
        build = f"CUDA {constants['cuda']} build"
    else:
        build = f"ROCm {constants['hip']} build" if constants.get("hip") else "CPU build"
    return Finding("torch", available=True, verdict=f"{version}, {build}", evidence=str(source))


def mooncake() -> Finding:
    """Find Mooncake's package; nothing of it is imported."""
    reason = mooncake_unavailable()
    if reason is not None:
        return Finding(
            "Mooncake",
            available=False,
            verdict="not installed",
            evidence="no module mooncake on sys.path",
            remedy="pip install 'orbitkv[peer]'; apt-get install libibverbs1 libnuma1 libcurl4",
        )
    named = ((name, _version(name)) for name in _MOONCAKE_PACKAGES)
    package, version = next((pair for pair in named if pair[1]), ("mooncake", "of unknown version"))
    return Finding("Mooncake", available=True, verdict=str(version), evidence=f"package {package}")


def huge_pages(
    meminfo: Path = Path("/proc/meminfo"),
    transparent: Path = Path("/sys/kernel/mm/transparent_hugepage/enabled"),
) -> Finding:
    """Find reserved huge pages, and whether the kernel gives transparent ones on demand."""
    fields = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    free, total, each = (
        fields.get(field, "unknown").strip()
        for field in ("HugePages_Free", "HugePages_Total", "Hugepagesize")
    )
    # The chosen mode stands in brackets: always [madvise] never
    mode = _read(transparent).partition("[")[2].partition("]")[0] or "unknown"
    available = mode in {"always", "madvise"} or free not in {"0", "unknown"}
    return Finding(
        "huge pages",
        available=available,
        verdict=f"{free} of {total} free, {each} each; transparent: {mode}",
        evidence=f"{meminfo}, {transparent}",
        remedy=None if available else f"as root: echo madvise > {transparent}",
    )


def memlock(status: Path = Path("/proc/self/status")) -> Finding:
    """Find how much memory this process may lock into RAM."""
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    fields = dict(line.split(":", 1) for line in _read(status).splitlines() if ":" in line)
    effective = int(fields.get("CapEff", "0").strip() or "0", 16)
    capable = bool(effective >> _CAP_IPC_LOCK & 1)
    available = capable or soft == resource.RLIM_INFINITY
    limits = f"RLIMIT_MEMLOCK soft {_limit(soft)}, hard {_limit(hard)}"
    return Finding(
        "memlock",
        available=available,
        verdict="unlimited" if available else f"{_limit(soft)}; a larger pool stays unlocked",
        evidence=f"{limits}, {'with' if capable else 'without'} CAP_IPC_LOCK",
        remedy=None if available else "ulimit -l unlimited; in a container: --ulimit memlock=-1",
    )


# Findings that have to try, each in a child.


def gpu(*, limit_s: float) -> Finding:
    """Find the GPUs through the driver itself."""
    reason = driver_unavailable()
    if reason is not None:
        return _lacking("GPU", reason)
    answer = _ask("gpu", limit_s=limit_s)
    if isinstance(answer, str):
        return Finding(
            "GPU",
            available=False,
            verdict="does not answer",
            evidence=answer,
            remedy="see whether nvidia-smi answers; restart the container, or the driver",
        )
    devices = answer["devices"]
    return Finding(
        "GPU",
        available=bool(devices),
        verdict=", ".join(devices) or "none",
        evidence=f"{_DRIVER_LIBRARY}, driver for CUDA {_decimal(answer['cuda'])}",
        remedy=None if devices else "give this process a GPU: CUDA_VISIBLE_DEVICES, --gpus all",
    )


def cuda(*, limit_s: float) -> Finding:
    """Find whether CuPy compiles and runs a kernel."""
    reason = cuda_unavailable()
    if reason is not None:
        return _lacking("CUDA", reason)
    answer = _ask("cuda", limit_s=limit_s)
    if isinstance(answer, str):
        return Finding(
            "CUDA",
            available=False,
            verdict="fails",
            evidence=answer,
            remedy=f"a visible GPU, and the CuPy of its driver: {_CUDA_EXTRA}",
        )
    verdict = f"{_decimal(answer['runtime'])}, CuPy {answer['cupy']}"
    return Finding("CUDA", available=True, verdict=verdict, evidence="a kernel compiled and ran")


def cufile(path: Path, *, limit_s: float) -> Finding:
    """Find whether cuFile writes GPU memory to the disk at ``path``, and how.

    Native is only what KvikIO writes with its own compatibility mode off *and* nvidia-fs is there
    for: cuFile has a compatibility mode too, and does not tell.
    """
    reason = kvikio_unavailable()
    if reason is not None:
        return _lacking("cuFile", reason)
    try:
        # The parent removes it: a child that hangs in cuFile never would.
        with tempfile.TemporaryDirectory(prefix=".orbitkv-", dir=_directory(path)) as scratch:
            answer = _ask("cufile", str(Path(scratch) / "probe"), limit_s=limit_s)
    except OSError as error:
        answer = str(error)
    if isinstance(answer, str):
        return Finding(
            "cuFile",
            available=False,
            verdict="fails",
            evidence=answer,
            remedy="leave S and G out of the pipelines; SSD writes then go by io_uring",
        )
    module = next((str(place) for place in _NVIDIA_FS if place.exists()), None)
    direct = answer["off"] or "wrote"
    native = module is not None and answer["off"] is None
    mode = "native" if native else "compat" if answer["on"] is None else f"fails: {answer['on']}"
    return Finding(
        "cuFile",
        available=native or answer["on"] is None,
        verdict=f"{mode}, KvikIO {answer['kvikio']}",
        evidence=f"{module or 'no nvidia-fs'}; with CompatMode.OFF: {direct}",
        remedy=None if native else "for native: install GPUDirect Storage (package nvidia-gds)",
    )


def direct_unavailable(paths: tuple[Path, ...], backend: str) -> str | None:
    """Say why SSD files are not read or written past the host, or None where they are to be.

    One file of each filesystem is tried, in a child that may take up to half a minute. What was
    found to work is not tried again in this process; what was not may work the next time.

    Args:
        paths: Files of the SSD tier.
        backend: ``auto`` takes cuFile only where it is native; ``cufile`` in compat mode too.
    """
    if not paths:
        return "no SSD path is configured (--ssd-cache-path)"
    if backend not in ("auto", "cufile"):
        return f"{backend} was chosen; D and U serve instead"
    reason = kvikio_unavailable()
    if reason is not None:
        return reason
    if backend == "auto" and not any(place.exists() for place in _NVIDIA_FS):
        return (
            "no nvidia-fs, so cuFile would go through host memory too; D and U serve instead, "
            "unless ssd_backend is cufile"
        )
    for path in {_filesystem(path): path for path in reversed(paths)}.values():
        try:
            _try_direct(path, backend)
        except OSError as error:
            where = f" ({path})" if len(paths) > 1 else ""
            return f"cuFile {error}{where}"
    return None


@functools.cache  # which keeps no exception
def _try_direct(path: Path, backend: str) -> None:
    """Raise OSError where cuFile does not do for the disk at ``path`` what ``backend`` asks."""
    finding = cufile(path, limit_s=_PROBE_LIMIT_S)
    native = finding.verdict.startswith("native")
    if not finding.available or not (native or backend == "cufile"):
        raise OSError(f"{finding.verdict}: {finding.evidence}")


def _filesystem(path: Path) -> tuple[int, Path | None]:
    """What paths have in common on one filesystem; where that cannot be told, in one directory."""
    try:
        return _directory(path).stat().st_dev, None
    except OSError:
        return -1, path.parent


def nvcomp(library: str | None, *, limit_s: float) -> Finding:
    """Find nvCOMP, and ask the library itself for its version."""
    candidates = nvcomp_candidates(library)
    answer = _ask("nvcomp", *candidates, limit_s=limit_s)
    if isinstance(answer, str):
        return Finding(
            "nvCOMP", available=False, verdict="not found", evidence=answer, remedy=_CUDA_EXTRA
        )
    major, rest = divmod(answer["version"], 1000)
    version = f"{major}.{rest // 100}.{rest % 100}"
    available = major == _NVCOMP_MAJOR
    return Finding(
        "nvCOMP",
        available=available,
        verdict=version if available else f"{version}: ABI unknown, wanted {_NVCOMP_MAJOR}.x",
        evidence=answer["library"],
        remedy=None if available else _CUDA_EXTRA,
    )


def disk(path: Path, *, limit_s: float) -> tuple[Finding, Finding]:
    """Find the free bytes at ``path``, and whether O_DIRECT can be had there.

    Args:
        path: A directory, or a file in a directory that is there.
        limit_s: As everywhere; a network filesystem may hang too.
    """
    answer = _ask("disk", str(path), limit_s=limit_s)
    if isinstance(answer, str):
        remedy = "name a directory that is there and writable: mkdir -p DIR"
        return (
            Finding(
                "free disk", available=False, verdict="unknown", evidence=answer, remedy=remedy
            ),
            Finding("O_DIRECT", available=False, verdict="unknown", evidence=answer, remedy=remedy),
        )
    directory, refused = answer["directory"], answer["refused"]
    enough = answer["free_nbytes"] >= _LEAST_FREE_NBYTES
    free, total = (f"{answer[key] / 2**30:.1f} GiB" for key in ("free_nbytes", "total_nbytes"))
    return (
        Finding(
            "free disk",
            available=enough,
            verdict=f"{free} of {total}",
            evidence=directory,
            remedy=None if enough else "free some, or name a directory on another disk",
        ),
        Finding(
            "O_DIRECT",
            available=refused is None,
            verdict="yes" if refused is None else "no: SSD files go through the page cache",
            evidence=f"{directory}: {refused or 'wrote 4096 bytes'}",
            remedy=None if refused is None else "name a directory on ext4 or XFS",
        ),
    )


# Questions, put to a child: each runs there alone, and may raise, hang or crash.


def _ask_gpu() -> dict[str, Any]:
    driver = ctypes.CDLL(_DRIVER_LIBRARY)

    def call(name: str, *arguments: Any) -> None:  # noqa: ANN401  (ctypes arguments are anything)
        code = getattr(driver, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(code, ctypes.byref(text))
            message = (text.value or b"unknown error").decode()
            raise RuntimeError(f"{name} returned {code}: {message}")

    cuda_version, count = ctypes.c_int(), ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(cuda_version))
    if driver.cuInit(0) == _CUDA_ERROR_NO_DEVICE:
        return {"devices": [], "cuda": cuda_version.value}
    call("cuInit", 0)
    call("cuDeviceGetCount", ctypes.byref(count))
    devices = []
    for ordinal in range(count.value):
        device, nbytes = ctypes.c_int(), ctypes.c_size_t()
        name = ctypes.create_string_buffer(256)
        call("cuDeviceGet", ctypes.byref(device), ordinal)
        call("cuDeviceGetName", name, len(name), device)
        call("cuDeviceTotalMem_v2", ctypes.byref(nbytes), device)
        devices.append(f"{name.value.decode()} ({nbytes.value / 2**30:.0f} GiB)")
    return {"devices": devices, "cuda": cuda_version.value}


def _ask_cuda() -> dict[str, Any]:
    import cupy  # noqa: PLC0415  (touches the driver)

    if int(cupy.arange(8).sum()) != sum(range(8)):
        raise RuntimeError("a kernel ran and its result is wrong")
    return {"cupy": cupy.__version__, "runtime": cupy.cuda.runtime.runtimeGetVersion()}


def _ask_cufile(path: str) -> dict[str, Any]:
    import cupy  # noqa: PLC0415  (touches the driver)
    import kvikio  # noqa: PLC0415  (may spin for ever)
    import kvikio.defaults  # noqa: PLC0415

    buffer = cupy.zeros(2**20, dtype=cupy.uint8)  # under 16 KiB KvikIO writes by POSIX, unasked

    def refused(mode: Any) -> str | None:  # noqa: ANN401  (an enum of KvikIO's)
        try:
            with kvikio.defaults.set("compat_mode", mode), kvikio.CuFile(path, "w") as file:
                moved_nbytes = file.pwrite(buffer).get()
        except Exception as error:  # noqa: BLE001  (whatever it raises is the evidence)
            return _message(error)
        if moved_nbytes == buffer.nbytes:
            return None
        return f"wrote {moved_nbytes} of {buffer.nbytes} bytes"

    return {
        "kvikio": kvikio.__version__,
        "off": refused(kvikio.CompatMode.OFF),
        "on": refused(kvikio.CompatMode.ON),
    }


def _ask_nvcomp(*candidates: str) -> dict[str, Any]:
    class Properties(ctypes.Structure):
        _fields_ = (("version", ctypes.c_uint32), ("cudart_version", ctypes.c_uint32))

    faults = []
    for candidate in candidates:
        properties = Properties()
        try:
            code = ctypes.CDLL(candidate).nvcompGetProperties(ctypes.byref(properties))
        except (OSError, AttributeError) as error:
            faults.append(str(error))
            continue
        if code == 0:
            return {"library": candidate, "version": properties.version}
        faults.append(f"{candidate}: nvcompGetProperties returned {code}")
    raise OSError("; ".join(faults))


def _ask_disk(path: str) -> dict[str, Any]:
    directory = _directory(Path(path))
    usage = shutil.disk_usage(directory)
    refused = None
    with (
        tempfile.TemporaryFile(dir=directory, buffering=0) as file,
        mmap.mmap(-1, mmap.PAGESIZE) as page,  # aligned, as O_DIRECT asks
    ):
        try:
            flags = fcntl.fcntl(file, fcntl.F_GETFL)
            fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
            os.pwrite(file.fileno(), page, 0)
        except OSError as error:
            refused = _message(error)
    return {
        "directory": str(directory),
        "free_nbytes": usage.free,
        "total_nbytes": usage.total,
        "refused": refused,
    }


_QUESTIONS: Mapping[str, Callable[..., dict[str, Any]]] = {
    "gpu": _ask_gpu,
    "cuda": _ask_cuda,
    "cufile": _ask_cufile,
    "nvcomp": _ask_nvcomp,
    "disk": _ask_disk,
}


def _ask(question: str, *arguments: str, limit_s: float) -> dict[str, Any] | str:
    """Put a question to a child. Returns its answer, or why there is none."""
    request = json.dumps({"sys_path": sys.path, "question": question, "arguments": arguments})
    try:
        child = subprocess.Popen(
            [sys.executable, "-P", __file__, request],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:  # no interpreter to start, no process to be had
        return f"no child process: {_message(error)}"
    try:
        output, complaint = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        _kill(child)
        return f"no answer within {limit_s:g} s"
    try:
        # Libraries print too; the answer is the last line.
        answer = json.loads(output.splitlines()[-1])
        found: dict[str, Any] | str = answer.get("found") or answer["error"]
    except (IndexError, ValueError, AttributeError, KeyError, TypeError):
        if child.returncode < 0:
            return f"crashed: {signal.Signals(-child.returncode).name}"
        lines = complaint.decode(errors="replace").strip().splitlines()
        return f"exit {child.returncode}: {lines[-1] if lines else 'said nothing'}"
    return found


def _kill(child: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        # Not without a limit: inside a broken driver not even SIGKILL arrives.
        child.wait(timeout=1)
    for pipe in (child.stdout, child.stderr):
        if pipe is not None:
            pipe.close()


def _answer(request: str) -> None:
    """Run as the child: print one line of JSON and leave."""
    asked = json.loads(request)
    sys.path[:] = asked["sys_path"]
    answer: dict[str, Any]
    try:
        answer = {"found": _QUESTIONS[asked["question"]](*asked["arguments"])}
    except Exception as error:  # noqa: BLE001  (whatever it raises is the evidence)
        answer = {"error": _message(error)}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")
    sys.stdout.flush()
    os._exit(0)  # a driver's own exit handlers may hang


def _lacking(name: str, reason: str) -> Finding:
    """Make a finding of a reason that ends in how to get it: ``what is missing; remedy``."""
    missing, _, remedy = reason.partition("; " if "; " in reason else ": ")
    return Finding(name, available=False, verdict="none", evidence=missing, remedy=remedy)


def _directory(path: Path) -> Path:
    """Give ``path`` where it is a directory, else the directory that holds it.

    Raises:
        FileNotFoundError: neither is there.
    """
    directory = path.absolute() if path.is_dir() else path.absolute().parent
    if not directory.is_dir():
        raise FileNotFoundError(errno.ENOENT, "no such directory", str(directory))
    return directory


def _spec(name: str) -> importlib.machinery.ModuleSpec | None:
    try:
        return importlib.util.find_spec(name)
    except (ImportError, ValueError):  # ValueError: an imported module without a spec
        return None


def _installed(name: str) -> bool:
    spec = _spec(name)
    return spec is not None and spec.origin is not None  # no origin: any directory of that name


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _constants(source: Path) -> dict[str, Any]:
    """Read the constants that a Python file assigns, without running it."""
    try:
        body = ast.parse(_read(source)).body
    except SyntaxError:
        return {}
    constants: dict[str, Any] = {}
    for statement in body:
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        else:
            continue
        if isinstance(target, ast.Name) and isinstance(statement.value, ast.Constant):
            constants[target.id] = statement.value.value
    return constants


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _limit(nbytes: int) -> str:
    return "unlimited" if nbytes == resource.RLIM_INFINITY else f"{nbytes // 2**10} KiB"


def _decimal(version: int) -> str:
    """Render CUDA's 13000 as 13.0."""
    return f"{version // 1000}.{version % 1000 // 10}"


def _message(error: BaseException) -> str:
    """Give the first line that says something: cuFile's errors are a page long."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:_LONGEST_MESSAGE]


if __name__ == "__main__":
    _answer(sys.argv[1])
