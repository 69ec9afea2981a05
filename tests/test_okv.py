"""``orbitkv encode``, ``inspect`` and ``decode``: exact where they say so, and never fooled."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from orbitkv import okv
from orbitkv.cli import main
from orbitkv.codecs import open_codec
from orbitkv.errors import CorruptObject, OrbitError
from orbitkv.objects import Bytes, Format, Segment, check_payloads, crc32, read_header, write_object
from orbitkv.segment import digest_fields

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden" / "okv"
DOCUMENT = ROOT / "docs" / "okv.md"
independent = SimpleNamespace(**runpy.run_path(str(GOLDEN / "vectors.py")))
CASES = sorted(independent.CASES)
CODECS = ("none", "fp8", "turboquant-4", "turboquant-3")
NBYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1}
TOOL = "a test"
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])

Entry = tuple[str, tuple[int, ...], bytes]  # dtype, shape, elements
Tensors = Mapping[str, Entry]


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command puts the current directory on the path; take it off again."""
    monkeypatch.setattr(sys, "path", [*sys.path])


def safetensors_of(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> bytes:
    """Write a safetensors file by hand, so that any dtype and any fault can be in it."""
    header: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    body = b""
    for name, (dtype, shape, elements) in tensors.items():
        offsets = (len(body), len(body) + len(elements))
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        body += elements
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + body


def tensors_in(stored: bytes) -> dict[str, Entry]:
    return {
        name: (one["dtype"], tuple(one["shape"]), bytes(one["data"]))
        for name, one in deserialize(stored)
    }


def numbers(dtype: str, shape: tuple[int, ...], seed: int = 0) -> Entry:
    """Elements near N(0, 1); any bytes where the dtype is never encoded."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape).astype(np.float32)
    if dtype == "BF16":
        elements = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
    elif dtype == "F16":
        elements = values.astype(np.float16).tobytes()
    else:
        elements = rng.bytes(values.size * NBYTES[dtype])
    return dtype, shape, elements


def floats(entry: Entry) -> np.ndarray[Any, np.dtype[np.float32]]:
    dtype, shape, elements = entry
    if dtype == "BF16":
        wide = np.frombuffer(elements, np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(elements, np.float16).astype(np.float32).reshape(shape)


def silent(message: str) -> None:
    """Kernels are compiled wherever a test first needs them."""


def encoded(
    tensors: Tensors, codec: str, *, seed: int = 0, metadata: Mapping[str, str] | None = None
) -> Bytes:
    """Encode in memory."""
    described = [
        (okv.Tensor(name, dtype, shape), np.frombuffer(elements, np.uint8))
        for name, (dtype, shape, elements) in tensors.items()
    ]
    opened = open_codec(codec, rotation_seed=seed, on_compile=silent)
    return okv.encode_tensors(
        described, opened, rotation_seed=seed, metadata=metadata or {}, tool=TOOL
    )


def decoded(image: Bytes) -> dict[str, Entry]:
    """Decode in memory, all the way to what a file would hold."""
    found = okv.read_okv(image)
    parts = okv.safetensors_parts(found.manifest, okv.decode_tensors(image, found, silent))
    return tensors_in(b"".join(part.tobytes() for part in parts))


def golden(name: str) -> Bytes:
    return np.fromfile(GOLDEN / name, np.uint8)


def refused(image: Bytes) -> bool:
    try:
        decoded(image)
    except CorruptObject as error:
        return one_line(error)
    return False


def one_line(error: CorruptObject) -> bool:
    """Whatever a stranger wrote, what is said of it stays short."""
    return "\n" not in str(error) and len(str(error)) < 1000


def command(*arguments: object) -> int:
    return main([str(argument) for argument in arguments])


Refusal = Callable[..., str]


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Refusal:
    """Run a command that must be refused; return its one line of error."""

    def run(*arguments: object) -> str:
        capsys.readouterr()
        assert command(*arguments) == 2
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("orbitkv: ")
        assert said.err.count("\n") == 1
        return said.err

    return run


# Golden files -----------------------------------------------------------------------------


def test_golden_files_are_those_that_the_script_writes() -> None:
    made = independent.made()
    assert made == {
        path.name: path.read_bytes() for path in GOLDEN.glob("*.*") if path.suffix != ".py"
    }


@pytest.mark.parametrize("case", CASES)
def test_what_is_encoded_equals_the_golden_file_byte_for_byte(case: str, tmp_path: Path) -> None:
    target = tmp_path / "made.okv"
    okv.encode_file(
        GOLDEN / f"{case}.in.safetensors",
        target,
        codec=case,
        rotation_seed=independent.SEED,
        tool=independent.TOOL,
        on_compile=silent,
    )
    assert target.read_bytes() == golden(f"{case}.okv").tobytes()


@pytest.mark.parametrize("case", CASES)
def test_golden_files_decode_to_what_the_script_says_byte_for_byte(
    case: str, tmp_path: Path
) -> None:
    target = tmp_path / "back.safetensors"
    assert command("decode", GOLDEN / f"{case}.okv", "-o", target) == 0
    assert target.read_bytes() == golden(f"{case}.out.safetensors").tobytes()


# Round trips ------------------------------------------------------------------------------


def everything() -> dict[str, Entry]:
    """Seven layers, every role and dtype among those that are not protected."""
    tensors = {
        f"layers.{layer}.k": numbers("BF16", (2, 8, 64), layer) for layer in (0, 1, 2, 11, 12)
    }
    for seed, dtype in enumerate(NBYTES):
        tensors[f"layers.{3 + seed}.k"] = numbers(dtype, (2, 9, 64), seed)
        tensors[f"layers.{3 + seed}.v"] = numbers(dtype, (1, 17, 128), seed)
        tensors[f"layers.{3 + seed}.kv"] = numbers(dtype, (3, 8, 64), seed)
    return tensors


@pytest.mark.parametrize("codec", CODECS)
def test_every_role_and_dtype_comes_back_by_name_dtype_and_shape(
    codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, stored, back = (tmp_path / name for name in ("in.safetensors", "a.okv", "back"))
    tensors, metadata = everything(), {"format": "pt", "z": "ü\n", "a": ""}
    source.write_bytes(safetensors_of(tensors, metadata))
    assert command("encode", source, "-o", stored, "--codec", codec, "--seed", 7) == 0
    assert command("inspect", stored, "--verify") == 0
    capsys.readouterr()
    assert command("inspect", stored, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert command("decode", stored, "-o", back) == 0
    found = tensors_in(back.read_bytes())

    assert {name: entry[:2] for name, entry in found.items()} == {
        name: entry[:2] for name, entry in tensors.items()
    }
    kept = {segment["name"] for segment in told["segments"] if segment["format"] != "raw"}
    for name, entry in tensors.items():
        if name not in kept:
            assert found[name] == entry
            continue
        wanted, seen = floats(entry), floats(found[name])
        error = float(((wanted - seen) ** 2).sum() / (wanted**2).sum())
        assert 0 < error < {"fp8": 0.002, "turboquant-4": 0.05, "turboquant-3": 0.15}[codec]
    halves = {f"layers.{layer}.{role}" for layer in (4, 5) for role in ("k", "v", "kv")}
    outer = {f"layers.{layer}.k" for layer in (0, 1, 2, 11, 12)}
    rotated = halves | {"layers.2.k"}
    assert kept == {"none": set(), "fp8": halves | outer}.get(codec, rotated)
    assert told["metadata"] == metadata
    text = back.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    assert header["__metadata__"] == metadata


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("role", ["k", "v", "kv"])
@pytest.mark.parametrize("dtype", NBYTES)
def test_a_file_of_one_tensor_comes_back(codec: str, role: str, dtype: str, tmp_path: Path) -> None:
    source, stored, back = (tmp_path / name for name in ("in", "a.okv", "back"))
    name = f"layers.5.{role}"
    entry = numbers(dtype, (4, 4, 64))
    source.write_bytes(safetensors_of({name: entry}))
    assert command("encode", source, "-o", stored, "--codec", codec) == 0
    assert command("decode", stored, "-o", back) == 0
    ((found, seen),) = tensors_in(back.read_bytes()).items()
    assert (found, seen[:2]) == (name, entry[:2])
    if codec != "fp8" or dtype not in ("BF16", "F16"):  # alone, a layer is an outer one
        assert seen == entry
    else:
        assert np.abs(floats(seen) - floats(entry)).max() < 0.2


def test_a_tensor_that_is_decoded_equals_what_its_codec_makes_of_it() -> None:
    tensors = everything()
    for codec in CODECS[1:]:
        image = encoded(tensors, codec, seed=2**63 + 1)
        found = okv.read_okv(image)
        opened = open_codec(codec, rotation_seed=2**63 + 1, on_compile=silent)
        back = decoded(image)
        for tensor, row in found.rows:
            if row.format == Format.RAW:
                continue
            bound: Any = opened.bind(tensor.spec)
            words = np.frombuffer(tensors[tensor.name][2], np.uint16)
            payload, again = np.empty(bound.encoded_nbytes, np.uint8), np.empty_like(words)
            bound.encode(words, payload)
            bound.decode(payload, again)
            assert image[row.offset :][: row.stored_nbytes].tobytes() == payload.tobytes()
            assert back[tensor.name][2] == again.tobytes()


@st.composite
def files(draw: st.DrawFn) -> dict[str, Entry]:
    names = draw(
        st.lists(
            st.tuples(st.integers(0, 9) | st.just(10**9 - 1), st.sampled_from(("k", "v", "kv"))),
            min_size=1,
            max_size=8,
            unique=True,
        )
    )
    tensors = {}
    for layer, role in names:
        dtype = draw(st.sampled_from(tuple(NBYTES)))
        width = draw(st.sampled_from((32, 64, 128, 256)) | st.integers(1, 80))
        shape = (
            draw(st.integers(1, 4)),
            draw(st.integers(1, 9)),
            width * (2 if role == "kv" else 1),
        )
        entry = numbers(dtype, shape, draw(st.integers(0, 99)))
        if draw(st.booleans()):  # any bits: NaN, infinities, huge
            bits = np.random.default_rng(draw(st.integers(0, 99))).bytes(len(entry[2]))
            entry = (dtype, shape, bits)
        tensors[f"layers.{layer}.{role}"] = entry
    return tensors


@unhurried
@given(files(), st.sampled_from(CODECS), st.integers(0, 2**64 - 1), st.text(max_size=5))
def test_files_of_any_shapes_and_dtypes_come_back(
    tensors: dict[str, Entry], codec: str, seed: int, text: str
) -> None:
    metadata = {text: text} if text.isprintable() else {}
    image = encoded(tensors, codec, seed=seed, metadata=metadata)
    assert image.nbytes % 4096 == 0
    found = okv.read_okv(image)
    assert found.manifest.metadata == metadata
    back = decoded(image)
    assert set(back) == set(tensors)
    for tensor, row in found.rows:
        assert back[tensor.name][:2] == tensors[tensor.name][:2]
        if row.format == Format.RAW:
            assert back[tensor.name] == tensors[tensor.name]
    assert (
        encoded(dict(reversed(tensors.items())), codec, seed=seed, metadata=metadata).tobytes()
        == image.tobytes()
    )
    json.loads(okv.to_json(found, verified=True))


def test_the_file_that_comes_back_is_that_of_safetensors_itself() -> None:
    """Compared where the header holds no metadata, whose order safetensors leaves to chance."""
    safetensors = pytest.importorskip("safetensors")
    if not hasattr(safetensors, "TensorSpec"):
        pytest.skip("an older safetensors takes tensors in another form")
    tensors = everything()
    image = encoded(tensors, "none")
    found = okv.read_okv(image)
    parts = okv.safetensors_parts(found.manifest, okv.decode_tensors(image, found, silent))
    kept = {name: np.frombuffer(entry[2], np.uint8) for name, entry in tensors.items()}
    specs = {
        name: safetensors.TensorSpec(
            dtype=okv.DTYPES[dtype],
            shape=list(shape),
            data_ptr=kept[name].ctypes.data,
            data_len=kept[name].nbytes,
        )
        for name, (dtype, shape, _) in tensors.items()
    }
    assert b"".join(part.tobytes() for part in parts) == bytes(safetensors.serialize(specs, None))


def test_other_processes_write_the_same_bytes_both_ways(tmp_path: Path) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors_of(everything(), {"a": "1", "b": "2", "c": "3"}))
    results = []
    for seed in ("1", "2"):
        stored, back = tmp_path / f"{seed}.okv", tmp_path / f"{seed}.back"
        for arguments in (
            ("encode", source, "-o", stored, "--codec", "turboquant-3", "--seed", "12"),
            ("inspect", stored, "--verify"),
            ("decode", stored, "-o", back),
        ):
            done = subprocess.run(
                [sys.executable, "-W", "error", "-m", "orbitkv.cli", *map(str, arguments)],
                cwd=ROOT,
                env={**os.environ, "PYTHONHASHSEED": seed},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
        results.append((stored.read_bytes(), back.read_bytes()))
    assert results[0] == results[1]
    assert command("encode", source, "-o", stored, "--codec", "turboquant-3", "--seed", 12) == 0
    assert stored.read_bytes() == results[0][0]


def test_the_first_use_says_that_it_compiles(tmp_path: Path) -> None:
    source, stored = tmp_path / "in.safetensors", tmp_path / "a.okv"
    source.write_bytes(safetensors_of({"layers.0.k": numbers("F16", (2, 8, 64))}))
    said = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-m", "orbitkv.cli", "encode", source, "-o", stored, "--codec", "fp8"],
            cwd=ROOT,
            env={**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
            capture_output=True,
            text=True,
            check=True,
        )
        said.append(done.stderr)
    assert said == ["orbitkv: compiling the kernels of fp8, once for this processor\n", ""]


def test_the_seed_decides_the_bytes_of_turboquant_and_of_no_other_codec() -> None:
    tensors = everything()
    for codec in CODECS:
        images = [encoded(tensors, codec, seed=seed).tobytes() for seed in (0, 2**64 - 1)]
        assert (images[0] != images[1]) == codec.startswith("turboquant")


def test_raw_segments_say_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = (8, 4096, 257)  # over 16 MiB in FP16
    tensors = {
        "layers.0.k": numbers("F16", wide),
        "layers.1.k": numbers("F16", (1, 1, 8)),
        "layers.2.k": numbers("F32", (1, 16, 64)),
        "layers.3.k": ("F16", (1, 16, 64), b"\x00\x7e" * 1024),
        "layers.4.k": ("BF16", (1, 16, 64), b"\x00\x44" * 1024),
    }
    stored = tmp_path / "a.okv"
    stored.write_bytes(encoded(tensors, "fp8").tobytes())
    assert command("inspect", stored, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [segment["raw_reason"] for segment in told["segments"]] == [
        "oversized",
        "saves_too_little",
        "unsupported_dtype",
        "nonfinite",
        "out_of_range",
    ]
    assert set(told["raw_reasons"].values()) == {1}


# Inspection -------------------------------------------------------------------------------


def test_inspect_shows_header_table_and_totals(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", GOLDEN / "turboquant-4.okv") == 0
    shown = capsys.readouterr().out
    header = read_header(golden("turboquant-4.okv"))
    for text in ("golden 1", "turboquant-4", str(independent.SEED), header.key_digest.hex()):
        assert text in shown
    for row in header.rows:
        assert f"{row.crc32:08x}" in shown
    for text in ("protected_layer", "nonfinite", "unsupported_layout", "turboquant4", "manifest"):
        assert text in shown
    assert "9 tensors, 3 encoded, 6 raw (1 nonfinite, 4 protected_layer, 1 unsupp" in shown
    assert "verified" not in shown
    assert command("inspect", GOLDEN / "turboquant-4.okv", "--verify") == 0
    assert "verified: every CRC" in capsys.readouterr().out


def test_inspect_as_json_is_one_object_that_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("inspect", GOLDEN / "fp8.okv", "--json", "--verify") == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verified"] is True
    assert told["file_nbytes"] == golden("fp8.okv").nbytes
    assert told["stored_nbytes"] == sum(s["stored_nbytes"] for s in told["segments"])
    assert told["original_nbytes"] == sum(s["original_nbytes"] for s in told["segments"])
    assert told["ratio"] == told["stored_nbytes"] / told["original_nbytes"]
    assert (told["codec"], told["rotation_seed"]) == ("fp8", None)


def test_inspect_reads_no_payload_unless_it_is_to_verify(
    tmp_path: Path, refusal: Refusal, capsys: pytest.CaptureFixture[str]
) -> None:
    image = golden("fp8.okv")
    image[read_header(image).rows[1].offset] ^= 1
    stored = tmp_path / "damaged.okv"
    stored.write_bytes(image.tobytes())
    assert command("inspect", stored) == 0
    assert f"{stored}: segment 1: crc32" in refusal("inspect", stored, "--verify")
    assert f"{stored}: segment 1: crc32" in refusal("inspect", stored, "--verify", "--json")


def test_inspect_does_not_load_a_huge_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """64 GiB, of which the filesystem holds two blocks."""
    manifest = okv.Manifest(
        TOOL, "none", None, {}, (okv.Tensor("layers.0.k", "F32", (8, 2**15, 2**16)),)
    )
    text = manifest.to_bytes()
    nbytes = 2**36
    rows = struct.pack("<BBHIQQQ", 64, 0, 0, zlib.crc32(text), len(text), len(text), 512)
    rows += struct.pack("<BBHIQQQ", 0, 0, 0, 0, nbytes, nbytes, 1024)
    total = nbytes + 4096
    head = struct.pack(
        "<8sHHIQQ32s28x", b"OrbitKV\0", 2, 96, 2, 1, total, digest_fields((b"okv", text))
    )
    stored = tmp_path / "huge.okv"
    with stored.open("wb") as file:
        file.write(head + struct.pack("<I", zlib.crc32(head + rows)) + rows)
        file.seek(512)
        file.write(text)
        file.truncate(total)
    tracemalloc.start()
    try:
        assert command("inspect", stored, "--json") == 0
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**24
    assert json.loads(capsys.readouterr().out)["original_nbytes"] == nbytes


# What is not accepted ---------------------------------------------------------------------

K = numbers("F16", (1, 2, 4))


@pytest.mark.parametrize(
    ("name", "entry", "said"),
    [
        ("lm_head", K, "tensor 'lm_head': accepted names: layers.<i>.k, layers.<i>.v and"),
        ("layers.01.k", K, "tensor 'layers.01.k'"),
        ("layers.-1.k", K, "tensor 'layers.-1.k'"),
        ("layers.1.q", K, "tensor 'layers.1.q'"),
        ("layers.1.k\n", K, r"tensor 'layers.1.k\n'"),
        ("layers.\u0661.k", K, "tensor"),
        ("layers.1000000000.k", K, "tensor"),
        ("x" * 10000, K, "tensor 'xxx"),
        ("", K, "tensor ''"),
        ("layers.0.k", ("I8", (1, 1, 4), b"abcd"), "dtype 'I8'; accepted: F32, BF16, F16, F8_E4M3"),
        ("layers.0.k", ("F64", (1, 1, 1), bytes(8)), "dtype 'F64'"),
        ("layers.0.k", ("F8_E5M2", (1, 1, 1), b"a"), "dtype 'F8_E5M2'"),
        ("layers.0.k", ("F16", (2,), b"abcd"), "shape [2]; accepted: [heads, tokens, head_dim]"),
        ("layers.0.k", ("F16", (1, 1, 1, 2), b"abcd"), "shape [1, 1, 1, 2]"),
        ("layers.0.k", ("F16", (), b"ab"), "shape []"),
        ("layers.0.k", ("F16", (1, 0, 4), b""), "shape [1, 0, 4]"),
        ("layers.0.kv", ("F16", (1, 1, 3), b"abcdef"), "accepted: [heads, tokens, 2 * head_dim]"),
    ],
)
def test_a_tensor_that_is_not_kv_is_named_with_what_is_accepted(
    name: str, entry: Entry, said: str, tmp_path: Path, refusal: Refusal
) -> None:
    source, stored = tmp_path / "in.safetensors", tmp_path / "a.okv"
    source.write_bytes(safetensors_of({"layers.7.v": K, name: entry}))
    assert said in refusal("encode", source, "-o", stored, "--codec", "none")
    assert sorted(tmp_path.iterdir()) == [source]


def test_many_faults_are_still_one_line(tmp_path: Path, refusal: Refusal) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors_of({f"other.{index}": K for index in range(50)}))
    said = refusal("encode", source, "-o", tmp_path / "a.okv", "--codec", "none")
    assert said.endswith("and 47 more\n")


@pytest.mark.parametrize(
    "stored",
    [
        b"",
        b"\0" * 8,
        b"\xff" * 100,
        b"PK\x03\x04" * 9,
        safetensors_of({}),
        safetensors_of({"layers.0.k": K})[:-1],
    ],
    ids=["empty", "zeros", "ones", "zip", "no tensors", "cut"],
)
def test_what_is_no_safetensors_file_is_refused(
    stored: bytes, tmp_path: Path, refusal: Refusal
) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(stored)
    assert str(source) in refusal("encode", source, "-o", tmp_path / "a.okv", "--codec", "fp8")
    assert sorted(tmp_path.iterdir()) == [source]


def test_metadata_beyond_what_a_manifest_holds_is_refused(tmp_path: Path, refusal: Refusal) -> None:
    source = tmp_path / "in.safetensors"
    source.write_bytes(safetensors_of({"layers.0.k": K}, {"a": "b" * 2**21}))
    said = refusal("encode", source, "-o", tmp_path / "a.okv", "--codec", "none")
    assert "metadata over 1048576 bytes" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--codec", "zstd"), "storage codec: 'zstd'; accepted: none, fp8, turboquant-4"),
        (("--codec", "ans"), "storage codec 'ans': needs"),
        (("--codec", "none", "--seed", "-1"), "rotation seed: -1; accepted: 0 to 2^64 - 1"),
        (("--codec", "none", "--seed", str(2**64)), "rotation seed: 18446744073709551616"),
    ],
)
def test_a_codec_or_seed_that_cannot_be_is_refused_before_anything_is_read(
    arguments: tuple[str, ...], said: str, tmp_path: Path, refusal: Refusal
) -> None:
    assert said in refusal("encode", tmp_path / "none", "-o", tmp_path / "a.okv", *arguments)


@pytest.mark.parametrize("arguments", [("encode", "a"), ("decode", "a"), ("inspect",)])
def test_arguments_that_are_missing_are_told_in_one_line(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# Where the output goes --------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.safetensors"
    path.write_bytes(safetensors_of({"layers.0.k": K}))
    return path


@pytest.mark.parametrize("link", [Path.symlink_to, Path.hardlink_to, None])
def test_the_input_is_never_the_output(
    link: Callable[[Path, Path], None] | None, source: Path, tmp_path: Path, refusal: Refusal
) -> None:
    before, target = source.read_bytes(), source
    if link:
        target = tmp_path / "link"
        link(target, source)
    said = refusal("encode", source, "-o", target, "--codec", "none")
    assert "is the input; accepted: another file" in said
    assert source.read_bytes() == before
    if not link:
        stored = tmp_path / "a.okv"
        assert command("encode", source, "-o", stored, "--codec", "none") == 0
        assert "is the input" in refusal("decode", stored, "-o", stored)


def test_an_output_is_replaced_past_its_link_and_with_nothing_beside_it(
    source: Path, tmp_path: Path
) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "old").write_bytes(b"old")
    link = tmp_path / "link.okv"
    link.symlink_to(there / "old")
    with (there / "old").open("rb") as before:  # a reader keeps what it has opened
        assert command("encode", source, "-o", link, "--codec", "none") == 0
        assert before.read() == b"old"
    assert link.is_symlink()
    assert [path.name for path in there.iterdir()] == ["old"]
    assert command("inspect", there / "old", "--verify") == 0


def test_outputs_that_cannot_be_files_are_left_as_they_are(
    source: Path, tmp_path: Path, refusal: Refusal
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for target in (pipe, tmp_path, Path("/dev/null")):
        assert "not a regular file" in refusal("encode", source, "-o", target, "--codec", "none")
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()
    missing = tmp_path / "no" / "a.okv"
    assert "no such directory" in refusal("encode", source, "-o", missing, "--codec", "none")


def test_inputs_that_are_no_files_are_refused(tmp_path: Path, refusal: Refusal) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, tmp_path):
        assert "not a regular file" in refusal("inspect", path)
        assert "not a regular file" in refusal("decode", path, "-o", tmp_path / "b")
        assert "not a regular file" in refusal(
            "encode", path, "-o", tmp_path / "b", "--codec", "none"
        )
    absent = tmp_path / "absent"
    for arguments in (("inspect", absent), ("decode", absent, "-o", tmp_path / "b")):
        assert f"{absent}: No such file or directory" in refusal(*arguments)


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_output_and_nothing_else(
    failing: str, source: Path, tmp_path: Path, refusal: Refusal, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "a.okv"
    target.write_bytes(b"old")

    def fail(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    owner: object = os if failing == "fsync" else Path
    monkeypatch.setattr(owner, failing, fail)
    said = refusal("encode", source, "-o", target, "--codec", "none")
    assert said == f"orbitkv: {target}: No space left on device\n"
    assert target.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [target, source]


def test_a_damaged_file_leaves_the_old_output(tmp_path: Path, refusal: Refusal) -> None:
    image = golden("turboquant-3.okv")
    image[-1] = 1
    stored, target = tmp_path / "damaged.okv", tmp_path / "back.safetensors"
    stored.write_bytes(image.tobytes())
    target.write_bytes(b"old")
    assert "padding after the last segment is not zero" in refusal("decode", stored, "-o", target)
    assert target.read_bytes() == b"old"
    assert sorted(tmp_path.iterdir()) == [target, stored]


# Damage -----------------------------------------------------------------------------------


@pytest.fixture
def small() -> Bytes:
    """One block: header, manifest, an encoded and a raw segment."""
    tensors = {"layers.0.k": numbers("BF16", (2, 4, 64)), "layers.0.v": numbers("F32", (1, 1, 3))}
    image = encoded(tensors, "fp8")
    assert image.nbytes == 4096
    return image


def test_every_flipped_byte_is_refused(small: Bytes, tmp_path: Path, refusal: Refusal) -> None:
    stored, target = tmp_path / "flipped.okv", tmp_path / "back"
    stored.write_bytes(small.tobytes())
    with stored.open("r+b") as file:
        for at, byte in enumerate(small.tobytes()):
            os.pwrite(file.fileno(), bytes((byte ^ 1 << at % 8,)), at)
            with pytest.raises(CorruptObject):
                okv.decode_file(stored, target, on_compile=silent)
            if at % 50 == 0:
                refusal("decode", stored, "-o", target)
                refusal("inspect", stored, "--verify")
            os.pwrite(file.fileno(), bytes((byte,)), at)
    assert [path.name for path in tmp_path.iterdir()] == ["flipped.okv"]
    assert command("decode", stored, "-o", target) == 0


def test_a_file_cut_at_any_length_or_longer_is_refused(
    small: Bytes, tmp_path: Path, refusal: Refusal
) -> None:
    stored, target = tmp_path / "cut.okv", tmp_path / "back"
    stored.write_bytes(np.concatenate([small, small]).tobytes())
    for nbytes in (2 * small.nbytes, small.nbytes + 1, *reversed(range(small.nbytes))):
        os.truncate(stored, nbytes)
        with pytest.raises(CorruptObject):
            okv.decode_file(stored, target, on_compile=silent)
        if nbytes % 50 == 0:
            refusal("inspect", stored)
    assert [path.name for path in tmp_path.iterdir()] == ["cut.okv"]


def resealed(image: Bytes) -> Bytes:
    """Make every CRC right again that can be: of payloads in the file, and the header's."""
    image = image.copy()
    (count,) = struct.unpack_from("<I", image, 12)
    count = min(count, (image.nbytes - 96) // 32)
    for row in range(96, 96 + 32 * count, 32):
        nbytes, offset = struct.unpack_from("<QQ", image, row + 16)
        if offset + nbytes <= image.nbytes:
            payload = image[offset : offset + nbytes].tobytes()
            struct.pack_into("<I", image, row + 4, zlib.crc32(payload))
    covered = image[:92].tobytes() + image[96 : 96 + 32 * count].tobytes()
    struct.pack_into("<I", image, 92, zlib.crc32(covered))
    return image


def forged(image: Bytes, text: bytes, *, key: bool = True) -> Bytes:
    """Another manifest in the same object; every CRC right, and the key digest if ``key``."""
    header = read_header(image)
    segments = check_payloads(image, header)
    manifest = np.frombuffer(text, np.uint8)
    segments[0] = Segment(Format.MANIFEST, manifest, manifest.nbytes, crc32=crc32(manifest))
    for segment in segments[1:]:
        segment.offset = None
    out = np.empty(image.nbytes + len(text) + 4096, np.uint8)
    digest = digest_fields((b"okv", text)) if key else header.key_digest
    nbytes = write_object(out, segments, key_digest=digest, generation=1)
    return out[:nbytes]


def manifest_of(image: Bytes) -> dict[str, Any]:
    row = read_header(image).rows[0]
    value = json.loads(image[row.offset : row.offset + row.stored_nbytes].tobytes())
    assert isinstance(value, dict)
    return value


def text_of(manifest: object) -> bytes:
    return json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode()


HUGE = (0, 1, 4, 2**16 - 1, 2**16, 2**31, 2**32 - 1)
LONG = (0, 1, 2**20, 2**40, 2**40 + 1, 2**53 + 1, 2**63, 2**64 - 512, 2**64 - 1)


@pytest.mark.parametrize("case", CASES)
def test_forged_counts_lengths_and_offsets_are_refused_without_room_for_them(case: str) -> None:
    image = golden(f"{case}.okv")
    assert not refused(image)  # what is compiled or imported is not counted
    count = len(read_header(image).rows)
    fields = [("<I", 12, value) for value in HUGE]
    fields += [("<Q", 24, value) for value in LONG]
    for row in range(96, 96 + 32 * count, 32):
        fields += [("<Q", row + at, value) for at in (8, 16, 24) for value in LONG]
    tracemalloc.start()
    try:
        for layout, offset, value in fields:
            changed = image.copy()
            struct.pack_into(layout, changed, offset, value)
            changed = resealed(changed)
            assert refused(changed) or np.array_equal(changed, image), (layout, offset, value)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**21


def test_a_manifest_with_other_crcs_but_the_old_key_is_refused() -> None:
    image = golden("turboquant-4.okv")
    manifest = manifest_of(image)
    manifest["tool"] = "golden 2"
    assert not refused(forged(image, text_of(manifest)))
    with pytest.raises(CorruptObject, match=r"key digest .* the manifest's"):
        decoded(forged(image, text_of(manifest), key=False))


Manifest = dict[str, Any]


def put(index: int, field: str, value: object) -> Callable[[Manifest], object]:
    return lambda manifest: manifest["tensors"][index].update({field: value})


def each(index: int, **fields: object) -> Callable[[Manifest], object]:
    return lambda manifest: manifest["tensors"][index].update(fields)


def top(**fields: object) -> Callable[[Manifest], object]:
    return lambda manifest: manifest.update(fields)


# Changes of the manifest of turboquant-4.okv after which it contradicts its rows, or itself.
LIES: dict[str, Callable[[Manifest], object]] = {
    "longer": put(2, "shape", [2, 9, 32]),
    "huge": put(2, "shape", [2**20, 2**20, 2**20]),
    "endless": put(2, "shape", [10**4000, 1, 1]),
    "within 2^40": put(2, "shape", [2**13, 2**13, 2**13]),
    "zero": put(0, "shape", [0, 16, 32]),
    "negative": put(0, "shape", [-1, -16, 32]),
    "bools": put(7, "shape", [True, True, 32]),
    "floats": put(0, "shape", [1.0, 16, 32]),
    "text": put(0, "shape", ["1", 16, 32]),
    "rank": put(0, "shape", [16, 32]),
    "another head dimension": put(2, "shape", [1, 4, 128]),
    "a width the codec has not": put(2, "shape", [2, 16, 16]),
    "wider dtype": put(2, "dtype", "F32"),
    "encoded F32": each(2, dtype="F32", shape=[1, 8, 32]),
    "encoded F8": each(2, dtype="F8_E4M3", shape=[4, 8, 32]),
    "unknown dtype": put(2, "dtype", "I16"),
    "role alone": put(2, "role", "v"),
    "name alone": put(2, "name", "layers.2.v"),
    "K for V": each(3, name="layers.3.kv", role="kv", shape=[2, 8, 64]),
    "V for K": each(2, name="layers.2.v", role="v"),
    "twice": each(3, name="layers.3.k", role="k"),
    "out of order": lambda m: m["tensors"].reverse(),
    "one less": lambda m: m["tensors"].__delitem__(0),
    "one more": lambda m: m["tensors"].append({**m["tensors"][-1], "name": "layers.9.k"}),
    "none": lambda m: m["tensors"].clear(),
    "tensors of another kind": top(tensors={"a": 1}),
    "tensor of another kind": lambda m: m["tensors"].__setitem__(0, ["layers.0.k"]),
    "a field more": put(0, "strides", [1]),
    "a field less": lambda m: m["tensors"][0].pop("role"),
    "another codec": top(codec="turboquant-3"),
    "no codec": top(codec="none"),
    "fp8": top(codec="fp8", rotation_seed=None, signs_version=None),
    "unknown codec": top(codec="zstd"),
    "codec of another kind": top(codec=["none"]),
    "seed a number": top(rotation_seed=5),
    "seed too high": top(rotation_seed=str(2**64)),
    "seed spelled": top(rotation_seed="007"),
    "no seed": top(rotation_seed=None),
    "signs": top(signs_version=2),
    "signs true": top(signs_version=True),
    "version": top(okv=2),
    "version true": top(okv=True),
    "tool": top(tool=5),
    "tool that clears the screen": top(tool="\x1b[2J"),
    "metadata": top(metadata=None),
    "metadata of numbers": top(metadata={"a": 1}),
    "half a surrogate pair": top(metadata={"a": "\ud800"}),
    "half a surrogate pair for a name": top(metadata={"\udc00": "a"}),
    "another field": top(x=1),
    "a field missing": lambda m: m.pop("metadata"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_manifest_that_lies_is_refused_under_right_crcs_and_a_right_key(name: str) -> None:
    image = golden("turboquant-4.okv")
    manifest = manifest_of(image)
    LIES[name](manifest)
    assert text_of(manifest) != text_of(manifest_of(image))
    tracemalloc.start()
    try:
        assert refused(forged(image, text_of(manifest)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"null",
        b"[]",
        b"{}",
        b"{",
        b"\xff",
        b"1" * 5000,
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"[" * 900 + b"]" * 900,
        b'{"okv":' + b"[" * 900 + b"]" * 900 + b"}",
        b"NaN",
        '{"okv":1}'.encode("utf-16"),
        b'"' + b"\\u0000" * 1000 + b'"',
    ],
)
def test_a_manifest_that_is_none_is_refused(text: bytes) -> None:
    assert refused(forged(golden("none.okv"), text))


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text + b" ",
        lambda text: b" " + text,
        lambda text: text.replace(b":", b": ", 1),
        lambda text: text.replace(b'"codec"', b'"\\u0063odec"'),
        lambda text: text.replace(b'"okv":1', b'"okv":1,"okv":1'),
        lambda text: text.replace(b'"okv":1', b'"okv":1.0'),
        lambda text: text.replace(b"\\u00f3", "ó".encode()),
        lambda text: text.replace(b"\\u00f3", b"\\u00F3"),
        lambda text: text.replace(b"[1,2,5]", b"[1e0,2,5]"),
    ],
)
def test_a_manifest_in_another_spelling_is_refused(change: Callable[[bytes], bytes]) -> None:
    image = golden("none.okv")
    text = text_of(manifest_of(image))
    assert not refused(forged(image, text))
    assert change(text) != text
    assert refused(forged(image, change(text)))


def test_an_endless_manifest_is_not_parsed() -> None:
    image = golden("none.okv")
    with pytest.raises(CorruptObject, match="manifest of 2000000 bytes; accepted: 1049088 or"):
        decoded(forged(image, b"[" + b"[]," * 666_666 + b"]"))


def test_an_object_that_is_no_okv_file_is_refused(refusal: Refusal, tmp_path: Path) -> None:
    other = ROOT / "tests" / "golden" / "objects" / "single.bin"
    said = refusal("decode", other, "-o", tmp_path / "back")
    assert "segment 0: format 0; accepted: 64, the manifest with which an .okv file begins" in said


def test_encoded_scalars_that_no_encoder_writes_are_refused_by_tensor() -> None:
    image = golden("turboquant-4.okv")
    row = read_header(image).rows[3]
    image[row.offset + row.stored_nbytes - 1] = 0xFC  # a norm of minus infinity
    with pytest.raises(CorruptObject, match=r"tensor layers\.3\.k: payload 0: a norm"):
        decoded(resealed(image))


MUTATIONS = 100_000


def mutated(image: Bytes, rng: random.Random) -> Bytes:
    """Damage as disks, copies and people make it."""
    image = image.copy()
    match rng.randrange(8):
        case 0:
            image[rng.randrange(image.nbytes)] ^= 1 << rng.randrange(8)
        case 1:
            at = rng.randrange(image.nbytes)
            burst = np.frombuffer(rng.randbytes(rng.randrange(1, 600)), np.uint8)
            image[at : at + burst.size] = burst[: image.nbytes - at]
        case 2:
            image = image[: rng.randrange(image.nbytes)]
        case 3:
            image = np.concatenate([image, image[: rng.randrange(1, image.nbytes)]])
        case 4:
            start, at = rng.randrange(image.nbytes), rng.randrange(image.nbytes)
            moved = image[start : start + rng.randrange(1, 1024)].copy()
            image[at : at + moved.size] = moved[: image.nbytes - at]
        case 5:
            layout, nbytes = rng.choice((("<B", 1), ("<H", 2), ("<I", 4), ("<Q", 8)))
            bits = rng.randrange(1, nbytes * 8 + 1)
            at = rng.randrange(8, 96 + 32 * 8)
            struct.pack_into(layout, image, at, rng.getrandbits(bits))
        case 6:
            at = rng.randrange(image.nbytes)
            image[at : at + rng.choice((1, 8, 512, 4096))] = rng.choice((0, 255))
        case _:
            row = 96 + 32 * rng.randrange(8)
            at = rng.choice((0, 1, 8, 16, 24))
            layout = "<B" if at < 8 else "<Q"
            value = rng.choice((0, 1, 2, 3, 4, 64, 128, rng.randrange(256)))
            struct.pack_into(
                layout, image, row + at, value * (1 if at < 8 else rng.choice((1, 512)))
            )
    return image


def mutated_text(text: bytes, rng: random.Random) -> bytes:
    """Another manifest, nearly JSON: a byte, a number, or a part of it changed."""
    at = rng.randrange(len(text))
    match rng.randrange(5):
        case 0:
            return text[:at] + bytes((rng.randrange(32, 127),)) + text[at + 1 :]
        case 1:
            return text[:at] + text[at + rng.randrange(1, 40) :]
        case 2:
            return text[:at] + text[at - rng.randrange(40) : at + 10] + text[at:]
        case 3:
            numbers_at = list(re.finditer(rb"\d+", text))
            found = rng.choice(numbers_at)
            other = str(rng.choice((0, 1, 2, 16, 32, 64, 2**40, 2**64, 10**30))).encode()
            return text[: found.start()] + other + text[found.end() :]
        case _:
            words = (b'"k"', b'"v"', b'"kv"', b'"BF16"', b'"F16"', b'"F32"', b".k", b".v", b".kv")
            old = rng.choice([word for word in words if word in text])
            places = [match.start() for match in re.finditer(re.escape(old), text)]
            place = rng.choice(places)
            return text[:place] + rng.choice(words) + text[place + len(old) :]


@pytest.mark.fuzz
def test_100_000_mutations_are_refused_or_say_what_they_hold() -> None:
    """Damage is always found. What is forged under right CRCs is refused, or is one sound file."""
    rng = random.Random(20240229)
    images = [golden(f"{case}.okv") for case in CASES]
    texts = [text_of(manifest_of(image)) for image in images]
    accepted, sound = 0, True
    for index in range(MUTATIONS):
        which = rng.randrange(len(images))
        image = images[which]
        kind = index % 4
        if kind < 2:
            changed = mutated(image, rng)
            assert refused(changed) or np.array_equal(changed, image), index
            continue
        if kind == 2:
            changed = mutated(image, rng)
            changed = resealed(changed) if changed.nbytes >= 4096 else changed
        else:
            changed = forged(image, mutated_text(texts[which], rng))
        try:
            found = okv.read_okv(changed)
            tensors = list(okv.decode_tensors(changed, found, silent))
        except CorruptObject as error:
            sound &= one_line(error)
            continue
        accepted += 1
        for (tensor, row), elements in zip(found.rows, tensors, strict=True):
            assert elements.nbytes == row.original_nbytes == tensor.spec.original_nbytes
        okv.to_json(found, verified=True)
        parts = okv.safetensors_parts(found.manifest, tensors)
        assert len(tensors_in(b"".join(part.tobytes() for part in parts))) == len(tensors)
    assert sound
    assert 0 < accepted < MUTATIONS // 4


# The document -----------------------------------------------------------------------------


def test_the_document_shows_the_manifest_of_the_golden_file() -> None:
    (shown,) = re.findall(
        r"^```json\n(.*?)\n```$", DOCUMENT.read_text("utf-8"), re.MULTILINE | re.DOTALL
    )
    assert json.loads(shown) == manifest_of(golden("none.okv"))


def test_an_error_of_a_file_is_an_orbit_error(tmp_path: Path) -> None:
    with pytest.raises(OrbitError):
        okv.inspect_file(tmp_path / "absent", verify=False, on_compile=silent)
