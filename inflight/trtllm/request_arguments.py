"""A request in TensorRT-LLM's terms, field by field; what version 1.2.x cannot do is refused by name.

Its samplers ignore what they do not know, so every field is judged here by the sampler that will see it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Set
from datetime import timedelta
from typing import Any

import numpy as np

from inflight.engine.request import Request
from inflight.errors import UnsupportedFeature
from inflight.sampling import Guide, SamplingParams
from inflight.settings.deployment import Deployment
from inflight.text.stops import StopTextLimit
from inflight.text.tokenizer import Tokenizer
from inflight.trtllm.arguments import Sampler
from inflight.trtllm.runtime import find

MAX_TOP_K = 1024
"""More are clipped by the sampling kernels (``TOP_K_MAX``)."""
_OTHER_SAMPLER = {"torch": "trtllm", "trtllm": "torch"}
_DRAWING_METHODS = ("draft_target", "ngram")
"""Methods of speculative decoding whose drafts are checked against tokens that were drawn as the request says."""
_GUIDE_FIELDS = {"json_schema": "json", "regex": "regex", "ebnf_grammar": "grammar", "structural_tag": "structural_tag"}


class RequestArguments:
    """Makes the arguments of ``generate_async``."""

    def __init__(self, deployment: Deployment, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids begin at 1, as in TensorRT-LLM's own examples.
        self._adapters = {
            name: find("executor", "LoRARequest")(name, number, str(path))
            for number, (name, path) in enumerate(deployment.tensorrt_llm.lora.items(), start=1)
        }

    def of(self, request: Request) -> dict[str, Any]:
        """Return the arguments for a request, all but ``streaming``."""
        stops = single_stop_tokens(request.sampling, self._tokenizer)
        arguments = sampling_arguments(request.sampling, self._tokenizer.config.vocab_size, stops)
        if request.sampling.guide is not None:
            guide = find("llmapi", "GuidedDecodingParams")
            arguments["guided_decoding"] = guide(**guide_arguments(request.sampling.guide))
        params = find("llmapi", "SamplingParams")(**arguments)
        set_bad_words(params, request.sampling.bad_sequences)
        made: dict[str, Any] = {"inputs": request.prompt, "sampling_params": params}
        if request.retention:
            made["kv_cache_retention_config"] = _retention_config(request)
        return made | ({"lora_request": self._adapters[request.lora]} if request.lora else {})


def _retention_config(request: Request) -> Any:
    """Return TensorRT-LLM's ``KvCacheRetentionConfig``; what begins behind the prompt is of generated tokens."""
    config = find("llmapi", "KvCacheRetentionConfig")
    ranges = []
    # Some builds of 1.2 take no None for the directory, which is their own default; it is of another transfer mode.
    others: dict[str, Any] = {"directory": ""}
    for part in request.retention:
        duration = None if part.duration_ms is None else timedelta(milliseconds=part.duration_ms)
        if part.start >= len(request.prompt):
            others |= {"decode_retention_priority": part.priority, "decode_duration_ms": duration}
        else:
            of_range = {"token_start": part.start, "token_end": part.end, "priority": part.priority}
            ranges.append(config.TokenRangeRetentionConfig(**of_range, duration_ms=duration))
    return config(ranges, **others)


def check(sampling: SamplingParams, sampler: Sampler, speculation: str | None) -> None:
    """Refuse what the sampler would ignore, and what the method of speculative decoding would.

    Raises:
        UnsupportedFeature: naming the tensor, and the setting with which it is served if there is one.
    """
    guide = sampling.guide
    portable = {
        "beam_width": sampling.beam_width > 1,
        "num_prompt_log_probs": sampling.prompt_log_probs is not None,
        "log_prob_token_ids": bool(sampling.log_prob_ids),
        "pooling": sampling.pooling is not None,
        f"guided_decoding_guide_type {guide.kind if guide else ''}": guide is not None
        and guide.kind != "json"
        and guide.kind not in _GUIDE_FIELDS,
    }
    for name, is_asked in portable.items():
        if is_asked:
            raise UnsupportedFeature(f"{name} is not supported on TensorRT-LLM; `engine.kind: pytorch` has it")
    if speculation is not None and (names := _unserved_beside(speculation, sampling)):
        advice = "a deployment without `speculation` has it"
        raise UnsupportedFeature(f"{names[0]} is not supported by TensorRT-LLM beside {speculation}; {advice}")
    if names := _unserved(sampling, sampler):
        advice = f"`tensorrt_llm.sampler: {_OTHER_SAMPLER[sampler]}` has it"
        if speculation is not None:  # the other sampler is refused beside it
            advice = f"a deployment without `speculation`, with {advice}"
        raise UnsupportedFeature(f"{names[0]} is not supported by TensorRT-LLM's {sampler} sampler; {advice}")
    if sampling.min_tokens > 1 and len(sampling.end_ids) > 1 and not sampling.ignore_eos:
        raise UnsupportedFeature(
            "min_tokens is not supported by TensorRT-LLM beside several end ids; name one as end_id, or set ignore_eos"
        )


