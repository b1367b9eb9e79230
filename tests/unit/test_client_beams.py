"""Beams as a client gets them: the best is the answer, the others are its alternatives."""

from __future__ import annotations

import json
from typing import Any

import typer
from typer.testing import CliRunner

from inflight.client import GenerateOptions
from inflight.client.answer import Collector, Completion, read_chunk
from inflight.client.commands import Result, generate
from inflight.client.request import build_request
from tests.support.fake_server import FakeServer

OUTPUTS: dict[str, list[Any]] = {
    "text_output": ["ab", "a", ""],
    "finish_reason": ["stop"],
    "cum_log_probs": [-1.5, -2.0, -4.0],
    "output_log_probs": [-0.5, -1.0, -0.75, -1.0, -1.0, -1.0],
}


def _beam(text: str, cum_log_prob: float, *log_probs: float) -> Completion:
    return Completion(text, cum_log_prob=cum_log_prob, log_probs=log_probs)


def test_the_best_beam_is_the_answer() -> None:
    chunk = read_chunk(OUTPUTS)
    assert (chunk.text, chunk.cum_log_prob) == ("ab", -1.5)
    assert chunk.log_probs == (-0.5,), "what looks like upstream's padding is taken for it"
    assert chunk.other_beams == (_beam("a", -2.0, -0.75), _beam("", -4.0))


def test_of_one_sequence_nothing_is_padding() -> None:
    chunk = read_chunk({"text_output": ["ab"], "output_log_probs": [-0.5, -1.0]})
    assert (chunk.log_probs, chunk.other_beams) == ((-0.5, -1.0), ())


def test_other_beams_are_alternatives() -> None:
    collector = Collector()
    collector.add(read_chunk(OUTPUTS))
    assert collector.complete
    answer = collector.completion()
    assert [(one.text, one.cum_log_prob) for one in answer.alternatives] == [("a", -2.0), ("", -4.0)]
    assert json.loads(Result(0, "say", answer).as_json())["alternatives"] == ["a", ""]


def test_options_become_the_ensembles_tensors() -> None:
    options = GenerateOptions(beam_width=3, length_penalty=0.5)
    inputs = build_request("say", options, stream=False).inputs
    assert (inputs["beam_width"], inputs["length_penalty"]) == ([3], [0.5])


def test_the_command_has_them_too() -> None:
    app = typer.Typer()
    app.command()(generate)
    with FakeServer() as server:
        asked = ["Hi", "--url", f"127.0.0.1:{server.grpc_port}", "--beam-width", "3", "--length-penalty", "0.5"]
        assert CliRunner().invoke(app, asked).exit_code == 0
        assert (server.requests[0]["beam_width"], server.requests[0]["length_penalty"]) == (3, 0.5)
