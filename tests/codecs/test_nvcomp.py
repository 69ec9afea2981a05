"""nvCOMP's C ABI: what is opened, what is refused, and that arguments arrive where they belong."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from orbitkv.codecs import ans, nvcomp
from orbitkv.codecs.nvcomp import (
    Alignments,
    CompressOptions,
    DecompressOptions,
    Kind,
    Nvcomp,
    Slices,
    open_nvcomp,
)
from orbitkv.errors import DeviceFault, Unavailable
from orbitkv.probe import nvcomp_candidates

# A library with the prototypes of nvCOMP's headers, written down here by hand. It has no device:
# it keeps what it was given.
STAND_IN = r"""
#include <stddef.h>
#include <stdint.h>
#include <string.h>
typedef struct { uint32_t version, cudart_version; } Properties;
typedef struct { size_t input, output, temp; } Alignments;
typedef struct { int type; int data_type; uint8_t sub_chunks; TAIL } CompressOpts;
typedef struct { int backend; int data_type; uint8_t sub_chunks; TAIL } DecompressOpts;
uint64_t seen[16];
unsigned char options[64];
int answer = 0;
size_t alignment = 8;
int nvcompGetProperties(Properties *out) {
    out->version = VERSION; out->cudart_version = 13000; return answer == 77 ? 77 : 0;
}
static int keep(const void *opts) { memcpy(options, opts, 64); return answer; }
int nvcompBatchedANSCompressGetRequiredAlignments(CompressOpts opts, Alignments *out) {
    out->input = alignment; out->output = 8; out->temp = 1; return keep(&opts);
}
int nvcompBatchedANSDecompressGetRequiredAlignments(DecompressOpts opts, Alignments *out) {
    out->input = 4; out->output = 2; out->temp = 1; return keep(&opts);
}
int nvcompBatchedANSCompressGetMaxOutputChunkSize(size_t most, CompressOpts opts, size_t *out) {
    *out = 2 * most; return keep(&opts);
}
int COMPRESS_TEMP(size_t count, size_t most, CompressOpts opts, size_t *out, size_t total STREAM) {
    *out = count + 1000 * most + 1000000 * total; return keep(&opts);
}
int DECOMPRESS_TEMP(size_t count, size_t most, DecompressOpts opts, size_t *out,
        size_t total STREAM) {
    *out = 7 + count + 1000 * most + 1000000 * total; return keep(&opts);
}
int nvcompBatchedANSCompressAsync(const void *const *device_uncompressed_ptrs,
        const size_t *device_uncompressed_bytes, size_t max_uncompressed_bytes, size_t count,
        void *device_temp, size_t temp_bytes, void *const *device_compressed_ptrs,
        size_t *device_compressed_bytes, CompressOpts opts, int *device_statuses, void *stream) {
    uint64_t all[] = {(uint64_t)device_uncompressed_ptrs, (uint64_t)device_uncompressed_bytes,
        max_uncompressed_bytes, count, (uint64_t)device_temp, temp_bytes,
        (uint64_t)device_compressed_ptrs, (uint64_t)device_compressed_bytes,
        (uint64_t)device_statuses, (uint64_t)stream};
    memcpy(seen, all, sizeof all);
    return keep(&opts);
}
int nvcompBatchedANSDecompressAsync(const void *const *device_compressed_ptrs,
        const size_t *device_compressed_bytes, const size_t *device_buffer_bytes,
        size_t *device_uncompressed_bytes, size_t count, void *const device_temp,
        size_t temp_bytes, void *const *device_uncompressed_ptrs, DecompressOpts opts,
        int *device_statuses, void *stream) {
    uint64_t all[] = {(uint64_t)device_compressed_ptrs, (uint64_t)device_compressed_bytes,
        (uint64_t)device_buffer_bytes, (uint64_t)device_uncompressed_bytes, count,
        (uint64_t)device_temp, temp_bytes, (uint64_t)device_uncompressed_ptrs,
        (uint64_t)device_statuses, (uint64_t)stream};
    memcpy(seen, all, sizeof all);
    return keep(&opts);
}
"""
_CALL = "nvcompBatchedANS{}GetTempSize{}"
GENERATIONS = {
    5: ("char reserved[55];", "Async", ""),
    6: ("uint8_t states_per_lane, other; char reserved[53];", "", ", void *stream"),
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Builds a library of one version and generation."""
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    directory = tmp_path_factory.mktemp("nvcomp")

    def build(version: int, generation: int) -> Path:
        target = directory / f"libnvcomp-{version}-{generation}.so"
        if not target.exists():
            tail, suffix, stream = GENERATIONS[generation]
            source = target.with_suffix(".c")
            source.write_text(
                STAND_IN.replace("TAIL", tail)
                .replace("DECOMPRESS_TEMP", _CALL.format("Decompress", suffix))
                .replace("COMPRESS_TEMP", _CALL.format("Compress", suffix))
                .replace("STREAM", stream)
                .replace("VERSION", str(version))
            )
            command = ("gcc", "-shared", "-fPIC", "-O0", str(source), "-o", str(target))
            subprocess.run(command, check=True, capture_output=True, text=True)
        return target

    return build


