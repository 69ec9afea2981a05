"""Qualify measures what a codec does, finds nothing where it is exact, and leaves whole files."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orbitkv import cli, qualify
from orbitkv.engines import checkpoint, device
from orbitkv.probe import cuda_unavailable
from orbitkv.runtime.instance import Instance
from orbitkv.runtime.leases import PrefixLease

ROOT = Path(__file__).parents[1]
SMOLLM2 = Path(os.environ.get("ORBITKV_MODEL", ROOT / ".models" / "smollm2"))
WORDS = 200
LAYERS = 8
SMALL = ("--context-tokens", 128, "--new-tokens", 8)
FILES = ["layer_error.png", "qualify.json", "rate_kl.png"]


def run_qualify(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    qualify.add_arguments(parser)
    return qualify.run(parser.parse_args([str(argument) for argument in arguments]))


def names_in(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of eight small random layers, and a tokenizer of one token a word."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        head_dim=32,
        intermediate_size=96,
        vocab_size=WORDS,
        initializer_range=0.3,
        max_position_embeddings=512,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    vocabulary = {f"w{word}": word for word in range(WORDS)}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write 300 words: two contexts of 128, and some more."""
    path = tmp_path_factory.mktemp("text") / "text.txt"
    words = random.Random(0).choices(range(WORDS), k=300)
    path.write_text(" ".join(f"w{word}" for word in words))
    return path


