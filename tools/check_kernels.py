"""Does every kernel compile for every GPU that OrbitKV knows, and without spilling registers?

    python tools/check_kernels.py [--arch 90] [FILE.cu ...]

Takes nvcc where it is installed, else NVRTC where cuda-bindings or CuPy can be imported. Needs no
GPU. Ends with 1 if something does not compile, or spills. Says where there is no compiler, and ends
with 0 then.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from orbitkv.codecs.cuda.kernels import OPTIONS, source

CUDA = Path(__file__).parents[1] / "orbitkv" / "codecs" / "cuda"
ARCHS = (80, 90, 100)
# Files that are compiled for several macros each.
VARIANTS = {
    "turboquant.cu": [
        (f"-DBITS={bits}", f"-DHEAD_DIM={head_dim}")
        for bits in (4, 3)
        for head_dim in (32, 64, 128, 256)
    ]
}

Compiler = Callable[[str, int, tuple[str, ...]], tuple[bool, str]]
"""Takes a file's name, an architecture and macros; gives success and what the compiler said."""


@dataclass(frozen=True, slots=True)
class Use:
    """What one kernel takes of a multiprocessor, as ptxas tells it."""

    kernel: str
    registers: int
    shared_nbytes: int
    stack_nbytes: int
    spilled_nbytes: int


def uses(log: str) -> Iterator[Use]:
    """Read what ptxas said of each kernel."""
    for part in log.split("Compiling entry function '")[1:]:
        numbers = {
            name: sum(int(number) for number in re.findall(rf"(\d+) {name}", part))
            for name in ("registers", "bytes smem", "bytes stack frame", "bytes spill")
        }
        yield Use(part.split("'", 1)[0], *numbers.values())


def compile_with_nvcc(nvcc: str, file: str, arch: int, macros: tuple[str, ...]) -> tuple[bool, str]:
    """Compile a file as it lies there."""
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-cubin", f"-arch=sm_{arch}", *OPTIONS, *macros, "-Xptxas", "-v"]
        command += ["-I", str(CUDA), str(CUDA / file), "-o", f"{folder}/kernels.cubin"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode == 0, done.stdout + done.stderr


def compile_with_bindings(file: str, arch: int, macros: tuple[str, ...]) -> tuple[bool, str]:
    """Compile the text that CuPy is given, by cuda-bindings."""
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    _, program = nvrtc.nvrtcCreateProgram(source(file).encode(), file.encode(), 0, [], [])
    options = [option.encode() for option in nvrtc_options(arch, macros)]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, length = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * length
    nvrtc.nvrtcGetProgramLog(program, log)
    return status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()


def compile_with_cupy(file: str, arch: int, macros: tuple[str, ...]) -> tuple[bool, str]:
    """Compile the text that CuPy is given, by the NVRTC that it has loaded."""
    nvrtc = importlib.import_module("cupy_backends.cuda.libs.nvrtc")
    program = nvrtc.createProgram(source(file), file, (), ())
    try:
        nvrtc.compileProgram(program, nvrtc_options(arch, macros))
    except nvrtc.NVRTCError:
        return False, nvrtc.getProgramLog(program)
    return True, nvrtc.getProgramLog(program)


def nvrtc_options(arch: int, macros: tuple[str, ...]) -> tuple[str, ...]:
    """Ask for machine code, and for what ptxas has to say."""
    return (*OPTIONS, *macros, f"--gpu-architecture=sm_{arch}", "--ptxas-options=-v")


def find_compiler() -> tuple[str, Compiler] | None:
    """The first compiler that is there, and its name."""
    nvcc = shutil.which("nvcc")
    if nvcc:
        return nvcc, lambda *what: compile_with_nvcc(nvcc, *what)
    for module, name, call in (
        ("cuda.bindings", "NVRTC of cuda-bindings", compile_with_bindings),
        ("cupy_backends", "NVRTC of CuPy", compile_with_cupy),
    ):
        try:
            if importlib.util.find_spec(module):
                return name, call
        except ModuleNotFoundError:  # not even the package that it would be in
            continue
    return None


def main() -> int:
    """Compile, print the table, tell whether all is well."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--arch", type=int, action="append", help="80, 90, ...; default: all")
    arguments.add_argument("files", nargs="*", help="default: all")
    chosen = arguments.parse_args()
    found = find_compiler()
    if found is None:
        print("No kernel was checked: neither nvcc nor NVRTC (cuda-bindings or CuPy) is here.")
        return 0
    name, compiler = found
    print(f"{name}\n{'file':<15} {'kernel':<24} arch  registers  shared  stack  spilled")
    faults = 0
    for file in sorted(chosen.files or (path.name for path in CUDA.glob("*.cu"))):
        for arch in chosen.arch or ARCHS:
            for macros in VARIANTS.get(file, [()]):
                done, log = compiler(file, arch, macros)
                if not done:
                    print(f"{file} {' '.join(macros)} does not compile for sm_{arch}:\n{log}")
                    faults += 1
                for use in uses(log):
                    faults += use.spilled_nbytes > 0
                    print(
                        f"{file:<15} {use.kernel:<24} {arch:4}  {use.registers:9}  "
                        f"{use.shared_nbytes:6}  {use.stack_nbytes:5}  {use.spilled_nbytes:7}",
                        *macros,
                        *["SPILLS"] * (use.spilled_nbytes > 0),
                    )
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