def opened(path: Path) -> tuple[Nvcomp, ctypes.CDLL]:
    return open_nvcomp(str(path)), ctypes.CDLL(str(path))


def kept(library: ctypes.CDLL) -> tuple[list[int], list[int], bytes]:
    """What the last call saw: its arguments; the two words and the rest of its options."""
    seen = list((ctypes.c_uint64 * 10).in_dll(library, "seen"))
    options = bytes((ctypes.c_ubyte * 64).in_dll(library, "options"))
    return seen, list(np.frombuffer(options[:8], np.int32)), options[8:]


both = pytest.mark.parametrize(("version", "generation"), [(5300, 5), (5412, 5), (6000, 6)])
SLICES = Slices(
    kind=Kind.FLOAT16,
    count=3,
    sources=0x1000_0000_0001,
    source_nbytes=0x2000_0000_0002,
    targets=0x3000_0000_0003,
    target_nbytes=0x4000_0000_0004,
    statuses=0x5000_0000_0005,
    temp=0x6000_0000_0006,
    temp_nbytes=2**33,
)


def test_options_have_64_bytes() -> None:
    assert ctypes.sizeof(CompressOptions) == ctypes.sizeof(DecompressOptions) == 64
    assert CompressOptions.data_type.offset == DecompressOptions.data_type.offset == 4


@both
def test_arguments_arrive_where_they_belong(
    stand_in: Callable[..., Path], version: int, generation: int
) -> None:
    library, raw = opened(stand_in(version, generation))
    assert library.generation == generation
    assert library.version == nvcomp.version_text(version)
    float16 = {5: 9, 6: 10}[generation]

    library.compress_async(SLICES, 65_536, 0x7000_0000_0007)
    seen, words, rest = kept(raw)
    assert seen == [
        *(SLICES.sources, SLICES.source_nbytes, 65_536, 3),
        *(SLICES.temp, 2**33, SLICES.targets, SLICES.target_nbytes),
        *(SLICES.statuses, 0x7000_0000_0007),
    ]
    assert (words, rest) == ([0, float16], bytes(56))

    library.decompress_async(SLICES, 0x8000_0000_0008, 0x7000_0000_0007)
    seen, words, rest = kept(raw)
    assert seen == [
        *(SLICES.sources, SLICES.source_nbytes, 0x8000_0000_0008, SLICES.target_nbytes),
        *(3, SLICES.temp, 2**33, SLICES.targets),
        *(SLICES.statuses, 0x7000_0000_0007),
    ]
    assert (words, rest) == ([0, float16], bytes(56))


@both
def test_sizes_and_alignments_are_asked_for(
    stand_in: Callable[..., Path], version: int, generation: int
) -> None:
    library, raw = opened(stand_in(version, generation))
    assert library.max_output_nbytes(Kind.BYTES, 5000) == 10_000
    assert kept(raw)[1] == [0, 1]
    assert library.compress_temp_nbytes(Kind.FLOAT8_E4M3, 2, 3, 4) == 4_003_002
    assert library.decompress_temp_nbytes(Kind.FLOAT8_E4M3, 2, 3, 4) == 4_003_009
    assert kept(raw)[1] == [0, {5: 10, 6: 9}[generation]]
    assert library.compress_alignments(Kind.BYTES) == Alignments(8, 8, 1)
    assert library.decompress_alignments(Kind.BYTES) == Alignments(4, 2, 1)


def test_a_status_is_told_by_name(stand_in: Callable[..., Path]) -> None:
    library, raw = opened(stand_in(5300, 5))
    answer = ctypes.c_int.in_dll(raw, "answer")
    calls = {
        "CompressAsync": lambda: library.compress_async(SLICES, 1, 0),
        "DecompressAsync": lambda: library.decompress_async(SLICES, 0, 0),
        "CompressGetTempSize": lambda: library.compress_temp_nbytes(Kind.BYTES, 1, 1, 1),
        "DecompressGetTempSize": lambda: library.decompress_temp_nbytes(Kind.BYTES, 1, 1, 1),
        "CompressGetMaxOutputChunkSize": lambda: library.max_output_nbytes(Kind.BYTES, 1),
    }
    try:
        for name, call in calls.items():
            for code, text in ((17, r"17 \(nvcompErrorAlignment\)"), (99, r"99 \(unknown\)")):
                answer.value = code
                with pytest.raises(DeviceFault, match=f"nvcompBatchedANS{name} returned {text}"):
                    call()
    finally:
        answer.value = 0


