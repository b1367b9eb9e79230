"""GGUF files of a hub: their header says before the download whether they are served; then they are."""

from __future__ import annotations

import functools
import gzip
import struct
import tempfile
from pathlib import Path

import gguf
import numpy as np
import pytest

from inflight.hub import gguf_header
from inflight.hub.model_manifest import read_manifest
from inflight.hub.staging import in_units
from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.driving import ask, load, run
from tests.engine.support.gguf_files import write_gguf
from tests.fakes.hub import FakeHub
from tests.hub.support.commands import ANSWER_TOKENS, PROMPT, answer_of, inflight, refused
from tests.support.gguf_tokenizers import add_demo


@functools.cache
def demo_as(kind: str) -> bytes:
    """Return the demo model as a file with linears of a type."""
    with tempfile.TemporaryDirectory() as folder:
        return write_gguf(DEMO / "model", Path(folder), lambda _: kind, add_demo).path.read_bytes()


@pytest.mark.proof
def test_it_answers_as_the_checkpoint_does(hub: FakeHub) -> None:
    """The demo is in bfloat16, which a file holds as it is."""
    hub.add("org/demo", {"demo-BF16.gguf": demo_as("BF16")})
    said, answer = answer_of("org/demo:BF16")
    assert "pulled org/demo:BF16" in said
    tokenizer = Tokenizer.from_checkpoint(DEMO / "model")
    request = ask(tokenizer.encode_batch([PROMPT])[0], ANSWER_TOKENS)
    outputs = run(load(DEMO / "model", dtype="bfloat16"), [request])
    assert answer == PROMPT + tokenizer.decode(outputs[request.key].tokens)


@pytest.mark.proof
def test_what_is_said_of_it(hub: FakeHub, models: Path) -> None:
    hub.add("org/demo", {f"demo-{kind}.gguf": demo_as(kind) for kind in ("BF16", "Q8_0")})
    for kind in ("BF16", "Q8_0"):
        done = inflight("pull", f"org/demo:{kind}")
        assert "architecture  LlamaForCausalLM\n" in done.stderr
        assert read_manifest(Path(done.stdout.strip())).architecture == "LlamaForCausalLM"
    weights = 4 * (2 * 256 * 256 + 2 * 128 * 256 + 3 * 768 * 256)
    needed = in_units((weights * 9 + 4096 * 256 * (32 + 9) + 9 * 256 * 32) // 8)
    assert f"memory        {needed} of weights; " in done.stderr
    rows = [line for line in inflight("models").stdout.splitlines() if "org/" in line]
    assert "tokens/s alone" in rows[0]
    assert f"fits: {needed} of weights" in rows[1]
    assert "speed is not planned (GGUF)" in rows[1]


def _headless(architecture: str, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> bytes:
    """Return a file of an architecture, with a megabyte in one tensor of a type."""
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(path := Path(folder) / "m.gguf", architecture)
        size = gguf.GGML_QUANT_SIZES[kind][1]
        values = np.zeros((1 << 20) // size * size, np.uint8).reshape(-1, size)
        writer.add_tensor("token_embd.weight", values, raw_dtype=kind)
        for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
            step()
        writer.close()
        return path.read_bytes()


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_headless("bloom"), "org/odd/a-Q8_0.gguf: general.architecture 'bloom' is not supported; supported: llama"),
        (_headless("llama", gguf.GGMLQuantizationType.IQ2_XXS), "'token_embd.weight' is in IQ2_XXS; supported: F32"),
        (
            _headless("llama"),
            "org/odd/a-Q8_0.gguf: tokenizer.ggml.model is 'none'; it must be gpt2 or llama; of another",
        ),
        (
            b"GGUF" + struct.pack(">I", 3) + bytes(1 << 20),
            "org/odd/a-Q8_0.gguf: GGUF version 50331648 is not supported",
        ),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60) + bytes(1 << 20), "entries of metadata: 1152921504606846976 are"),
        (b"PK" + bytes(1 << 20), "org/odd/a-Q8_0.gguf: not a GGUF file: it does not begin with GGUF"),
    ],
)
def test_what_is_not_served_is_refused_before_the_download(
    content: bytes, said: str, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "_AT_FIRST", 1 << 10)
    hub.add("org/odd", {"a-Q8_0.gguf": content})
    message = refused("serve", "org/odd:Q8_0")
    assert said in message
    assert message.endswith("`inflight pull` gets it all the same")
    assert set(hub.sent("a-Q8_0.gguf")) == {"bytes=0-1023"}
    assert f"the portable engine does not serve it: {message[:40]}" in inflight("pull", "org/odd:Q8_0").stderr


@pytest.mark.parametrize("fault", ["none", "cut", "no ranges"])
def test_a_header_longer_than_what_is_asked_for_first(
    fault: str, hub: FakeHub, served: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "_AT_FIRST", 1 << 10)
    hub.add("org/demo", {"demo-Q8_0.gguf": demo_as("Q8_0")})
    hub.faults.no_ranges = fault == "no ranges"
    hub.faults.cut_after["demo-Q8_0.gguf"] = [100, 2000] if fault == "cut" else []
    assert "LlamaForCausalLM" in inflight("serve", "org/demo:Q8_0").stderr
    assert [path.name for path in served] == ["demo-Q8_0.gguf"]


def test_a_header_that_is_sent_compressed_is_not_decoded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """No compression was asked for, and what is sent so may be of any size."""
    monkeypatch.setattr(gguf_header, "_AT_FIRST", 1 << 10)
    hub.add("org/demo", {"demo-Q8_0.gguf": demo_as("Q8_0")})
    hub.faults.answers["/storage/"] = (200, {"Content-Encoding": "gzip"}, gzip.compress(demo_as("Q8_0"), 1))
    assert "not a GGUF file: it does not begin with GGUF" in refused("serve", "org/demo:Q8_0")


def test_a_header_without_end(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_header, "_AT_FIRST", 1 << 10)
    monkeypatch.setattr(gguf_header, "_MOST", 1 << 13)
    hub.add("org/demo", {"demo-Q8_0.gguf": demo_as("Q8_0")})
    assert "its header has more than 8192 bytes" in refused("serve", "org/demo:Q8_0")


def test_a_model_in_parts_needs_the_first_ones_header_only(hub: FakeHub) -> None:
    parts = {f"a-Q8_0-0000{number}-of-00002.gguf": _headless("bloom") for number in (1, 2)}
    hub.add("org/odd", parts)
    assert "'bloom' is not supported" in refused("serve", "org/odd:Q8_0")
    assert not hub.sent("a-Q8_0-00002-of-00002.gguf")
