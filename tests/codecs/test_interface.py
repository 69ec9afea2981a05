"""How codecs are chosen, what they refuse, and what they check."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import hypothesis.strategies as st
import numba
import numpy as np
import pytest
from hypothesis import given

from orbitkv.codecs import (
    HOST_CODECS,
    RawCodec,
    RawReason,
    SegmentSpec,
    copy_with_crc32,
    cpu,
    open_codec,
    open_host_codec,
    reason_to_stay_raw,
)
from orbitkv.errors import ConfigError, CorruptObject, Unavailable
from orbitkv.objects import Format, crc32
from orbitkv.segment import DTYPE_NBYTES, NHD, Axis, Geometry, Role, Slot
from tests.codecs.reference import DTYPES, bound, decoded, encoded, spec, words

ROOT = Path(__file__).parents[2]
LOSSY = ("fp8", "turboquant-4", "turboquant-3")

all_lossy = pytest.mark.parametrize("name", LOSSY)


def quiet(_: str) -> None:
    pass


def opened(name: str):  # noqa: ANN201 - a Codec
    return open_codec(name, rotation_seed=0, on_compile=quiet)


def test_codecs_are_chosen_by_name() -> None:
    formats = {name: opened(name).format for name in HOST_CODECS}
    assert formats == {
        "none": Format.RAW,
        "fp8": Format.FP8_E4M3FN,
        "turboquant-4": Format.TURBOQUANT4,
        "turboquant-3": Format.TURBOQUANT3,
    }
    assert [opened(name).name for name in HOST_CODECS] == list(HOST_CODECS)


def test_ans_is_refused_with_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orbitkv.codecs.ans.cuda_unavailable", lambda: "no GPU: give it one")
    with pytest.raises(Unavailable, match=r"'ans': needs an NVIDIA GPU and nvCOMP; no GPU: give"):
        opened("ans")


def test_ans_is_refused_with_the_library_that_was_looked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orbitkv.codecs.ans.cuda_unavailable", lambda: None)
    with pytest.raises(Unavailable, match=r"/none/lib\.so: cannot be opened .*to get it: pip"):
        open_codec("ans", rotation_seed=0, on_compile=quiet, nvcomp_library="/none/lib.so")


def test_files_are_never_encoded_by_ans() -> None:
    with pytest.raises(Unavailable, match=r"'ans': needs an NVIDIA GPU, and files .*: none, fp8"):
        open_host_codec("ans", rotation_seed=0, on_compile=quiet)
    assert open_host_codec("none", rotation_seed=0, on_compile=quiet).name == "none"


def test_an_unknown_name_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(
        ConfigError, match=r"'zip'; accepted: none, fp8, turboquant-4, turboquant-3"
    ):
        opened("zip")


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_of_more_than_64_bits_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="rotation seed"):
        open_codec("turboquant-4", rotation_seed=seed, on_compile=quiet)


def test_a_missing_numba_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "orbitkv.codecs.host", None)
    monkeypatch.delattr("orbitkv.codecs.host", raising=False)
    with pytest.raises(Unavailable, match="'fp8': numba cannot be imported"):
        opened("fp8")


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("fp8", {"dtype": "float32"}, RawReason.UNSUPPORTED_DTYPE),
        ("fp8", {"dtype": "float8_e4m3fn"}, RawReason.SAVES_TOO_LITTLE),
        ("turboquant-4", {"dtype": "float32"}, RawReason.UNSUPPORTED_DTYPE),
        ("turboquant-3", {"dtype": "float8_e4m3fn"}, RawReason.UNSUPPORTED_DTYPE),
        ("turboquant-4", {"head_dim": 16}, RawReason.UNSUPPORTED_LAYOUT),
        ("turboquant-4", {"head_dim": 96}, RawReason.UNSUPPORTED_LAYOUT),
        ("turboquant-4", {"head_dim": 512}, RawReason.UNSUPPORTED_LAYOUT),
        ("turboquant-4", {"axes": (Axis.DIM, Axis.HEAD, Axis.TOKEN)}, RawReason.UNSUPPORTED_LAYOUT),
        ("turboquant-4", {"axes": (Axis.HEAD, Axis.HEAD, Axis.DIM)}, RawReason.UNSUPPORTED_LAYOUT),
    ],
)
def test_what_a_codec_cannot_take_is_raw_with_a_reason(
    name: str, changes: dict[str, object], reason: RawReason
) -> None:
    assert opened(name).bind(spec(**changes)) is reason  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPE_NBYTES)
def test_none_keeps_any_bytes(dtype: str) -> None:
    raw = RawCodec().bind(spec(dtype, head_dim=7))
    segment = np.random.default_rng(0).integers(0, 256, raw.encoded_nbytes).astype(np.uint8)
    out, back = np.zeros_like(segment), np.zeros_like(segment)
    assert raw.encode(segment, out) == segment.nbytes == raw.spec.original_nbytes
    raw.decode(out, back)
    assert (back == segment).all()
    back[:] = 0
    assert raw.encode_many(np.array([segment.ctypes.data]), np.array([back.ctypes.data])) == {}
    assert (back == segment).all()


@given(st.integers(0, 300_000), st.integers(0, 7))
def test_copy_with_crc32_equals_a_copy_and_a_crc(nbytes: int, start: int) -> None:
    source = np.random.default_rng(nbytes).integers(0, 256, nbytes + 8).astype(np.uint8)[start:]
    target = np.zeros_like(source)
    assert copy_with_crc32(source, target) == crc32(source)
    assert (source == target).all()


def test_a_spec_is_taken_from_a_slot() -> None:
    slot = Slot(name="a", layer=0, role=Role.KV, dtype="float16", heads=3, head_dim=64, axes=NHD)
    found = SegmentSpec.of(slot, 16)
    assert found.original_nbytes == Geometry(16, (slot,)).segment_nbytes[0]
    assert (found.rows, found.vectors, found.elements) == (48, 96, 48 * 128)
    assert found.axes == (Axis.TOKEN, Axis.HEAD, Axis.DIM)


@pytest.mark.parametrize(
    ("encoded_nbytes", "original_nbytes", "reason"),
    [
        (7 * 512, 8 * 512, None),
        (7 * 512 + 1, 8 * 512, RawReason.SAVES_TOO_LITTLE),
        (512, 1024, None),
        (100, 512, RawReason.SAVES_TOO_LITTLE),
        (2**23, 2**24, None),
        (2**23, 2**24 + 1, RawReason.OVERSIZED),
    ],
)
def test_an_encoded_segment_must_save_an_eighth_of_its_footprint(
    encoded_nbytes: int, original_nbytes: int, reason: RawReason | None
) -> None:
    assert reason_to_stay_raw(encoded_nbytes, original_nbytes) is reason


@all_lossy
def test_wrong_lengths_and_gaps_are_refused_before_anything_is_written(name: str) -> None:
    codec = bound(name, spec())
    segment = np.zeros(codec.spec.elements, np.uint16)
    room = np.full(codec.encoded_nbytes, 7, np.uint8)
    with pytest.raises(ValueError, match="segment of"):
        codec.encode(segment[1:], room)
    with pytest.raises(ValueError, match="with gaps"):
        codec.encode(np.zeros(2 * len(segment), np.uint16)[::2], room)
    with pytest.raises(ValueError, match="off its words' boundary"):
        codec.encode(np.zeros(segment.nbytes + 1, np.uint8)[1:].view(np.uint16), room)
    with pytest.raises(ValueError, match="room for"):
        codec.encode(segment, room[1:])
    with pytest.raises(ValueError, match="room with gaps"):
        codec.encode(segment, np.zeros(2 * len(room), np.uint8)[::2])
    room.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        codec.encode(segment, room)
    segment.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        codec.decode(room, segment)
    assert (room == 7).all()


@all_lossy
def test_payloads_may_lie_at_odd_addresses_and_sources_be_read_only(name: str) -> None:
    codec = bound(name, spec(role=Role.KV))
    segment = words(np.random.default_rng(0).standard_normal(codec.spec.elements), "bfloat16")
    segment.flags.writeable = False
    wanted = encoded(codec, segment)
    for start in (0, 1):
        memory = np.full(codec.encoded_nbytes + 3, 7, np.uint8)[start:]
        codec.encode(segment, memory)
        assert (memory[: codec.encoded_nbytes] == wanted).all()
        assert (memory[codec.encoded_nbytes :] == 7).all()
        memory.flags.writeable = False
        back = decoded(codec, memory[: codec.encoded_nbytes])
        assert (back == decoded(codec, wanted)).all()


@all_lossy
def test_many_segments_at_once_equal_one_by_one(name: str) -> None:
    codec = bound(name, spec("float16", Role.KV, head_dim=32))
    generator = np.random.default_rng(0)
    segments = words(generator.standard_normal((9, codec.spec.elements)), "float16")
    segments[4, 11], segments[7, 500] = 0x7E00, 0xFC00
    places = np.full((9, codec.encoded_nbytes + 64), 7, np.uint8)
    sources = np.array([segment.ctypes.data for segment in segments])
    targets = np.array([place.ctypes.data for place in places])
    found = codec.encode_many(sources, targets)
    assert found == {4: RawReason.NONFINITE, 7: RawReason.NONFINITE}
    assert (places[:, codec.encoded_nbytes :] == 7).all()
    good = [index for index in range(9) if index not in found]
    back = np.zeros_like(segments)
    codec.decode_many(targets[good], np.array([back[index].ctypes.data for index in good]))
    for index in good:
        payload = encoded(codec, segments[index])
        assert (places[index, : codec.encoded_nbytes] == payload).all()
        assert (back[index] == decoded(codec, payload)).all()
    with pytest.raises(ValueError, match="as many as targets"):
        codec.encode_many(sources, targets[1:])
    with pytest.raises(ValueError, match="as many as targets"):
        codec.decode_many(sources, targets[1:])


def test_the_first_corrupt_payload_of_many_is_named() -> None:
    codec = bound("turboquant-4", spec())
    good = encoded(codec, np.zeros(codec.spec.elements, np.uint16))
    bad = good.copy()
    bad[-2:].view(np.uint16)[:] = 0x7C00
    out = np.zeros((3, codec.spec.elements), np.uint16)
    sources = np.array([good.ctypes.data, bad.ctypes.data, bad.ctypes.data])
    with pytest.raises(CorruptObject, match="payload 1:"):
        codec.decode_many(sources, np.array([row.ctypes.data for row in out]))


@all_lossy
def test_threads_share_a_codec_and_get_the_same_bytes(name: str) -> None:
    codec = bound(name, spec("bfloat16", Role.KV, tokens=64))
    segment = words(np.random.default_rng(1).standard_normal(codec.spec.elements), "bfloat16")
    wanted = encoded(codec, segment).tobytes()
    found: list[bytes] = []

    def work() -> None:
        found.extend(encoded(codec, segment).tobytes() for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(found) == {wanted}
    assert len(found) == 80


FRESH = """
import hashlib, sys
import numpy as np
from orbitkv.codecs import SegmentSpec, open_codec
from orbitkv.segment import Role
digest = hashlib.sha256()
for name in ("fp8", "turboquant-4", "turboquant-3"):
    codec = open_codec(name, rotation_seed=9, on_compile=lambda _: None)
    for dtype in ("bfloat16", "float16"):
        shape = {"tokens": 9, "heads": 3, "head_dim": 64}
        bound = codec.bind(SegmentSpec(dtype=dtype, role=Role.KV, **shape))
        segment = np.random.default_rng(5).integers(0, 0x3000, bound.spec.elements, np.uint16)
        out = np.empty(bound.encoded_nbytes, np.uint8)
        assert bound.encode(segment, out) == len(out)
        digest.update(out)
