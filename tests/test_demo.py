"""The demo proves what it claims, says in one line what it cannot do, and leaves nothing behind."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orbitkv import demo
from orbitkv.codecs.ans import AnsCodec, open_ans
from orbitkv.engines import device
from orbitkv.errors import Unavailable
from orbitkv.probe import cuda_unavailable
from tests.codecs.emulation import Zlib

ROOT = Path(__file__).parents[1]
SMOLLM2 = Path(os.environ.get("ORBITKV_MODEL", ROOT / ".models" / "smollm2"))
WORDS = 200
COMMAND = [sys.executable, "-c", "import sys; from orbitkv.cli import main; sys.exit(main())"]


def run_demo(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    return demo.run(parser.parse_args([str(argument) for argument in arguments]))


def write_prompt(path: Path, tokens: int) -> Path:
    words = random.Random(tokens).choices(range(WORDS), k=tokens)
    path.write_text(" ".join(f"w{word}" for word in words))
    return path


@pytest.fixture(scope="module")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint of three small random layers, and a tokenizer of one token a word."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    path: Path = tmp_path_factory.mktemp("model") / "tiny"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_size=64,
        head_dim=16,
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


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    return write_prompt(tmp_path / "prompt.txt", 135)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Make what the refused arguments name."""
    for directory in ("empty", "two", "damaged"):
        (tmp_path / directory).mkdir()
    for file in ("two/a.gguf", "two/b.gguf", "mine"):
        (tmp_path / file).touch()
    (tmp_path / "damaged" / "model.gguf").write_bytes(b"GGUF, but no more of it")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    write_prompt(tmp_path / "short", 32)
    write_prompt(tmp_path / "long", 500)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--model {}/none", "no such directory; accepted: a directory with one .gguf file"),
        ("--model {}/empty", "holds neither; accepted: a directory with one .gguf file"),
        ("--model {}/two", "a.gguf, b.gguf; accepted: one .gguf file"),
        ("--model {}/damaged", "accepted: a causal language model with its tokenizer"),
        ("--prompt-file {}/none", "No such file or directory; accepted: a readable text"),
        ("--prompt-file {}", "Is a directory; accepted: a readable text"),
        ("--prompt-file {}/binary", "can't decode byte 0xff in position 0"),
        ("--prompt-file {}/short", "32 tokens; accepted: 33 or more"),
        ("--prompt-file {}/long", "500 tokens and 32 new ones; accepted: 512 together"),
        ("--ssd-cache-path {}/mine", "File exists; accepted: a path where a file can be made"),
        ("--ssd-cache-path {}/none/kv", "No such file or directory; accepted: a path where"),
        ("--new-tokens 0", "--new-tokens: 0; accepted: 1 or more"),
        ("--pool-size much", "--pool-size: 'much' is not a size; accepted: a number of bytes"),
        ("--pool-size 64KiB", "--pool-size 64KiB; accepted: 114688 bytes or more, for the 4 pages"),
    ],
)
def test_what_cannot_be_done_is_told_in_one_line(
    arguments: str,
    message: str,
    files: Path,
    tiny_model: Path,
    prompt: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = sorted(files.rglob("*"))
    words = [word.format(files) for word in arguments.split()]
    assert run_demo("--model", tiny_model, "--prompt-file", prompt, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    told = [line for line in captured.err.splitlines() if line.startswith("orbitkv demo: ")]
    assert len(told) == 1
    assert message in told[0]
    assert captured.err.endswith(f"{told[0]}\n")
    assert sorted(files.rglob("*")) == before


def test_without_its_engine_it_says_what_to_install(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert run_demo("--model", tiny_model) == 2
    told = capsys.readouterr().err
    assert "not installed: torch, transformers; " in told
    assert told.endswith("pip install 'orbitkv[transformers]'\n")


def test_a_gpu_that_is_not_there_is_told_before_anything_is_loaded(
    prompt: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    pytest.importorskip("transformers", reason="transformers is not installed")
    monkeypatch.setattr(device, "cuda_unavailable", lambda: "no NVIDIA driver")
    assert run_demo("--model", prompt, "--device", "cuda") == 2
    told = capsys.readouterr().err
    assert told == (
        "orbitkv demo: --device cuda: no NVIDIA driver; "
        "accepted: cpu, or cuda where that can be had\n"
    )


def test_a_checkpoint_comes_back_in_a_new_process(
    tiny_model: Path,
    prompt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def refuse(connection: socket.socket, address: object) -> None:
        raise AssertionError(f"the demo connects to {address}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    ssd_path = tmp_path / "kv.ssd"
    arguments = ["--model", tiny_model, "--prompt-file", prompt, "--ssd-cache-path", ssd_path]
    assert run_demo(*arguments, "--json") == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["tokens_identical"] is True
    assert report["bytes_identical"] is True
    assert set(report["ttft_ms"]) == {"cold", "dram", "ssd"}
    assert (report["pages_restored"], report["pages_expected"]) == (4, 4)
    assert report["device"] == "cpu"
    assert report["bytes"]["engine"] == 4 * 3 * 2 * 2 * 32 * 16 * 4
    assert report["bytes"]["dram"] == report["bytes"]["ssd"] > report["bytes"]["engine"]
    assert "a new process" in captured.err
    assert list(tmp_path.iterdir()) == [prompt]


def test_a_new_process_that_finds_nothing_is_exit_1(
    tiny_model: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def without_its_file(task: demo._Task) -> demo._Run:
        other = dataclasses.replace(task, ssd_path=f"{task.ssd_path}.other")
        return demo._second_process(other)

    monkeypatch.setattr(demo, "_run_second_process", without_its_file)
    assert run_demo("--model", tiny_model, "--prompt-file", prompt, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_identical"] is True  # all of them were computed again
    assert (report["bytes_identical"], report["pages_restored"]) == (False, 0)


@pytest.mark.gpu
@pytest.mark.timeout(300)  # kernels are compiled
@pytest.mark.parametrize("codec", ["none", "ans"])
def test_on_a_gpu_it_comes_back_in_a_new_process_too(
    tiny_model: Path, prompt: Path, capsys: pytest.CaptureFixture[str], codec: str
) -> None:
    if reason := cuda_unavailable():
        pytest.skip(reason)
    if codec == "ans":
        try:
            open_ans(None)
        except Unavailable as error:
            pytest.skip(str(error))
    arguments = ["--model", tiny_model, "--prompt-file", prompt, "--device", "cuda"]
    assert run_demo(*arguments, "--codec", codec, "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_identical"] is True
    assert report["bytes_identical"] is True
    assert (report["pages_restored"], report["pages_expected"]) == (4, 4)
    assert report["device"] != "cpu"


def test_ans_is_refused_on_a_host_before_a_model_is_loaded(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("orbitkv.codecs.ans.cuda_unavailable", lambda: "no GPU: give it one")
    assert run_demo("--model", "/none", "--codec", "ans") == 2
    assert capsys.readouterr().err == (
        "orbitkv demo: storage codec 'ans': needs an NVIDIA GPU and nvCOMP; no GPU: give it one\n"
    )
    monkeypatch.setattr(device, "open_codec", lambda *_, **__: AnsCodec(Zlib()))
    assert run_demo("--model", "/none", "--codec", "ans") == 2
    assert "--codec ans: with --device cpu; accepted: with --device cuda" in capsys.readouterr().err


def test_people_get_a_table(
    tiny_model: Path,
    prompt: Path,
    no_second_process: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_demo("--model", tiny_model, "--prompt-file", prompt) == 0
    shown = capsys.readouterr().out
    for words in ("computed", "from DRAM", "from SSD", "4 of 4", "bytes identical    yes"):
        assert words in shown


@pytest.fixture
def no_second_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the first process do the second one's work, after it has closed its manager."""
    monkeypatch.setattr(demo, "_run_second_process", demo._second_process)


@pytest.mark.parametrize("differs", ["a token", "a byte", "a page", "the tier"])
def test_one_token_or_byte_that_differs_is_exit_1(
    differs: str,
    tiny_model: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def spoilt(task: demo._Task) -> demo._Run:
        run = demo._second_process(task)
        first, *others = run.page_digests
        changes: dict[str, dict[str, object]] = {
            "a token": {"token_ids": [run.token_ids[0] ^ 1, *run.token_ids[1:]]},
            "a byte": {"page_digests": [first[::-1], *others]},
            "a page": {"page_digests": [first], "pages_restored": 1, "sources": {"ssd": 1}},
            "the tier": {"sources": {"dram": 4, "ssd": 0}},
        }
        return dataclasses.replace(run, **changes[differs])

    monkeypatch.setattr(demo, "_run_second_process", spoilt)
    assert run_demo("--model", tiny_model, "--prompt-file", prompt, "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert report["tokens_identical"] is (differs != "a token")
    assert report["bytes_identical"] is (differs not in {"a byte", "a page"})
    assert (report["pages_restored"] == 4) is (differs not in {"a page", "the tier"})


def test_a_new_process_that_dies_is_told(
    tiny_model: Path,
    prompt: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert run_demo("--model", tiny_model, "--prompt-file", prompt, "--json") == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("ended with exit code 1: it said nothing\n")


def test_an_interrupt_leaves_nothing_behind(tiny_model: Path, prompt: Path, tmp_path: Path) -> None:
    ssd_path = tmp_path / "kv.ssd"
    arguments = ["--model", tiny_model, "--prompt-file", prompt, "--ssd-cache-path", ssd_path]
    with subprocess.Popen(
        [*COMMAND, "demo", *map(str, arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        # An index with rows is what the first process leaves behind for the second.
        index = tmp_path / "kv.ssd.index"
        while process.poll() is None and not (index.exists() and index.stat().st_size > 64):
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate()
    assert process.returncode == 130, err
    assert out == ""
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == [prompt]


@pytest.mark.model
@pytest.mark.timeout(900)  # a model is loaded twice, and 4,097 tokens are computed
@pytest.mark.skipif(
    not SMOLLM2.is_dir(),
    reason=f"no {SMOLLM2}: `make model` fetches it, ORBITKV_MODEL names another",
)
def test_smollm2_comes_back_from_dram_and_from_ssd() -> None:
    ended = subprocess.run(
        [*COMMAND, "demo", "--model", str(SMOLLM2), "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    report = json.loads(ended.stdout)
    assert report["tokens_identical"] is True
    assert report["bytes_identical"] is True
    assert report["prompt_tokens"] >= 2000
    assert report["pages_restored"] == (report["prompt_tokens"] - 1) // 32
    # Loose, because a test shares its machine: benchmarks/bench_demo.py holds the targets.
    assert max(report["ttft_ms"]["dram"], report["ttft_ms"]["ssd"]) < report["ttft_ms"]["cold"]
