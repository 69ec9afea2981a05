"""TurboQuant: against float64, at its extremes, and in the error it makes."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from orbitkv.codecs import RawReason, tables
from orbitkv.errors import CorruptObject
from orbitkv.segment import Axis, Role
from tests.codecs.reference import (
    DTYPES,
    NEAR_EDGE,
    Array,
    bound,
    decoded,
    encoded,
    key_codes,
    key_values,
    parsed,
    reason,
    relative_mse,
    round_trip,
    spec,
    value_codes,
    value_values,
    wide,
    words,
)

HEAD_DIMS = (32, 64, 128, 256)
BITS = (4, 3)

all_bits = pytest.mark.parametrize("bits", BITS)
all_dims = pytest.mark.parametrize("head_dim", HEAD_DIMS)
both_dtypes = pytest.mark.parametrize("dtype", DTYPES)
all_roles = pytest.mark.parametrize("role", list(Role))


def gaussian(rows: int, width: int, *, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((rows, width))


def heavy_tailed(rows: int, width: int) -> Array:
    """Outliers as real models have them, and vectors of very different lengths."""
    generator = np.random.default_rng(3)
    scale = np.exp(generator.normal(0, 2, (rows, 1)))
    return generator.standard_t(2.5, (rows, width)) * scale


def check_keys(k: Array, codes: Array, norms: Array, bits: int) -> None:
    """Compare with float64, given the stored norms; and those with the true ones."""
    true_norms = np.linalg.norm(k, axis=1)
    spacing = np.maximum(np.abs(np.spacing(norms.astype(np.float16))).astype(np.float64), 2**-24)
    assert (np.abs(norms.astype(np.float64) - true_norms) <= spacing * (0.5 + 1e-4)).all()
    wanted, from_edge = key_codes(k, norms, bits)
    differ = codes != wanted
    assert (from_edge[differ] <= NEAR_EDGE).all(), from_edge[differ].max()


def check_values(v: Array, codes: Array, scales: Array, minima: Array, bits: int) -> None:
    steps = np.maximum((v.max(1) - v.min(1)) / (2**bits - 1), 2.0**-24)
    spacing = np.abs(np.spacing(scales)).astype(np.float64)
    assert (np.abs(scales.astype(np.float64) - steps) <= spacing * (0.5 + 1e-4)).all()
    assert (minima == v.min(1).astype(np.float16)).all()
    wanted, from_edge = value_codes(v, scales, minima, bits)
    differ = codes != wanted
    assert (from_edge[differ] <= NEAR_EDGE).all(), from_edge[differ].max()


@all_bits
@all_dims
@both_dtypes
@pytest.mark.parametrize("draw", [gaussian, heavy_tailed])
def test_codes_equal_float64_but_at_the_edge_of_a_bin(
    bits: int, head_dim: int, dtype: str, draw: object
) -> None:
    of = spec(dtype, Role.KV, tokens=50, heads=4, head_dim=head_dim)
    assert callable(draw)
    segment = words(draw(of.rows, 2 * head_dim), dtype)
    codes, scalars = parsed(encoded(bound(f"turboquant-{bits}", of), segment), of, bits)
    rows = wide(segment, dtype)
    norms, scales, minima = np.split(scalars, 3)
    check_keys(rows[:, :head_dim], codes[0::2], norms, bits)
    check_values(rows[:, head_dim:], codes[1::2], scales, minima, bits)


@all_bits
@all_dims
@both_dtypes
def test_decoding_equals_float64_within_half_a_step_of_the_dtype(
    bits: int, head_dim: int, dtype: str
) -> None:
    of = spec(dtype, Role.KV, tokens=50, heads=4, head_dim=head_dim)
    codec = bound(f"turboquant-{bits}", of)
    payload = encoded(codec, words(heavy_tailed(of.rows, 2 * head_dim), dtype))
    codes, scalars = parsed(payload, of, bits)
    norms, scales, minima = np.split(scalars, 3)
    back = wide(decoded(codec, payload), dtype).reshape(of.rows, 2 * head_dim)
    k, v = key_values(codes[0::2], norms, bits), value_values(codes[1::2], scales, minima)
    half_step = 2.0**-8 if dtype == "bfloat16" else 2.0**-11
    for seen, exact in ((back[:, :head_dim], k), (back[:, head_dim:], v)):
        rounding = np.abs(exact) * half_step + np.abs(exact).max(1, keepdims=True) * 1e-6 + 2**-25
        assert (np.abs(seen - exact) <= rounding).all()


@pytest.mark.parametrize(
    ("role", "bits", "wanted"),
    [(Role.K, 4, 0.0092), (Role.K, 3, 0.0339), (Role.V, 4, 0.0100), (Role.V, 3, 0.0456)],
)
@both_dtypes
def test_error_on_gaussian_vectors_is_what_the_method_promises(
    role: Role, bits: int, wanted: float, dtype: str
) -> None:
    of = spec(dtype, role, tokens=1024, heads=8, head_dim=128)
    segment = words(gaussian(of.rows, 128), dtype)
    back = round_trip(bound(f"turboquant-{bits}", of), segment)
    error = relative_mse(wide(back, dtype).reshape(-1, 128), wide(segment, dtype))
    assert error == pytest.approx(wanted, rel=0.03)


@pytest.mark.parametrize(
    ("role", "bits", "vector_nbytes"),
    [(Role.K, 4, 66), (Role.V, 4, 68), (Role.K, 3, 50), (Role.V, 3, 52)],
)
def test_a_vector_of_128_takes_the_documented_bytes(
    role: Role, bits: int, vector_nbytes: int
) -> None:
    of = spec(role=role, tokens=3, heads=5)
    assert bound(f"turboquant-{bits}", of).encoded_nbytes == 15 * vector_nbytes


@all_bits
@all_dims
@both_dtypes
@all_roles
def test_zero_vectors_come_back_as_positive_zeros(
    bits: int, head_dim: int, dtype: str, role: Role
) -> None:
    codec = bound(f"turboquant-{bits}", spec(dtype, role, head_dim=head_dim))
    segment = np.zeros(codec.spec.elements, np.uint16)
    segment[::3] = 0x8000
    assert not round_trip(codec, segment).any()


@all_bits
@both_dtypes
def test_constant_v_vectors_come_back_exactly(bits: int, dtype: str) -> None:
    of = spec(dtype, Role.V, tokens=6, heads=1)
    constants = np.array([1.0, -0.75, 448.0, -65504.0, 2.0**-14, 3e-3])
    segment = words(np.repeat(constants, 128), dtype)
    if dtype == "bfloat16":
        segment[3 * 128 : 4 * 128] = words(np.array([-65280.0]), dtype)[0]
    assert (round_trip(bound(f"turboquant-{bits}", of), segment) == segment).all()


@all_bits
@both_dtypes
def test_a_constant_k_vector_survives_within_its_rounding(bits: int, dtype: str) -> None:
    of = spec(dtype, Role.K, tokens=1, heads=1)
    segment = words(np.full(128, -0.75), dtype)
    back = wide(round_trip(bound(f"turboquant-{bits}", of), segment), dtype)
    assert np.linalg.norm(back) == pytest.approx(np.sqrt(128) * 0.75, rel=4e-3)
    assert relative_mse(back, np.full(128, -0.75)) < 0.5


@all_bits
@both_dtypes
@pytest.mark.parametrize("outlier", [300.0, -60000.0])
def test_one_huge_outlier_keeps_its_place_and_size(bits: int, dtype: str, outlier: float) -> None:
    values = gaussian(2, 128)
    values[0, 77] = outlier
    for role in (Role.K, Role.V):
        of = spec(dtype, role, tokens=2, heads=1)
        segment = words(values, dtype)
        back = wide(round_trip(bound(f"turboquant-{bits}", of), segment), dtype).reshape(2, 128)
        assert back[0, 77] == pytest.approx(outlier, rel=0.02)
        assert relative_mse(back[1], values[1]) < 0.1, "another vector pays for it"


@all_bits
@both_dtypes
@all_roles
@pytest.mark.parametrize("size", [2.0**-20, 2.0**-24, 2.0**-26])
def test_vectors_below_fp16_are_off_by_less_than_its_smallest_steps(
    bits: int, dtype: str, role: Role, size: float
) -> None:
    codec = bound(f"turboquant-{bits}", spec(dtype, role))
    values = gaussian(codec.spec.vectors, 128) * size
    segment = words(values, dtype)
    back = wide(round_trip(codec, segment), dtype).reshape(values.shape)
    original = wide(segment, dtype)
    span = np.abs(original).max()
    assert np.abs(back - original).max() <= span * 1.2 + 2.0**-23


def test_subnormal_bfloat16_becomes_zero() -> None:
    of = spec("bfloat16", Role.KV)
    segment = np.random.default_rng(0).integers(0, 0x80, of.elements).astype(np.uint16)
    back = round_trip(bound("turboquant-4", of), segment)
    assert not (back & 0x7FFF).any()


@both_dtypes
def test_the_largest_fp16_values_never_become_infinite(dtype: str) -> None:
    of = spec("float16", Role.V, tokens=1, heads=1)
    segment = words(np.where(np.arange(128) % 2, 65504.0, -65504.0), "float16")
    back = wide(round_trip(bound("turboquant-4", of), segment), "float16")
    assert np.abs(back).max() == 65504.0


@all_bits
@all_roles
@both_dtypes
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_one_value_that_is_not_finite_makes_a_segment_raw(
    bits: int, role: Role, dtype: str, bad: float
) -> None:
    codec = bound(f"turboquant-{bits}", spec(dtype, role))
    for place in (0, 100, codec.spec.elements - 1):
        values = gaussian(1, codec.spec.elements)[0]
        values[place] = bad
        assert reason(codec, words(values, dtype)) is RawReason.NONFINITE


@pytest.mark.parametrize(
    ("role", "dtype", "values"),
    [
        (Role.K, "bfloat16", [70000.0]),
        (Role.K, "bfloat16", [3e38, 3e38]),
        (Role.K, "float16", [60000.0, 60000.0]),
        (Role.V, "bfloat16", [-70000.0]),
        (Role.V, "bfloat16", [3e38]),
        (Role.V, "bfloat16", [-3e38, 3e38]),
        (Role.KV, "bfloat16", [70000.0]),
    ],
)
def test_a_norm_minimum_or_scale_beyond_fp16_makes_a_segment_raw(
    role: Role, dtype: str, values: list[float]
) -> None:
    codec = bound("turboquant-4", spec(dtype, role))
    segment = np.zeros(codec.spec.elements)
    segment[: len(values)] = values
    assert reason(codec, words(segment, dtype)) is RawReason.SCALAR_OVERFLOW


def test_a_large_maximum_alone_is_held_by_the_scale() -> None:
    of = spec("bfloat16", Role.V, tokens=1, heads=1)
    segment = words(np.where(np.arange(128) == 9, 131072.0, 0.0), "bfloat16")
    back = wide(round_trip(bound("turboquant-4", of), segment), "bfloat16")
    assert back[9] == pytest.approx(131072, rel=2**-8)


def test_a_value_between_two_centroids_takes_the_upper_one() -> None:
    """Only zero can be met: the other edges are not sums of few FP16 values."""
    of = spec("float16", Role.K, tokens=1, heads=1, head_dim=64)
    segment = np.zeros(64, np.uint16)
    segment[[0, 1]] = 0x3C00  # rotated: half of the elements 0, the others +-2 / sqrt(2)
    for bits in BITS:
        codes, _ = parsed(encoded(bound(f"turboquant-{bits}", of), segment), of, bits)
        middle = (codes == 2 ** (bits - 1)).sum()
        assert middle == 32


@all_bits
def test_ties_of_v_go_up(bits: int) -> None:
    of = spec("float16", Role.V, tokens=1, heads=1, head_dim=32)
    most = 2**bits - 1
    values = np.concatenate([[0, most], np.arange(most) + 0.5, np.zeros(30 - most)])
    codes, _ = parsed(encoded(bound(f"turboquant-{bits}", of), words(values, "float16")), of, bits)
    assert (codes[0, 2 : 2 + most] == np.arange(most) + 1).all()


@all_bits
def test_every_code_decodes_to_its_centroid(bits: int) -> None:
    of = spec("bfloat16", Role.K, tokens=20, heads=1, head_dim=32)
    codec = bound(f"turboquant-{bits}", of)
    payload = np.random.default_rng(0).integers(0, 256, codec.encoded_nbytes).astype(np.uint8)
    payload[-40:].view(np.float16)[:] = 1
    codes, norms = parsed(payload, of, bits)
    assert set(codes.flat) == set(range(2**bits))
    back = wide(decoded(codec, payload), "bfloat16").reshape(20, 32)
    exact = key_values(codes, norms, bits)
    assert np.abs(back - exact).max() <= np.abs(exact).max() * 2**-8


@all_bits
@all_roles
def test_a_payload_of_another_length_is_corrupt_and_not_read(bits: int, role: Role) -> None:
    codec = bound(f"turboquant-{bits}", spec(role=role))
    out = np.empty(codec.spec.elements, np.uint16)
    for nbytes in (0, 1, codec.encoded_nbytes - 1, codec.encoded_nbytes + 1):
        with pytest.raises(CorruptObject, match=f"payload of {nbytes} bytes"):
            codec.decode(np.zeros(nbytes, np.uint8), out)


@pytest.mark.parametrize(
    ("role", "column", "scalar"),
    [
        (Role.K, 0, 0x7C00),
        (Role.K, 0, 0x7E01),
        (Role.K, 0, 0xBC00),
        (Role.V, 0, 0x7C00),
        (Role.V, 0, 0x0000),
        (Role.V, 0, 0xBC00),
        (Role.V, 1, 0xFC00),
        (Role.KV, 2, 0x7C00),
    ],
)
def test_scalars_that_no_encoder_writes_are_corrupt(role: Role, column: int, scalar: int) -> None:
    of = spec(role=role)
    codec = bound("turboquant-4", of)
    payload = encoded(codec, words(gaussian(1, of.elements), "bfloat16"))
    codes_nbytes = of.elements // 2
    payload[codes_nbytes:].view(np.uint16)[column * of.rows + of.rows - 1] = scalar
    with pytest.raises(CorruptObject, match="norm, scale or minimum"):
        codec.decode(payload, np.empty(of.elements, np.uint16))


def test_any_bytes_of_the_right_length_decode_or_are_corrupt() -> None:
    generator = np.random.default_rng(0)
    codec = bound("turboquant-3", spec("float16", Role.KV, head_dim=64))
    for _ in range(200):
        payload = generator.integers(0, 256, codec.encoded_nbytes).astype(np.uint8)
        try:
            assert np.isfinite(wide(decoded(codec, payload), "float16")).all()
        except CorruptObject:
            continue


def test_another_seed_rotates_otherwise_and_the_same_seed_alike() -> None:
    segment = words(gaussian(8, 128), "bfloat16")
    by_seed = [encoded(bound("turboquant-4", spec(), seed=s), segment) for s in (1, 2, 1)]
    assert (by_seed[0] == by_seed[2]).all()
    assert (by_seed[0] != by_seed[1]).any()


def test_signs_are_the_documented_ones() -> None:
    assert [tables.splitmix64(0, index) for index in range(3)] == [
        0xE220A8397B1DCDAF,  # the first outputs that the generator's authors publish for seed 0
        0x6E789E6AA1B965F4,
        0x06C45D188009454F,
    ]
    assert tables.rotation_signs(0, 3).tolist() == [0x8000, 0, 0]
    assert tables.splitmix64(2**64 - 1, 0) < 2**64


def test_centroids_round_to_the_digits_of_the_format() -> None:
    assert tables.CENTROIDS[3].round(4).tolist() == pytest.approx([0.2450, 0.7557, 1.3432, 2.1504])
    assert tables.CENTROIDS[4].round(4).tolist() == pytest.approx(
        [0.1284, 0.3881, 0.6569, 0.9425, 1.2563, 1.6179, 2.0685, 2.7309]
    )


def arranged(logical: Array, axes: tuple[Axis, ...]) -> Array:
    """[token, head, dim] in the order of ``axes``, as a gather leaves it."""
    order = [(Axis.TOKEN, Axis.HEAD, Axis.DIM).index(axis) for axis in axes]
    return np.ascontiguousarray(logical.transpose(order))


SHAPES = st.fixed_dictionaries(
    {
        "tokens": st.integers(1, 9),
        "heads": st.integers(1, 5),
        "head_dim": st.sampled_from(HEAD_DIMS),
        "axes": st.permutations([Axis.HEAD, Axis.TOKEN]).map(lambda two: (*two, Axis.DIM)),
    }
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    bits=st.sampled_from(BITS),
    dtype=st.sampled_from(sorted(DTYPES)),
    role=st.sampled_from(list(Role)),
    shape=SHAPES,
    stride=st.integers(1, 3),
    power=st.integers(0, 16),
    seed=st.integers(0, 2**64 - 1),
)
def test_round_trips_in_every_shape_stride_and_order(
    bits: int,
    dtype: str,
    role: Role,
    shape: dict[str, object],
    stride: int,
    power: int,
    seed: int,
) -> None:
    of = spec(dtype, role, **shape)
    width = of.head_dim * (2 if role is Role.KV else 1)
    engine = gaussian(of.tokens * stride, of.heads * width, seed=power)
    engine = engine.reshape(-1, of.heads, width) * 2.0 ** (power - 8)
    logical = engine[::stride]  # strided, as a view of an engine's memory is
    segment = words(arranged(logical, of.axes), dtype)
    back = wide(round_trip(bound(f"turboquant-{bits}", of, seed=seed), segment), dtype)
    back = back.reshape(segment.shape)
    assert relative_mse(back, wide(segment, dtype)) < (0.03 if bits == 4 else 0.12)
    # The order of the axes moves whole vectors, and changes none of them.
    other = spec(dtype, role, **shape | {"axes": (of.axes[1], of.axes[0], Axis.DIM)})
    moved = np.ascontiguousarray(segment.swapaxes(0, 1))
    again = wide(round_trip(bound(f"turboquant-{bits}", other, seed=seed), moved), dtype)
    assert (again.reshape(moved.shape) == back.swapaxes(0, 1)).all()


@all_bits
@both_dtypes
def test_packed_kv_equals_its_halves_on_their_own(bits: int, dtype: str) -> None:
    shape = {"tokens": 5, "heads": 3, "head_dim": 64}
    packed = words(gaussian(15, 128), dtype)
    back = round_trip(bound(f"turboquant-{bits}", spec(dtype, Role.KV, **shape)), packed)
    for role, half in ((Role.K, slice(0, 64)), (Role.V, slice(64, 128))):
        alone = np.ascontiguousarray(packed[:, half])
        wanted = round_trip(bound(f"turboquant-{bits}", spec(dtype, role, **shape)), alone)
        assert (back.reshape(15, 128)[:, half].reshape(-1) == wanted).all()