print(digest.hexdigest())
"""


def fresh(code: str, *flags: str, cwd: Path = ROOT) -> str:
    command = [sys.executable, "-W", "error", *flags, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=cwd).stdout


def test_processes_encode_the_same_bytes() -> None:
    assert len({fresh(FRESH) for _ in range(2)}) == 1


def test_none_does_not_import_numba() -> None:
    code = (
        "import sys; from orbitkv.codecs import open_codec\n"
        "open_codec('none', rotation_seed=0, on_compile=print)\n"
        "print('numba' in sys.modules, 'llvmlite' in sys.modules)"
    )
    assert fresh(code) == "False False\n"


def test_first_use_tells_that_it_compiles_and_the_second_finds_the_result(
    tmp_path: Path,
) -> None:
    code = (
        f"import sys; sys.path[:0] = [{str(ROOT)!r}]\n"
        "from orbitkv.codecs import SegmentSpec, open_codec\n"
        "from orbitkv.segment import Role\n"
        "codec = open_codec('fp8', rotation_seed=0, on_compile=print)\n"
        "spec = SegmentSpec(dtype='float16', role=Role.K, tokens=1, heads=1, head_dim=32)\n"
        "codec.bind(spec), codec.bind(spec)\n"
    )
    home = f"import os; os.environ['NUMBA_CACHE_DIR'] = {str(tmp_path)!r}\n"
    runs = [fresh(home + code, cwd=tmp_path) for _ in range(2)]
    assert runs == ["compiling the kernels of fp8, once for this processor\n", ""]


def assembly() -> dict[str, str]:
    """Of every kernel, compiled anew: what comes from disk cannot be inspected."""
    nothing, halvings = np.empty(0, np.int64), (0,) * 7
    layout = (8, 1, 1, 4, False)
    arguments = {
        "fp8_encode": (nothing, nothing, nothing, 64, False),
        "fp8_decode": (nothing, nothing, 64, False),
        "turboquant_encode": (nothing, nothing, nothing, *layout, 0, 0, halvings),
        "turboquant_decode": (nothing, nothing, *layout, 0, 0, halvings),
    }
    texts = {}
    for name, given_ in arguments.items():
        compiled = numba.njit(**cpu._OPTIONS)(getattr(cpu, name).py_func)
        compiled(*given_)
        texts[name] = "".join(compiled.inspect_asm().values())
    return texts


def test_no_kernel_contracts_a_multiplication_and_an_addition() -> None:
    fused = ("vfmadd", "vfmsub", "vfnmadd", "vfnmsub", "fmadd", "fmla", "fmls")
    found = [
        (name, word) for name, text in assembly().items() for word in fused if f"\t{word}" in text
    ]
    assert found == []


def test_kernels_release_the_gil() -> None:
    for name in ("fp8_encode", "fp8_decode", "turboquant_encode", "turboquant_decode"):
        assert getattr(cpu, name).targetoptions["nogil"]


@all_lossy
@pytest.mark.parametrize("dtype", DTYPES)
def test_encoding_what_was_decoded_changes_little_and_decoding_twice_nothing(
    name: str, dtype: str
) -> None:
    codec = bound(name, spec(dtype, Role.KV))
    segment = words(np.random.default_rng(2).standard_normal(codec.spec.elements), dtype)
    payload = encoded(codec, segment)
    first, second = decoded(codec, payload), decoded(codec, payload)
    assert (first == second).all()