@pytest.fixture(scope="module")
def out(tiny_model: Path, text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qualify all codecs once."""
    path = tmp_path_factory.mktemp("out") / "new" / "out"
    assert run_qualify("--model", tiny_model, "--text-file", text, "--out", path, *SMALL) == 0
    return path


@pytest.fixture(scope="module")
def report(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "qualify.json").read_text())
    return found


def test_none_is_exactly_zero(report: Mapping[str, Any]) -> None:
    none = report["codecs"]["none"]
    assert report["none_is_exact"] is True
    assert none["kl_nats"] == none["kl_nats_p99"] == none["perplexity_difference"] == 0.0
    assert none["top1_agreement"] == none["greedy_exact"] == 1.0
    assert none["greedy_matching_by_context"] == [8, 8]
    assert none["relative_error"] == {"k": [0.0] * LAYERS, "v": [0.0] * LAYERS}
    assert 1.0 < none["bytes_ratio"] < 1.2  # headers and whole blocks


def test_errors_grow_as_bytes_shrink(report: Mapping[str, Any]) -> None:
    none, fp8, four, three = (report["codecs"][name] for name in qualify.DEFAULT_CODECS)
    # With four of eight layers protected, TurboQuant may be nearer than FP8, which protects none.
    assert 0.0 < four["kl_nats"] < three["kl_nats"]
    assert fp8["kl_nats"] > 0.0
    ratios = [codec["bytes_ratio"] for codec in (none, fp8, four, three)]
    assert ratios[1] < ratios[0]
    assert ratios[3] < ratios[2] < ratios[0]
    for role in ("k", "v"):
        assert all(0.01 < error < 0.04 for error in fp8["relative_error"][role])
        pairs = zip(four["relative_error"][role], three["relative_error"][role], strict=True)
        protected, quantised = [], []
        for layer, pair in enumerate(pairs):
            (quantised if 2 <= layer < LAYERS - 2 else protected).append(pair)
        assert protected == [(0.0, 0.0)] * 4
        assert all(0.05 < a < b < 0.3 for a, b in quantised)
    # Two contexts of three pages; K and V of the four outer layers.
    assert four["raw_segments"] == {"protected_layer": 2 * 3 * 2 * 4}


def test_what_is_reported(report: Mapping[str, Any]) -> None:
    assert report["contexts"] == 2
    assert (report["context_tokens"], report["prefix_tokens"]) == (128, 96)
    assert report["predictions"] == 2 * (128 - 96 - 1)
    assert report["text"]["tokens"] == 300
    assert (report["weights_dtype"], report["kv_dtype"]) == ("float32", "bfloat16")
    assert list(report["codecs"]) == list(qualify.DEFAULT_CODECS)
    page_nbytes = LAYERS * 2 * 32 * 2 * 32 * 2
    for codec in report["codecs"].values():
        assert codec["original_nbytes"] == 2 * 3 * page_nbytes
        assert codec["stored_nbytes"] % 4096 == 0
        assert codec["bytes_ratio"] == codec["stored_nbytes"] / codec["original_nbytes"]
        assert codec["relative_mse"]["k"] == pytest.approx(np.square(codec["relative_error"]["k"]))
        difference = codec["perplexity"] - report["cold_perplexity"]
        assert codec["perplexity_difference"] == difference


def test_two_plots_are_written_and_nothing_else_is_left(out: Path) -> None:
    assert names_in(out) == FILES
    for name in ("layer_error.png", "rate_kl.png"):
        drawing = (out / name).read_bytes()
        assert drawing.startswith(b"\x89PNG\r\n\x1a\n")
        assert drawing.endswith(b"IEND\xaeB`\x82")


def test_the_same_numbers_come_out_again(
    report: Mapping[str, Any],
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["--model", tiny_model, "--text-file", text, "--out", tmp_path, *SMALL]
    assert run_qualify(*arguments, "--codec", "turboquant-3", "turboquant-3", "--json") == 0
    again = json.loads(capsys.readouterr().out)
    assert again == json.loads((tmp_path / "qualify.json").read_text())
    assert again["codecs"] == {"turboquant-3": report["codecs"]["turboquant-3"]}
    assert again["none_is_exact"] is None


def test_people_get_a_table(
    tiny_model: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", tiny_model, "--text-file", text, "--out", tmp_path, *SMALL]
    assert run_qualify(*arguments, "--contexts", 1, "--codec", "none", "fp8") == 0
    shown = capsys.readouterr().out
    for words in ("1 contexts of 128 tokens", "none", "fp8", "100.0%", "1/1, 8.0", "+0.000"):
        assert words in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model {}/missing", "no such directory; accepted: a directory with one .gguf file"),
        ("--codec fp9", "'fp9'; accepted: none, fp8, turboquant-4, turboquant-3"),
        ("--codec none ans", "storage codec 'ans': needs an NVIDIA GPU"),
        ("--out {}/file", "File exists; accepted: a directory to write files in"),
        ("--out {}/file/below", "Not a directory; accepted: a directory to write files in"),
        ("--text-file {}/missing", "No such file or directory; accepted: a readable text file"),
        ("--text-file {}/binary", "can't decode byte 0xff in position 0"),
        ("--text-file {}/file", "0 tokens; accepted: 128 or more"),
        ("--contexts 3", "300 tokens; accepted: 384 or more, for contexts of 128 (x 3)"),
        ("--contexts 0", "--contexts: 0; accepted: 1 or more"),
        ("--new-tokens 0", "--new-tokens: 0; accepted: 1 or more"),
        ("--context-tokens 36", "--context-tokens: 36; accepted: 37 or more"),
        ("--new-tokens 416", "416 new ones after 97; accepted: 512, the positions"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: str,
    message: str,
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    words = [word.format(tmp_path) for word in arguments.split()]
    usual = ["--model", tiny_model, "--text-file", text, "--out", tmp_path / "out", *SMALL]
    assert run_qualify(*usual, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = [line for line in captured.err.splitlines() if line.startswith("orbitkv qualify: ")]
    assert len(told) == 1
    assert message in told[0]
    assert captured.err.endswith(f"{told[0]}\n")
    assert names_in(tmp_path) == ["binary", "file"]


@pytest.mark.parametrize("missing", ["torch", "transformers", "matplotlib"])
def test_what_is_not_installed_is_told(
    missing: str,
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == missing else name)
    assert run_qualify("--model", tiny_model, "--out", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert f"not installed: {missing}; " in told
    assert told.endswith("pip install 'orbitkv[transformers]'\n")
    assert names_in(tmp_path) == []


def test_a_gpu_that_is_not_there_is_told(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(device, "cuda_unavailable", lambda: "no NVIDIA driver")
    arguments = ["--model", tiny_model, "--out", tmp_path / "out", "--device", "cuda"]
    assert run_qualify(*arguments) == 2
    told = capsys.readouterr().err
    assert told.startswith("orbitkv qualify: --device cuda: no NVIDIA driver; accepted: cpu")
    assert told.count("\n") == 1
    assert names_in(tmp_path) == []


@pytest.mark.gpu
@pytest.mark.timeout(300)  # kernels are compiled
def test_on_a_gpu_errors_are_as_on_a_cpu(
    report: Mapping[str, Any],
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if reason := cuda_unavailable():
        pytest.skip(reason)
    arguments = ["--model", tiny_model, "--text-file", text, "--out", tmp_path, *SMALL]
    assert run_qualify(*arguments, "--codec", "none", "fp8", "--device", "cuda", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["none_is_exact"] is True
    assert found["device"] != report["device"] == "cpu"
    for role in ("k", "v"):
        wanted = report["codecs"]["fp8"]["relative_error"][role]
        assert found["codecs"]["fp8"]["relative_error"][role] == pytest.approx(wanted, rel=0.02)


def test_none_that_differs_is_exit_1(
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    faithful = qualify._round_trip

    def spoilt(
        task: qualify._Task,
        codec: str,
        context: list[int],
        states: qualify.States,
        result: qualify._Result,
    ) -> qualify.States:
        restored = faithful(task, codec, context, states, result)
        restored[-1][0, 0, 0, 0] += 1.0
        return restored

    monkeypatch.setattr(qualify, "_round_trip", spoilt)
    arguments = ["--model", tiny_model, "--text-file", text, "--out", tmp_path, *SMALL]
    assert run_qualify(*arguments, "--codec", "none", "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["none_is_exact"] is False
    assert report["codecs"]["none"]["relative_error"]["v"][-1] > 0.0


def test_a_page_that_does_not_come_back_is_exit_1(
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Forgetful(qualify.Manager):
        def query(self, instance: Instance, hashes: Sequence[bytes]) -> PrefixLease:
            return super().query(instance, hashes[:-1])

    monkeypatch.setattr(qualify, "Manager", Forgetful)
    arguments = ["--model", tiny_model, "--text-file", text, "--out", tmp_path, *SMALL]
    assert run_qualify(*arguments, "--codec", "fp8") == 1
    assert "fp8: 2 pages restored; 3 were saved" in capsys.readouterr().err
    assert names_in(tmp_path) == []


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def interrupt_halfway(path: Path, _: object) -> None:
    (path / "qualify.json").write_text("{")
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("place", "interruption"),
    [("_answer", interrupt), ("_draw_layers", interrupt), ("_write_files", interrupt_halfway)],
)
@pytest.mark.parametrize("there_before", [True, False])
def test_an_interrupt_leaves_no_half_written_file(
    place: str,
    interruption: Callable[..., None],
    tiny_model: Path,
    text: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    *,
    there_before: bool,
) -> None:
    out = tmp_path / "out"
    if there_before:
        out.mkdir()
        (out / "qualify.json").write_text("of an earlier run")
    monkeypatch.setattr(qualify, place, interruption)
    arguments = ["--model", tiny_model, "--text-file", text, "--out", out, *SMALL]
    assert run_qualify(*arguments, "--codec", "none") == 130
    assert capsys.readouterr().err.endswith("orbitkv qualify: interrupted\n")
    if there_before:
        assert names_in(out) == ["qualify.json"]
        assert (out / "qualify.json").read_text() == "of an earlier run"
    else:
        assert not out.exists()


def test_the_command_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = str(tmp_path / "missing")
    assert cli.main(["qualify", "--model", missing, "--out", str(tmp_path / "out")]) == 2
    assert "no such directory" in capsys.readouterr().err


def test_the_text_comes_with_the_package_and_says_what_it_is_made_of() -> None:
    found, name = checkpoint.read_text(None, flag="--text-file")
    path = Path(qualify.__file__).parent / "texts" / "qualify.txt"
    header = path.read_text(encoding="utf-8").partition("\n")[0]
    assert name == "orbitkv/texts/qualify.txt"
    assert "written for it" in header
    assert header not in found
    assert len(found.split()) > 6000  # which SmolLM2 makes 9,400 tokens of
    assert Counter(found.split("\n\n")).most_common(1)[0][1] <= 2


@pytest.mark.model
@pytest.mark.timeout(900)  # a model is loaded, and 1,024 tokens are computed
@pytest.mark.skipif(
    not SMOLLM2.is_dir(),
    reason=f"no {SMOLLM2}: `make model` fetches it, ORBITKV_MODEL names another",
)
def test_on_smollm2_errors_are_near_those_of_gaussian_vectors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", SMOLLM2, "--out", tmp_path, "--contexts", 1, "--new-tokens", 1]
    assert run_qualify(*arguments, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["none_is_exact"] is True
    assert report["text"]["tokens"] >= 8000
    # Relative MSE of Gaussian vectors of 64. V is not rotated, so its outliers count.
    for name, k_mse, v_mse in (("turboquant-4", 0.0089, 0.0080), ("turboquant-3", 0.0328, 0.0369)):
        found = report["codecs"][name]["relative_mse"]
        assert found["k"][2:-2] == pytest.approx([k_mse] * (len(found["k"]) - 4), rel=0.1)
        assert all(v_mse * 0.9 < mse < v_mse * 1.7 for mse in found["v"][2:-2])
        assert [found[role][layer] for role in ("k", "v") for layer in (0, 1, -2, -1)] == [0.0] * 8


# Arithmetic, against numbers worked out by hand.


def test_log_probabilities_are_a_softmax_that_does_not_overflow() -> None:
    logits = np.array([[0.0, math.log(3.0)], [1000.0, 1000.0]], np.float32)
    expected = [[math.log(0.25), math.log(0.75)], [math.log(0.5)] * 2]
    assert qualify.log_probabilities(logits) == pytest.approx(np.array(expected))
    assert logits[1, 0] == 1000.0


def test_kl_is_in_nats_and_not_symmetric() -> None:
    p, q = np.log([[0.5, 0.5]]), np.log([[0.25, 0.75]])
    assert qualify.kl_nats(p, q) == pytest.approx([0.5 * math.log(2.0) + 0.5 * math.log(2 / 3)])
    assert qualify.kl_nats(q, p) == pytest.approx([0.25 * math.log(0.5) + 0.75 * math.log(1.5)])
    assert qualify.kl_nats(p, p).tolist() == [0.0]


def test_perplexity_is_the_number_of_equally_likely_choices() -> None:
    log_p = np.log([[0.25, 0.25, 0.5], [0.125, 0.5, 0.375]])
    surprises = qualify.surprise_nats(log_p, [2, 0])
    assert surprises == pytest.approx([math.log(2.0), math.log(8.0)])
    assert qualify.perplexity(surprises) == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("a", "b", "length"),
    [([], [], 0), ([1, 2, 3], [1, 2, 3], 3), ([1, 2, 3], [1, 9, 3], 1), ([1, 2], [1], 1)],
)
def test_matching_length_ends_at_the_first_difference(
    a: list[int], b: list[int], length: int
) -> None:
    assert qualify.matching_length(a, b) == length


def test_relative_error_is_over_all_parts_together() -> None:
    sums = qualify.ErrorSums()
    assert sums.relative_error == 0.0
    sums.add(np.array([3.0, 0.0], np.float32), np.array([3.0, 1.0], np.float32))
    sums.add(np.array([4.0], np.float32), np.array([4.0], np.float32))
    assert sums.relative_mse == pytest.approx(1 / 25)
    assert sums.relative_error == pytest.approx(0.2)
    nothing = qualify.ErrorSums()
    nothing.add(np.zeros(1, np.float32), np.ones(1, np.float32))
    assert nothing.relative_error == math.inf
