"""Geometry is declared and verified; names of what is stored never collide."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from orbitkv.errors import DestinationError, GeometryError
from orbitkv.segment import (
    DTYPE_NBYTES,
    HND,
    NHD,
    Axis,
    Geometry,
    KeyDigests,
    ModelIdentity,
    PagedTensors,
    Role,
    Slot,
    StateKey,
    digest_fields,
    hash_pages,
    make_namespace,
)

unhurried = settings(deadline=None)  # a busy machine is no fault
KEYS = json.loads((Path(__file__).parent / "golden" / "keys.json").read_text(encoding="utf-8"))
PAGES, TOKENS, HEADS, DIM = 5, 4, 2, 8
AXES = [
    NHD,
    HND,
    (Axis.TOKEN, Axis.PAGE, Axis.HEAD, Axis.DIM),
    (Axis.HEAD, Axis.TOKEN, Axis.PAGE, Axis.DIM),
]


def slot(name: str = "k", **settings: Any) -> Slot:  # noqa: ANN401 - as the slot's own
    given = {"layer": 0, "role": Role.K, "dtype": "float16", "heads": HEADS, "head_dim": DIM}
    return Slot(name=name, **{**given, **settings})


def geometry(*slots: Slot) -> Geometry:
    return Geometry(TOKENS, slots or (slot(),))


def filled(shape: tuple[int, ...], dtype: str = "float16") -> np.ndarray[Any, Any]:
    """Distinct words, so that a byte in the wrong place shows."""
    nbytes = DTYPE_NBYTES[dtype]
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[nbytes]
    count = int(np.prod(shape))
    words = (np.arange(count, dtype=np.uint64) % 2 ** (8 * nbytes)).astype(word)
    return words.reshape(shape).view(
        {"float16": np.float16, "float32": np.float32}.get(dtype, word)
    )


def faults_of(geometry: Geometry, tensors: dict[str, Any]) -> tuple[str, ...]:
    with pytest.raises(GeometryError) as caught:
        PagedTensors(geometry, tensors)
    return caught.value.faults


# Names -------------------------------------------------------------------------------------


def declared(case: dict[str, Any]) -> Geometry:
    slots = []
    for row in case["slots"]:
        axes = (Axis.PAGE, *(Axis(axis) for axis in row["axes"].split(",")))
        slots.append(Slot(**{**row, "role": Role(row["role"]), "axes": axes}))
    return Geometry(case["page_tokens"], tuple(slots))


def identity(case: dict[str, Any]) -> ModelIdentity:
    salt = bytes.fromhex(case["salt_hex"])
    return ModelIdentity(case["name"], case["revision"], case["rank"], case["ranks"], salt)


@pytest.mark.parametrize("case", KEYS, ids=[case["name"] for case in KEYS])
def test_names_equal_the_golden_ones(case: dict[str, Any]) -> None:
    namespace = make_namespace(
        identity(case),
        declared(case),
        storage_codec=case["storage_codec"],
        rotation_seed=case["rotation_seed"],
    )
    assert declared(case).fingerprint().hex() == case["fingerprint"]
    assert namespace == case["namespace"]
    hashes = hash_pages(namespace, case["tokens"], case["page_tokens"])
    assert [page_hash.hex() for page_hash in hashes] == case["page_hashes"]
    digests = [StateKey(namespace, page_hash, case["group"]).digest.hex() for page_hash in hashes]
    assert digests == case["key_digests"]


def test_a_namespace_is_a_prefix_and_64_hex_digits() -> None:
    namespace = make_namespace(ModelIdentity("m"), geometry(), storage_codec="none")
    assert re.fullmatch(r"orbitkv:v2:[0-9a-f]{64}", namespace)


def test_every_field_of_a_namespace_matters() -> None:
    model = ModelIdentity("m", "r", 0, 2, b"s")
    others = [
        (dataclasses.replace(model, name="n"), geometry(), "none", 0),
        (dataclasses.replace(model, revision="q"), geometry(), "none", 0),
        (dataclasses.replace(model, rank=1), geometry(), "none", 0),
        (dataclasses.replace(model, ranks=3), geometry(), "none", 0),
        (dataclasses.replace(model, salt=b"t"), geometry(), "none", 0),
        (model, geometry(), "ans", 0),
        (model, geometry(), "none", 1),
        (model, Geometry(TOKENS + 1, (slot(),)), "none", 0),
        (model, geometry(slot("x")), "none", 0),
        (model, geometry(slot(layer=1)), "none", 0),
        (model, geometry(slot(role=Role.V)), "none", 0),
        (model, geometry(slot(dtype="bfloat16")), "none", 0),
        (model, geometry(slot(heads=HEADS + 1)), "none", 0),
        (model, geometry(slot(head_dim=DIM + 1)), "none", 0),
        (model, geometry(slot(group="state")), "none", 0),
        (model, geometry(slot(axes=NHD)), "none", 0),
        (model, geometry(slot("k"), slot("v")), "none", 0),
        (model, geometry(slot("v"), slot("k")), "none", 0),
        (model, geometry(), "none", 0),
    ]
    spaces = [
        make_namespace(who, what, storage_codec=codec, rotation_seed=seed)
        for who, what, codec, seed in others
    ]
    assert len(set(spaces)) == len(others)


def test_strides_and_the_place_of_the_page_axis_change_no_byte_and_no_name() -> None:
    packed = geometry(slot(strides=(128, 64, 8, 1)))
    moved = geometry(slot(axes=(Axis.HEAD, Axis.PAGE, Axis.TOKEN, Axis.DIM)))
    assert geometry().fingerprint() == packed.fingerprint() == moved.fingerprint()


@unhurried
@given(st.lists(st.binary(max_size=6), max_size=5), st.lists(st.binary(max_size=6), max_size=5))
def test_equal_digests_mean_equal_fields(first: list[bytes], second: list[bytes]) -> None:
    assert (digest_fields(first) == digest_fields(second)) == (first == second)


@unhurried
@given(st.lists(st.binary(min_size=1, max_size=8), min_size=2, max_size=5), st.data())
def test_bytes_moved_over_a_boundary_between_fields_change_the_digest(
    fields: list[bytes], data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(fields) - 2))
    joined = fields[at] + fields[at + 1]
    cut = data.draw(st.integers(0, len(joined)))
    moved = [*fields[:at], joined[:cut], joined[cut:], *fields[at + 2 :]]
    assume(moved != fields)
    assert b"".join(moved) == b"".join(fields)
    assert digest_fields(moved) != digest_fields(fields)
    assert digest_fields([*fields[:at], joined, *fields[at + 2 :]]) != digest_fields(fields)


@unhurried
@given(st.text(max_size=8), st.text(max_size=8), st.binary(max_size=8), st.data())
def test_text_moved_between_name_revision_and_salt_is_another_namespace(
    name: str, revision: str, salt: bytes, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(name + revision)))
    moved = ModelIdentity((name + revision)[:cut], (name + revision)[cut:], salt=salt)
    model = ModelIdentity(name, revision, salt=salt)
    spaces = {make_namespace(who, geometry(), storage_codec="none") for who in (model, moved)}
    assert (len(spaces) == 1) == (model == moved)


@unhurried
@given(st.text(max_size=8), st.text(max_size=8), st.data())
def test_text_moved_between_the_names_of_slots_is_another_geometry(
    first: str, second: str, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(first + second)))
    moved = (first + second)[:cut], (first + second)[cut:]
    assume(first != second)
    assume(moved[0] != moved[1])
    pairs = [geometry(slot(one), slot(two)) for one, two in ((first, second), moved)]
    equal = pairs[0].fingerprint() == pairs[1].fingerprint()
    assert equal == (moved == (first, second))


def test_a_state_key_covers_namespace_page_and_group() -> None:
    key = StateKey("a", bytes(32), "attention")
    others = [
        StateKey("b", bytes(32), "attention"),
        StateKey("a", bytes(31) + b"\1", "attention"),
        StateKey("a", bytes(32), "state"),
    ]
    assert len({key.digest, *(other.digest for other in others)}) == 4
    assert len(key.digest) == 32


# Page hashes -------------------------------------------------------------------------------

tokens = st.lists(st.integers(0, 2**40), max_size=24)


@unhurried
@given(tokens, st.integers(1, 7))
def test_every_full_page_has_one_hash_and_the_tail_none(page: list[int], page_tokens: int) -> None:
    hashes = hash_pages("space", page, page_tokens)
    assert len(hashes) == len(page) // page_tokens
    assert len(set(hashes)) == len(hashes)
    assert all(len(page_hash) == 32 for page_hash in hashes)


@unhurried
@given(tokens, tokens, st.integers(1, 5))
def test_equal_hashes_mean_equal_prefixes(
    first: list[int], second: list[int], page_tokens: int
) -> None:
    second = first[: len(first) // 2] + second
    left, right = (hash_pages("space", prompt, page_tokens) for prompt in (first, second))
    for page in range(min(len(left), len(right))):
        end = (page + 1) * page_tokens
        assert (left[page] == right[page]) == (first[:end] == second[:end])
    assert len(set(left) & set(right)) == sum(map(bytes.__eq__, left, right))


@unhurried
@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=24), st.integers(1, 5), st.data())
def test_one_other_token_changes_its_page_and_all_after_it(
    prompt: list[int], page_tokens: int, data: st.DataObject
) -> None:
    at = data.draw(st.integers(0, len(prompt) - 1))
    other = [*prompt]
    other[at] += 1
    left, right = (hash_pages("space", each, page_tokens) for each in (prompt, other))
    page = at // page_tokens
    assert left[:page] == right[:page]
    assert all(one != two for one, two in zip(left[page:], right[page:], strict=True))


def test_equal_tokens_in_other_namespaces_or_after_other_parents_hash_differently() -> None:
    ours, theirs = (hash_pages(space, [1, 2, 1, 2], 2) for space in ("a", "b"))
    assert len({*ours, *theirs}) == 4


def test_equal_prefixes_of_other_page_lengths_hash_differently() -> None:
    assert not set(hash_pages("a", [1, 2, 3, 4], 2)) & set(hash_pages("a", [1, 2, 3, 4], 4))


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor])
def test_tokens_may_come_in_any_sequence(kind: Any) -> None:  # noqa: ANN401
    assert hash_pages("a", kind([1, 2, 3, 4, 5]), 2) == hash_pages("a", [1, 2, 3, 4, 5], 2)


# Geometry ----------------------------------------------------------------------------------


def test_a_page_is_the_sum_of_its_segments() -> None:
    both = geometry(slot("k"), slot("v", dtype="float32", role=Role.KV))
    assert both.segment_nbytes == (TOKENS * HEADS * DIM * 2, TOKENS * HEADS * DIM * 2 * 4)
    assert both.page_nbytes == sum(both.segment_nbytes)


def test_groups_list_their_slots_in_order_of_declaration() -> None:
    mixed = geometry(slot("a"), slot("b", group="state"), slot("c"))
    assert mixed.groups == {"attention": (0, 2), "state": (1,)}


def test_everything_that_is_wrong_with_a_geometry_is_said_at_once() -> None:
    with pytest.raises(GeometryError) as caught:
        Geometry(
            0,
            (
                slot("a", dtype="int4"),
                slot("a", heads=0),
                slot("b", head_dim=-1),
                slot("c", layer=-1),
                slot("d", axes=(Axis.PAGE, Axis.TOKEN, Axis.DIM)),
                slot("e", axes=(Axis.PAGE, Axis.DIM, Axis.HEAD, Axis.TOKEN)),
                slot("f", axes=(Axis.PAGE, Axis.PAGE, Axis.HEAD, Axis.DIM)),
            ),
        )
    starts = [
        "page of 0 tokens; accepted: 1 or more",
        "slot 'a': dtype 'int4'; accepted: bfloat16, float16, float32, float8_e4m3fn",
        "slot 'a': declared twice",
        "slot 'a': layer 0, 0 heads of 8; accepted",
        "slot 'b': layer 0, 2 heads of -1; accepted",
        "slot 'c': layer -1, 2 heads of 8; accepted",
        "slot 'd': axes page, token, dim; accepted: each of page, token, head, dim",
        "slot 'e': last axis is token; accepted: dim",
        "slot 'f': axes page, page, head, dim; accepted: each of",
    ]
    found = caught.value.faults
    assert len(found) == len(starts)
    assert all(fault.startswith(start) for fault, start in zip(found, starts, strict=True))
    assert str(caught.value) == "; ".join(found)


def test_a_geometry_without_slots_is_refused() -> None:
    with pytest.raises(GeometryError, match="no slots"):
        Geometry(16, ())


def test_a_role_in_text_is_that_role_or_refused() -> None:
    assert slot(role="kv").width == slot(role=Role.KV).width


def test_a_role_that_does_not_exist_is_refused() -> None:
    with pytest.raises(GeometryError, match="role"):
        geometry(slot(role="q"))


def test_axes_in_text_are_those_axes() -> None:
    assert geometry(slot(axes=("page", "head", "token", "dim"))).fingerprint()


# Registered tensors ------------------------------------------------------------------------


@pytest.mark.parametrize("axes", AXES, ids=lambda axes: "".join(axis[0] for axis in axes))
@pytest.mark.parametrize("role", list(Role))
@pytest.mark.parametrize("dtype", list(DTYPE_NBYTES))
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_segment_is_one_page_of_the_engines_own_memory(
    axes: tuple[Axis, ...], role: Role, dtype: str, library: str
) -> None:
    declared_slot = slot(axes=axes, role=role, dtype=dtype)
    what = geometry(declared_slot)
    array = filled(what.shape(declared_slot, PAGES), dtype)
    tensor: Any = array
    if library == "torch":
        signed = {1: np.int8, 2: np.int16, 4: np.int32}[DTYPE_NBYTES[dtype]]
        tensor = torch.from_numpy(array.view(signed)).view(getattr(torch, dtype))
    paged = PagedTensors(what, {"k": tensor})
    assert paged.pages == PAGES
    for page in range(PAGES):
        seen = paged.segment(0, page)
        wanted = np.take(array, page, axis=axes.index(Axis.PAGE))
        assert seen.nbytes == what.segment_nbytes[0]
        assert seen.tobytes() == wanted.tobytes()
        assert np.shares_memory(seen, array)


@pytest.mark.parametrize("axes", AXES[:2], ids=["nhd", "hnd"])
def test_views_into_one_allocation_are_registered_where_they_lie(axes: tuple[Axis, ...]) -> None:
    """As vLLM lays out its cache: all layers interleaved in one allocation, K and V in each."""
    slots = tuple(
        slot(f"{layer}.{role}", layer=layer, role=role, axes=axes, dtype="bfloat16")
        for layer in range(3)
        for role in (Role.K, Role.V)
    )
    what = geometry(*slots)
    shape = what.shape(slots[0], PAGES)
    whole = torch.arange(PAGES * 6 * TOKENS * HEADS * DIM, dtype=torch.int16)
    whole = whole.view(torch.bfloat16).view(PAGES, 6, *shape[1:])
    views = {each.name: whole[:, index] for index, each in enumerate(slots)}
    assert views["1.k"].storage_offset() == 2 * TOKENS * HEADS * DIM
    assert not views["1.k"].is_contiguous()
    paged = PagedTensors(what, views)
    words = whole.view(torch.int16).numpy()
    for index in range(6):
        assert paged.segment(index, 3).tobytes() == words[3, index].tobytes()
    paged.segment(5, 4)[:] = 0
    assert not whole[4, 5].any()
    assert whole[4, 4].any()


def test_a_padded_row_is_a_stride_like_any_other() -> None:
    padded = np.zeros((PAGES, HEADS, TOKENS, DIM + 3), np.float16)[..., :DIM]
    assert PagedTensors(geometry(), {"k": padded}).segment(0, 1).shape == (HEADS, TOKENS, DIM)


def test_tensors_that_need_gradients_are_registered() -> None:
    what = geometry(slot(dtype="float32"))
    tensor = torch.zeros(what.shape(what.slots[0], PAGES), requires_grad=True)
    assert PagedTensors(what, {"k": tensor}).pages == PAGES


def test_declared_strides_must_be_those_of_the_tensor() -> None:
    strides = (HEADS * TOKENS * DIM, TOKENS * DIM, DIM, 1)
    what = geometry(slot(strides=strides))
    shape = what.shape(what.slots[0], PAGES)
    assert PagedTensors(what, {"k": filled(shape)}).pages == PAGES
    swapped = filled((PAGES, TOKENS, HEADS, DIM)).swapaxes(1, 2)
    assert faults_of(what, {"k": swapped}) == (
        "slot 'k': strides (64, 8, 16, 1); declared (64, 32, 8, 1)",
    )


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("dtype", ["float32", "int16", "uint8", "float64"])
def test_another_dtype_is_refused(library: str, dtype: str) -> None:
    shape = geometry().shape(slot(), PAGES)
    zeros = {
        "numpy": np.zeros(shape, dtype),
        "torch": torch.zeros(shape, dtype=getattr(torch, dtype)),
    }
    (fault,) = faults_of(geometry(), {"k": zeros[library]})
    assert fault == f"slot 'k': dtype {dtype}; declared float16"


def test_words_stand_for_dtypes_that_numpy_lacks_and_for_no_other() -> None:
    shape = geometry().shape(slot(), PAGES)
    words = {"bfloat16": np.uint16, "float8_e4m3fn": np.uint8}
    for dtype, word in words.items():
        assert PagedTensors(geometry(slot(dtype=dtype)), {"k": np.zeros(shape, word)}).pages
    (fault,) = faults_of(geometry(slot(dtype="bfloat16")), {"k": np.zeros(shape, np.float16)})
    assert fault == "slot 'k': dtype float16; declared bfloat16 or uint16"
    (fault,) = faults_of(geometry(), {"k": np.zeros(shape, np.uint16)})
    assert fault == "slot 'k': dtype uint16; declared float16"


def test_another_byte_order_is_refused() -> None:
    swapped = np.zeros(geometry().shape(slot(), PAGES), ">f2")
    assert faults_of(geometry(), {"k": swapped}) == ("slot 'k': dtype >f2; declared float16",)


@pytest.mark.parametrize(
    ("shape", "fault"),
    [
        ((PAGES, TOKENS, HEADS, DIM), "shape (5, 4, 2, 8); declared (5, 2, 4, 8) as (page, head"),
        ((PAGES, HEADS, TOKENS, DIM * 2), "shape (5, 2, 4, 16); declared (5, 2, 4, 8)"),
        ((PAGES, HEADS, TOKENS * DIM), "3 axes; declared 4 (page, head, token, dim)"),
        ((1, PAGES, HEADS, TOKENS, DIM), "5 axes; declared 4 (page, head, token, dim)"),
        ((0, HEADS, TOKENS, DIM), "no pages"),
        ((), "0 axes; declared 4"),
    ],
)
def test_another_shape_is_refused(shape: tuple[int, ...], fault: str) -> None:
    for tensor in (np.zeros(shape, np.float16), torch.zeros(shape, dtype=torch.float16)):
        assert faults_of(geometry(), {"k": tensor})[0].startswith(f"slot 'k': {fault}")


def test_a_packed_slot_is_twice_as_wide() -> None:
    packed = geometry(slot(role=Role.KV))
    assert PagedTensors(packed, {"k": np.zeros((PAGES, HEADS, TOKENS, 2 * DIM), np.float16)}).pages
    (fault,) = faults_of(packed, {"k": np.zeros((PAGES, HEADS, TOKENS, DIM), np.float16)})
    assert fault.startswith("slot 'k': shape (5, 2, 4, 8); declared (5, 2, 4, 16)")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(1, HEADS, TOKENS, DIM, dtype=torch.float16).expand(PAGES, -1, -1, -1),
        torch.zeros(PAGES, 1, TOKENS, DIM, dtype=torch.float16).expand(-1, HEADS, -1, -1),
        torch.zeros(4096, dtype=torch.float16).as_strided(
            (PAGES, HEADS, TOKENS, DIM), (HEADS * TOKENS * DIM, TOKENS * DIM, DIM - 1, 1)
        ),
        torch.zeros(4096, dtype=torch.float16).as_strided(
            (PAGES, HEADS, TOKENS, DIM), (HEADS * TOKENS * DIM - 1, TOKENS * DIM, DIM, 1)
        ),
    ],
    ids=["expanded pages", "expanded heads", "rows overlap", "pages overlap"],
)
def test_elements_that_share_memory_are_refused(tensor: torch.Tensor) -> None:
    (fault,) = faults_of(geometry(), {"k": tensor})
    assert "overlap; accepted: each element on its own" in fault


@unhurried
@given(
    st.permutations(range(4)),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_strides_are_refused_exactly_where_two_elements_may_meet(
    order: list[int], gaps: list[int]
) -> None:
    """Any order of axes with any padding is accepted; the same, one element tighter, is not."""
    shape = geometry().shape(slot(), PAGES)
    order = [3, *(axis for axis in order if axis != 3)]
    strides, span = [0] * 4, 1
    for axis, gap in zip(order, [0, *gaps], strict=False):
        strides[axis] = span + gap
        span += strides[axis] * (shape[axis] - 1) + gap
    memory = torch.zeros(20000, dtype=torch.float16)
    assert PagedTensors(geometry(), {"k": memory.as_strided(shape, strides)}).pages == PAGES
    tight = [*strides]
    tight[order[1]] = DIM - 1
    (fault,) = faults_of(geometry(), {"k": memory.as_strided(shape, tight)})
    assert "overlap" in fault


def test_a_dim_axis_with_gaps_is_refused() -> None:
    gaps = np.zeros((PAGES, HEADS, TOKENS, 2 * DIM), np.float16)[..., ::2]
    assert faults_of(geometry(), {"k": gaps}) == ("slot 'k': stride 2 along dim; accepted: 1",)


def test_memory_that_cannot_be_written_is_refused() -> None:
    array = filled(geometry().shape(slot(), PAGES))
    array.flags.writeable = False
    assert faults_of(geometry(), {"k": array}) == (
        "slot 'k': read-only memory; accepted: writable",
    )


def test_tensors_on_another_device_are_refused() -> None:
    meta = torch.zeros(geometry().shape(slot(), PAGES), dtype=torch.float16, device="meta")
    assert faults_of(geometry(), {"k": meta}) == ("slot 'k': on meta; accepted: cpu, cuda",)


@pytest.mark.parametrize("thing", [None, 7, "tensor", [1.0], object()])
def test_what_is_no_tensor_is_refused(thing: object) -> None:
    (fault,) = faults_of(geometry(), {"k": thing})
    assert fault == f"slot 'k': dtype {type(thing).__name__}; declared float16"


def test_sparse_tensors_are_refused() -> None:
    dense = torch.zeros(geometry().shape(slot(), PAGES), dtype=torch.float16)
    assert faults_of(geometry(), {"k": dense.to_sparse()})


def test_every_difference_of_every_tensor_is_said_at_once() -> None:
    what = geometry(*(slot(name) for name in ("a", "b", "c", "d", "e")))
    shape = what.shape(what.slots[0], PAGES)
    fixed = np.zeros((*shape[:-1], 3 * DIM), np.float16)[..., ::2]
    fixed.flags.writeable = False
    found = faults_of(
        what,
        {
            "a": np.zeros(shape, np.float32),
            "b": fixed,
            "d": np.zeros(shape, np.float16),
            "e": np.zeros((PAGES + 1, *shape[1:]), np.float16),
            "x": np.zeros(shape, np.float16),
        },
    )
    assert sorted(found) == [
        "slot 'a': dtype float32; declared float16",
        "slot 'b': read-only memory; accepted: writable",
        "slot 'b': shape (5, 2, 4, 12); declared (5, 2, 4, 8) as (page, head, token, dim)",
        "slot 'b': stride 2 along dim; accepted: 1",
        "slot 'c': no tensor",
        "tensor 'x': not declared",
        "tensors hold different numbers of pages: 'd' has 5, 'e' has 6",
    ]


def test_no_tensors_at_all_is_said_slot_by_slot() -> None:
    assert faults_of(geometry(), {}) == ("slot 'k': no tensor",)


def test_segments_are_views_that_write_through() -> None:
    tensor = torch.zeros(geometry().shape(slot(), PAGES), dtype=torch.float16)
    paged = PagedTensors(geometry(), {"k": tensor})
    paged.segment(0, 2)[:] = np.array(1.0, np.float16).view(np.uint16)
    assert tensor[2].eq(1).all()
    assert tensor.sum() == HEADS * TOKENS * DIM


def test_a_page_that_is_one_run_of_memory_can_be_had_as_bytes() -> None:
    whole = filled((PAGES, 3, HEADS, TOKENS, DIM))
    paged = PagedTensors(geometry(), {"k": whole[:, 1]})
    for page in range(PAGES):
        run = paged.run(0, page)
        assert run is not None
        assert run.tobytes() == paged.segment(0, page).tobytes()
        assert np.shares_memory(run, whole)


@pytest.mark.parametrize(
    "tensor",
    [
        np.zeros((PAGES, HEADS, TOKENS, DIM + 1), np.float16)[..., :DIM],
        np.zeros((PAGES, TOKENS, HEADS, DIM), np.float16).swapaxes(1, 2),
    ],
    ids=["padded", "other order"],
)
def test_a_page_in_pieces_has_no_run(tensor: np.ndarray[Any, Any]) -> None:
    paged = PagedTensors(geometry(), {"k": tensor})
    assert [paged.run(0, page) for page in range(PAGES)] == [None] * PAGES


def test_the_run_of_an_only_page_is_its_own() -> None:
    only = filled((3, HEADS, TOKENS, DIM))[1:2]
    run = PagedTensors(geometry(), {"k": only}).run(0, 0)
    assert run is not None
    assert run.tobytes() == only.tobytes()


# Page indices ------------------------------------------------------------------------------


@pytest.fixture
def paged() -> PagedTensors:
    return PagedTensors(geometry(), {"k": filled(geometry().shape(slot(), PAGES))})


def test_indices_in_range_and_distinct_are_accepted(paged: PagedTensors) -> None:
    paged.check_indices(range(PAGES), distinct=True)
    paged.check_indices([], distinct=True)
    paged.check_indices([0, 0], distinct=False)


@pytest.mark.parametrize(
    ("indices", "said"),
    [
        ([0, 5], "page index 5; accepted: 0 to 4"),
        ([-1], "page index -1; accepted: 0 to 4"),
        ([7, -2, 7], "page index -2, 7; accepted: 0 to 4; page index 7 comes twice"),
        ([1, 2, 1, 2, 3], "page index 1, 2 comes twice; accepted: distinct pages"),
        (range(100, 120), "page index 100, 101, 102, 103, 104, 105, 106, 107 and 12 more;"),
    ],
)
def test_indices_out_of_range_or_twice_are_all_named(
    indices: list[int], said: str, paged: PagedTensors
) -> None:
    with pytest.raises(DestinationError) as caught:
        paged.check_indices(indices, distinct=True)
    assert str(caught.value).startswith(said)


def test_digests_by_hash_are_those_of_the_keys_however_many_are_kept() -> None:
    digests = KeyDigests("orbitkv:v2:00", "attention")
    for number in (*range(2**12 + 10), 3):
        page_hash = number.to_bytes(32, "little")
        wanted = StateKey("orbitkv:v2:00", page_hash, "attention").digest
        assert digests[page_hash] == wanted
        assert len(digests) <= 2**12
