"""Sampling, field by field: what arrives, and what is refused because a sampler of TensorRT-LLM would ignore it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inflight.errors import InvalidRequest, UnsupportedFeature
from inflight.sampling import Guide, SamplingParams
from inflight.trtllm.arguments import Sampler
from inflight.trtllm.request_arguments import check, guide_arguments, sampling_arguments, set_bad_words
from tests.support.tables import each_row

API = json.loads((Path(__file__).parents[1] / "facts/llm_api.json").read_text())
VOCABULARY = 100


def arguments(**sampling: Any) -> dict[str, Any]:
    return sampling_arguments(SamplingParams(16, **sampling), VOCABULARY)


def test_only_recorded_names_are_sent(fake: None) -> None:
    known = {field["name"] for field in API["SamplingParams"]["fields"]}
    everything = {
        "temperature": 0.7,
        "end_ids": frozenset({3, 5}),
        "logit_bias": {4: 1.5},
        "log_probs": True,
        "min_tokens": 2,
        "repetition_penalty": 1.2,
    }
    assert set(arguments(**everything)) <= known
    from tensorrt_llm import SamplingParams as Theirs

    Theirs(**arguments(**everything))


def test_sampling_params_of_greedy_and_drawn() -> None:
    assert arguments()["top_k"] == 1
    assert "seed" not in arguments(seed=5)
    drawn = arguments(temperature=0.7, top_k=5, top_p=0.9, min_p=0.1, seed=7)
    assert {name: drawn[name] for name in ("temperature", "top_k", "top_p", "min_p", "seed")} == {
        "temperature": 0.7,
        "top_k": 5,
        "top_p": 0.9,
        "min_p": 0.1,
        "seed": 7,
    }
    assert arguments(temperature=1.0)["seed"] != arguments(temperature=1.0)["seed"], "each draws its own"
    assert arguments(temperature=1.0, seed=0)["seed"] == 0


def test_sampling_params_end_ids() -> None:
    assert arguments()["end_id"] == -1
    several = arguments(end_ids=frozenset({9, 5, 7}))
    assert (several["end_id"], several["stop_token_ids"]) == (5, [7, 9])
    ignored = arguments(end_ids=frozenset({5, 7}), ignore_eos=True)
    assert (ignored["end_id"], "stop_token_ids" in ignored) == (-1, False)


def test_bias_scores_and_penalties() -> None:
    bias = arguments(logit_bias={4: 1.5, 6: -2.0})["embedding_bias"]
    assert bias.dtype == np.float32
    assert bias.shape == (VOCABULARY,)
    assert (bias[4], bias[6], np.count_nonzero(bias)) == (1.5, -2.0, 2)
    assert "logprobs" not in arguments()
    assert arguments(log_probs=True)["logprobs"] == 1
    assert arguments(log_probs=True, top_log_probs=4)["logprobs"] == 4
    assert not {"repetition_penalty", "presence_penalty", "frequency_penalty"} & set(arguments())
    assert arguments(presence_penalty=0.5)["presence_penalty"] == 0.5


def test_bad_words_of_several_tokens_reach_the_kernels(fake: None) -> None:
    from tensorrt_llm import SamplingParams as Theirs

    params = Theirs(**arguments())
    assert params.bad_words() == []
    set_bad_words(params, ((3,), (4, 5)))
    assert params.bad_words() == [[3], [4, 5]]


@each_row(
    ("sampler", "sampling", "name"),
    [
        ("torch", {"temperature": 1.0, "min_p": 0.1}, "min_p"),
        ("torch", {"repetition_penalty": 1.1}, "repetition_penalty"),
        ("torch", {"presence_penalty": 0.1}, "presence_penalty"),
        ("torch", {"frequency_penalty": 0.1}, "frequency_penalty"),
        ("torch", {"bad_sequences": ((3,),)}, "bad_words_list"),
        ("torch", {"temperature": 1.0, "seed": 5}, "seed"),
        ("torch", {"temperature": 1.0, "log_probs": True}, "return_log_probs"),
        ("torch", {"log_probs": True, "logit_bias": {3: 9.0}}, "return_log_probs beside embedding_bias"),
        ("torch", {"log_probs": True, "min_tokens": 1}, "return_log_probs beside min_tokens"),
        (
            "torch",
            {"log_probs": True, "guide": Guide("json")},
            "return_log_probs beside guided_decoding_guide_type",
        ),
        ("trtllm", {"top_log_probs": 2}, "num_top_log_probs"),
        ("trtllm", {"temperature": 1.0, "top_k": 1025}, "runtime_top_k above 1024"),
        ("trtllm", {"min_tokens": 3, "end_ids": frozenset({4, 5})}, "min_tokens"),
    ],
)
def test_what_would_be_ignored_is_refused_by_name(sampler: Sampler, sampling: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not supported by TensorRT-LLM"):
        check(SamplingParams(16, **sampling), sampler, speculation=None)


@each_row("method", ["draft_target", "ngram", "eagle"])
@each_row(
    ("sampling", "name"),
    [
        ({"min_tokens": 1}, "min_tokens"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
        ({"bad_sequences": ((3,),)}, "bad_words_list"),
        ({"logit_bias": {3: 1.0}}, "embedding_bias"),
        ({"guide": Guide("json")}, "guided_decoding_guide_type"),
        ({"log_probs": True}, "return_log_probs"),
        ({"top_log_probs": 1}, "num_top_log_probs"),
        ({"context_logits": True}, "return_context_logits"),
        ({"generation_logits": True}, "return_generation_logits"),
    ],
)
def test_what_drafts_would_ignore_is_refused_by_name(method: str, sampling: dict[str, Any], name: str) -> None:
    with pytest.raises(UnsupportedFeature, match=f"^{name} is not supported by TensorRT-LLM beside {method}; a depl"):
        check(SamplingParams(16, **sampling), "torch", method)


def test_only_methods_that_draw_take_a_temperature() -> None:
    drawn, greedy = SamplingParams(16, temperature=0.7), SamplingParams(16, temperature=0.7, top_k=1)
    with pytest.raises(UnsupportedFeature, match="^a temperature above 0 is not supported .* beside eagle"):
        check(drawn, "torch", "eagle")
    check(greedy, "torch", "eagle")
    check(drawn, "torch", "ngram")
    check(drawn, "torch", "draft_target")


@each_row("sampling", [{"min_p": 0.1}, {"seed": 5}])
def test_beside_drafts_no_other_sampler_is_advised(sampling: dict[str, Any]) -> None:
    advice = "a deployment without `speculation`, with `tensorrt_llm.sampler: trtllm` has it"
    with pytest.raises(UnsupportedFeature, match=f"torch sampler; {advice}$"):
        check(SamplingParams(16, temperature=1.0, **sampling), "torch", "ngram")


def test_what_a_sampler_serves_passes() -> None:
    check(SamplingParams(16, temperature=1.0, min_p=0.1, repetition_penalty=1.1, seed=3), "trtllm", None)
    check(SamplingParams(16, top_log_probs=3, log_probs=True, seed=3), "torch", None)
    check(SamplingParams(16, temperature=1.0, top_log_probs=3), "torch", None)  # whatever is drawn, they are reported


@each_row("sampler", ["torch", "trtllm"])
def test_what_the_portable_engine_alone_has_is_refused(sampler: Sampler) -> None:
    for name, more in {
        "beam_width": {"beam_width": 2},
        "num_prompt_log_probs": {"prompt_log_probs": 0},
        "log_prob_token_ids": {"log_prob_ids": (1,)},
        "pooling": {"pooling": "last"},
        "prompt_ignore_length": {"prompt_ignore_length": 3},
    }.items():
        with pytest.raises(UnsupportedFeature, match=f"^{name} is not supported on TensorRT-LLM"):
            check(SamplingParams(16, **more), sampler, None)  # type: ignore[arg-type]


def test_every_field_of_sampling_is_judged() -> None:
    """A field added to SamplingParams must be thought of here: sent, matched on what comes back, or refused."""
    here = {"stop_strings", "stop_sequences", "guide", "bad_sequences"}
    here |= {"beam_width", "length_penalty", "early_stopping", "prompt_log_probs", "log_prob_ids", "pooling"}
    here.add("prompt_ignore_length")
    sent = set(arguments(temperature=0.5, min_tokens=1, logit_bias={1: 1.0}, log_probs=True, end_ids=frozenset({1, 2})))
    renamed = {
        "end_ids": "end_id",
        "logit_bias": "embedding_bias",
        "log_probs": "logprobs",
        "top_log_probs": "logprobs",
        "context_logits": "return_context_logits",
        "generation_logits": "return_generation_logits",
    }
    penalties = set(arguments(repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.0))
    for field in fields(SamplingParams):
        assert field.name in here or renamed.get(field.name, field.name) in sent | penalties, field.name


@each_row(
    ("kind", "text", "expected"),
    [
        ("json", None, {"json_object": True}),
        ("json_schema", '{"type": "object"}', {"json": '{"type": "object"}'}),
        ("regex", "[ab]+", {"regex": "[ab]+"}),
        ("ebnf_grammar", 'root ::= "a"', {"grammar": 'root ::= "a"'}),
        ("structural_tag", "{}", {"structural_tag": "{}"}),
    ],
)
def test_guided_decoding_params(fake: None, kind: str, text: str | None, expected: dict[str, Any]) -> None:
    from tensorrt_llm.llmapi import GuidedDecodingParams

    guide = Guide.read(kind, text)
    assert guide is not None
    assert guide_arguments(guide) == expected
    GuidedDecodingParams(**expected)._validate()


@each_row(
    ("kind", "text", "said"),
    [
        (None, "x", "guided_decoding_guide_type is None"),
        ("xml", "x", "guided_decoding_guide_type is 'xml'; it must be one of json, json_schema"),
        ("regex", None, "guided_decoding_guide is ''; it must be given"),
        ("json", "{}", "guided_decoding_guide is '{}'"),
        ("json_schema", "{", "guided_decoding_guide is not valid JSON"),
        ("json_schema", '{"const": 1, "const": 2}', "is not valid JSON: it has the key 'const' twice in one object"),
    ],
)
def test_guided_decoding_params_wrong(kind: str | None, text: str | None, said: str) -> None:
    with pytest.raises(InvalidRequest, match=said):
        Guide.read(kind, text)