def _unserved(sampling: SamplingParams, sampler: Sampler) -> list[str]:
    """Return the tensors that ask for what the sampler does not serve."""
    asked = {
        "runtime_top_k above 1024": sampling.top_k > MAX_TOP_K and not sampling.greedy,
        "num_top_log_probs": sampling.top_log_probs > 0,
    }
    if sampler == "torch":
        asked = {
            "min_p": sampling.min_p > 0 and not sampling.greedy,
            **dict.fromkeys(_penalties(sampling), True),
            "bad_words_list": bool(sampling.bad_sequences),
            "seed": sampling.seed is not None and not sampling.greedy,
            # Of each token's distribution it reports the likeliest alone, which a drawn token need not be among.
            "return_log_probs": sampling.log_probs and not sampling.greedy,
            "return_log_probs beside embedding_bias": sampling.log_probs and bool(sampling.logit_bias),
            "return_log_probs beside min_tokens": sampling.log_probs and sampling.min_tokens > 0,
            "return_log_probs beside guided_decoding_guide_type": sampling.log_probs and sampling.guide is not None,
        }
    return [name for name, is_asked in asked.items() if is_asked]


def _unserved_beside(speculation: str, sampling: SamplingParams) -> list[str]:
    """Return the tensors that ask for what is not known to reach the tokens that were drafted."""
    asked = {
        # EAGLE takes the likeliest token whatever is asked.
        "a temperature above 0": speculation not in _DRAWING_METHODS and not sampling.greedy,
        "min_tokens": sampling.min_tokens > 0,
        **dict.fromkeys(_penalties(sampling), True),
        "bad_words_list": bool(sampling.bad_sequences),
        "embedding_bias": bool(sampling.logit_bias),
        "guided_decoding_guide_type": sampling.guide is not None,
        "return_log_probs": sampling.log_probs,
        "num_top_log_probs": sampling.top_log_probs > 0,
        "return_context_logits": sampling.context_logits,
        "return_generation_logits": sampling.generation_logits,
    }
    return [name for name, is_asked in asked.items() if is_asked]


def sampling_arguments(sampling: SamplingParams, vocab_size: int, stops: Collection[int] = ()) -> dict[str, Any]:
    """Return the keyword arguments of TensorRT-LLM's ``SamplingParams``; ``embedding_bias`` as a numpy array [vocab].

    ``stops`` are tokens that end the generation and belong to it. All other stop strings and stop sequences are matched
    on what comes back, and abort the request.
    """
    ends = sorted(sampling.end_ids)
    arguments: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        # Without a tokenizer it must be told that there is no end id.
        "end_id": -1 if sampling.ignore_eos or not ends else ends[0],
        "ignore_eos": sampling.ignore_eos,
        "detokenize": False,
        "return_context_logits": sampling.context_logits,
        "return_generation_logits": sampling.generation_logits,
        "return_perf_metrics": True,
    }
    ending = [*([] if sampling.ignore_eos else ends[1:]), *sorted(stops)]
    if ending:
        arguments |= {"stop_token_ids": ending, "include_stop_str_in_output": True}
    if sampling.min_tokens:
        arguments["min_tokens"] = sampling.min_tokens
    if sampling.logit_bias:
        bias = arguments["embedding_bias"] = np.zeros(vocab_size, np.float32)
        bias[list(sampling.logit_bias)] = list(sampling.logit_bias.values())
    if sampling.log_probs or sampling.top_log_probs:
        arguments["logprobs"] = max(1, sampling.top_log_probs)
    return arguments | _drawing(sampling) | _penalties(sampling)


def _drawing(sampling: SamplingParams) -> dict[str, Any]:
    if sampling.greedy:
        return {"top_k": 1}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p or None,
        # Without one, every request would be drawn with seed 0.
        "seed": secrets.randbits(64) if sampling.seed is None else sampling.seed,
    }


def _penalties(sampling: SamplingParams) -> dict[str, Any]:
    """Return the penalties that the request asks for."""
    neutral = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    return {name: getattr(sampling, name) for name, value in neutral.items() if getattr(sampling, name) != value}


def guide_arguments(guide: Guide) -> dict[str, Any]:
    """Return the keyword arguments of TensorRT-LLM's ``GuidedDecodingParams``."""
    return {"json_object": True} if guide.kind == "json" else {_GUIDE_FIELDS[guide.kind]: guide.text}


def set_bad_words(params: Any, sequences: tuple[tuple[int, ...], ...]) -> None:
    """Give TensorRT-LLM's ``params`` bad words as token ids.

    The API takes words of several tokens as texts alone, which it encodes with its own tokenizer into the field that
    is filled here; texts beside it only say that there are some.
    """
    if sequences:
        params.bad = ["" for _ in sequences]
        params._bad_word_ids = [list(sequence) for sequence in sequences]


def single_stop_tokens(sampling: SamplingParams, tokenizer: Tokenizer) -> Set[int]:
    """Return the tokens that are a stop string, or a stop sequence, of the request.

    TensorRT-LLM is told of them, because an abort costs it more than an end: only of a token that always ends the
    sequence here too, in the same place. It keeps to no ``min_tokens`` for them; a request with more than one has all
    its stops matched here.
    """
    if sampling.min_tokens > 1:
        return set()
    sequences = {stop[0] for stop in sampling.stop_sequences if len(stop) == 1}
    words = ((text, tokenizer.spelling(text)) for text in sampling.stop_strings)
    # The token must bring all of the text even as the first one, which may lose a space.
    alone = {ids[0] for text, ids in words if len(ids) == 1 and StopTextLimit(tokenizer, [text]).push(ids[0])}
    return sequences | alone