@pytest.mark.parametrize(
    ("version", "generation", "complaint"),
    [
        (5212, 5, r"is of version 5\.2\.12"),
        (4200, 5, r"is of version 4\.2\.0"),
        (6100, 6, r"is of version 6\.1\.0"),
        (7000, 6, r"is of version 7\.0\.0"),
        # 5.10.0 would call itself so: its symbols tell
        (6000, 5, r"is of version 6\.0\.0 and lacks a symbol \(.*GetTempSize"),
        (5300, 6, r"is of version 5\.3\.0 and lacks a symbol \(.*GetTempSizeAsync"),
    ],
)
def test_another_version_is_refused(
    stand_in: Callable[..., Path], version: int, generation: int, complaint: str
) -> None:
    path = stand_in(version, generation)
    with pytest.raises(Unavailable, match=complaint) as raised:
        open_nvcomp(str(path))
    message = str(raised.value)
    assert str(path) in message
    assert "accepted: nvCOMP 5.3 to 5.9, 6.0; to get it: pip install nvidia-libnvcomp" in message
    assert "\n" not in message


def test_a_library_that_wants_wider_boundaries_is_refused(stand_in: Callable[..., Path]) -> None:
    path = stand_in(5302, 5)
    alignment = ctypes.c_size_t.in_dll(ctypes.CDLL(str(path)), "alignment")
    alignment.value = 32
    with pytest.raises(Unavailable, match=r"wants buffers at multiples of 32 .*up to 16"):
        open_nvcomp(str(path))


def test_a_library_that_knows_no_type_of_ours_is_refused(stand_in: Callable[..., Path]) -> None:
    path = stand_in(5303, 5)
    answer = ctypes.c_int.in_dll(ctypes.CDLL(str(path)), "answer")
    answer.value = 11
    with pytest.raises(Unavailable, match=r"BYTES: .* returned 11 \(nvcompErrorNotSupported\)"):
        open_nvcomp(str(path))
    answer.value = 77
    with pytest.raises(Unavailable, match=r"nvcompGetProperties returned 77"):
        open_nvcomp(str(path))


def test_a_missing_library_is_told_with_its_path_and_the_remedy() -> None:
    with pytest.raises(Unavailable, match=r"'ans': no usable nvCOMP: /nowhere/libnvcomp\.so\.5"):
        open_nvcomp("/nowhere/libnvcomp.so.5")


def test_another_library_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda path: SimpleNamespace())
    with pytest.raises(Unavailable, match=r"libz\.so: has no nvcompGetProperties"):
        open_nvcomp("libz.so")


def test_every_candidate_is_tried_and_each_failure_told(
    stand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    old, good = stand_in(5200, 5), stand_in(5300, 5)
    monkeypatch.setattr(nvcomp, "nvcomp_candidates", lambda library: (str(old), str(good)))
    assert open_nvcomp(None).path == str(good)
    monkeypatch.setattr(nvcomp, "nvcomp_candidates", lambda library: (str(old), "/nowhere/n.so"))
    with pytest.raises(Unavailable, match=r"5\.2\.0; /nowhere/n\.so: cannot be opened"):
        open_nvcomp(None)


def test_ans_needs_a_gpu_before_it_looks_for_nvcomp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ans, "cuda_unavailable", lambda: "no GPU: /dev/nvidiactl not found")
    with pytest.raises(Unavailable, match=r"'ans': needs an NVIDIA GPU and nvCOMP; no GPU: /dev"):
        ans.open_ans(None)


def test_ans_is_opened_where_there_is_all_it_needs(
    stand_in: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ans, "cuda_unavailable", lambda: None)
    codec = ans.open_ans(str(stand_in(6000, 6)))
    assert (codec.name, codec.identity) == ("ans", "ans, 1, nvCOMP 6")


def test_the_installed_library_answers_as_its_abi_says() -> None:
    """The real one, which needs no device for this."""
    try:
        library = open_nvcomp(None)
    except Unavailable as error:
        pytest.skip(f"{error} ({nvcomp_candidates(None)})")
    for kind in Kind:
        assert library.max_output_nbytes(kind, 65_536) > 65_536
        assert library.decompress_temp_nbytes(kind, 256, 2**20, 2**24) >= 0
        assert max(library.compress_alignments(kind)) <= 16
