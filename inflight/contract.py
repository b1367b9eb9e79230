"""The tensor tables of every stage: names, types, shapes, and what is served of them. All else derives from them.

The names, types and shapes of `ensemble` and `tensorrt_llm` are those of the last upstream line (TensorRT-LLM 1.2.x);
rows marked ``own`` are Inflight's additions. The pbtxt files of the model repository, docs/contract.md, the stages'
readers and the clients are all written from these tables or checked against them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

BOOL, UINT8, INT32, INT64, UINT64 = "BOOL", "UINT8", "INT32", "INT64", "UINT64"
FP16, FP32, BYTES = "FP16", "FP32", "BYTES"

ENSEMBLE, TOKENIZER, ENGINE, DETOKENIZER = "ensemble", "tokenizer", "tensorrt_llm", "detokenizer"

CLIENT = "x-inflight-client"
"""The header with the client's name that the door sets; for the stages Triton makes a request parameter of it.
docs/door.md says who believes it."""

MAX_BATCH_SIZE = 128
"""Rows of one request, and of one batch of upstream's engine."""

PYTORCH, TRTLLM, TENSORRTLLM = "pytorch", "trtllm", "tensorrtllm"
"""Kinds of ``engine.kind`` of the deployment that a tensor names where not all engines serve it."""
_OWN_STAGE = (PYTORCH, "replay", TRTLLM)
"""The kinds with Inflight's engine stage; upstream's C++ backend knows upstream's tensors only."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One tensor of one stage. Every input is optional to Triton: the stages judge better, and by name."""

    name: str
    dtype: str
    dims: tuple[int, ...]
    """Without the batch dimension."""
    doc: str
    reshape: bool = False
    """Upstream declares ``[1]`` with a reshape to ``[]``: the engine sees ``[B]``."""
    ragged: bool = False
    own: bool = False
    """Inflight's own addition to the upstream contract."""
    served_by: tuple[str, ...] | None = None
    """The engines that serve it; None: all of them. The others refuse it by name, unless it is empty or neutral."""
    neutral: Any = None
    """The value that asks for nothing, and is therefore accepted where the tensor is not served; None: no value is."""

    def served(self, engine: str) -> bool:
        """Return whether ``engine`` serves it."""
        return self.served_by is None or engine in self.served_by


def _scalar(name: str, dtype: str, doc: str, **more: Any) -> Tensor:
    return Tensor(name, dtype, (1,), doc, reshape=True, **more)


def _unserved(name: str, dtype: str, dims: tuple[int, ...], doc: str, **more: Any) -> Tensor:
    return Tensor(name, dtype, dims, doc, served_by=(), **more)


def _retention(name: str, dims: tuple[int, ...], doc: str) -> Tensor:
    served_by = (PYTORCH, TRTLLM)
    return Tensor(f"retention_{name}", INT32, dims, f"KV retention: {doc}", ragged=True, served_by=served_by)


_OWN: dict[str, Any] = {"own": True, "served_by": _OWN_STAGE}
_OF_MODELS: dict[str, Any] = {"own": True, "served_by": (PYTORCH, TRTLLM)}
_PORTABLE: dict[str, Any] = {"served_by": (PYTORCH,)}
_SCORES: dict[str, Any] = {"own": True, "served_by": (PYTORCH,)}
_RESUME: dict[str, Any] = {"own": True, "served_by": (PYTORCH, "replay")}
_GUIDE: dict[str, Any] = {"ragged": True, "served_by": (PYTORCH, TRTLLM)}

ENGINE_INPUTS: tuple[Tensor, ...] = (
    Tensor("input_ids", INT32, (-1,), "prompt token ids, padded on the right", ragged=True),
    _unserved("encoder_input_features", FP16, (-1, -1), "audio or vision encoder features", ragged=True),
    _unserved("encoder_output_lengths", INT32, (1,), "encoder output length", reshape=True),
    _scalar("input_lengths", INT32, "true length of the row of input_ids"),
    _scalar("request_output_len", INT32, "most tokens to generate; required, but with pooling, where it says nothing"),
    _scalar("num_return_sequences", INT32, "independent samples of each prompt"),
    _unserved("draft_input_ids", INT32, (-1,), "draft tokens to verify", ragged=True),
    _unserved("decoder_input_ids", INT32, (-1,), "decoder prompt of encoder-decoder models", ragged=True),
    _unserved("decoder_input_lengths", INT32, (1,), "its length", reshape=True),
    _unserved("draft_logits", FP32, (-1, -1), "logits of the draft model", ragged=True),
    _unserved("draft_acceptance_threshold", FP32, (1,), "acceptance threshold for drafts", reshape=True),
    _scalar("end_id", INT32, "the token that ends the sequence; -1 or absent: none"),
    _scalar("pad_id", INT32, "the token that pads short rows"),
    Tensor("stop_words_list", INT32, (2, -1), "stop words: ids joined; end offsets, -1 padded", ragged=True),
    Tensor("bad_words_list", INT32, (2, -1), "bad words, laid out the same way", ragged=True),
    Tensor("embedding_bias", FP32, (-1,), "added to the logits [vocab]; empty: none", ragged=True),
    _scalar("beam_width", INT32, "beams of beam search; 1: no search", neutral=1, **_PORTABLE),
    _scalar("runtime_top_k", INT32, "sample among the k likeliest; 0: all, 1: greedy"),
    _scalar("runtime_top_p", FP32, "sample among the likeliest whose sum reaches p; <= 0: ignored"),
    _unserved("runtime_top_p_min", FP32, (1,), "floor of the decaying top-p", reshape=True),
    _unserved("runtime_top_p_decay", FP32, (1,), "decay of top-p", reshape=True),
    _unserved("runtime_top_p_reset_ids", INT32, (1,), "token that resets top-p", reshape=True),
    _scalar("len_penalty", FP32, "beams' scores: log-prob / length ** this; 0 by default", neutral=1.0, **_PORTABLE),
    _scalar("early_stopping", BOOL, "end with beam_width finished beams; true by default", neutral=False, **_PORTABLE),
    _unserved("beam_search_diversity_rate", FP32, (1,), "diversity of beams", reshape=True, neutral=0.0),
    _scalar("temperature", FP32, "sampling temperature; 0 or absent: greedy"),
    _scalar("repetition_penalty", FP32, "divides the logits of tokens seen in prompt or output; 1: none"),
    _scalar("min_tokens", INT32, "no end before this many tokens"),
    _scalar("presence_penalty", FP32, "taken off the logit of each token of prompt and output"),
    _scalar("frequency_penalty", FP32, "taken off as often as the token occurs in them"),
    _scalar(
        "prompt_ignore_length",
        INT32,
        "presence and frequency penalties leave out so many tokens of the prompt, from its start",
        own=True,
        neutral=0,
        **_PORTABLE,
    ),
    _scalar("seed", UINT64, "random seed; absent: a new one per request"),
    _scalar("return_log_probs", BOOL, "fill cum_log_probs and output_log_probs"),
    _scalar("return_context_logits", BOOL, "fill context_logits: of a stream, in its last response"),
    _scalar("return_generation_logits", BOOL, "fill generation_logits"),
    _scalar("return_perf_metrics", BOOL, "fill the ten outputs about time, KV cache and drafts, so far"),
    _scalar("return_num_input_tokens", BOOL, "fill num_input_tokens"),
    _scalar("return_num_output_tokens", BOOL, "fill num_output_tokens"),
    _scalar(
        "return_num_cached_tokens", BOOL, "fill num_cached_tokens and num_cache_write_tokens", neutral=False, **_OWN
    ),
    _scalar("exclude_input_in_output", BOOL, "leave the prompt out of a response that is not streamed"),
    _scalar("stop", BOOL, "end every running request of this request id"),
    _scalar("streaming", BOOL, "send tokens as they come"),
    _unserved("prompt_embedding_table", FP16, (-1, -1), "p-tuning or multimodal embeddings", ragged=True),
    _unserved("prompt_vocab_size", INT32, (1,), "rows of the table", reshape=True),
    _unserved("prompt_table_extra_ids", UINT64, (-1,), "ids that keep KV reuse apart", ragged=True),
    _unserved("cross_attention_mask", BOOL, (-1, -1), "mask of cross attention", ragged=True),
    _unserved("mrope_rotary_cos_sin", FP32, (-1,), "multimodal RoPE table"),
    _unserved("mrope_position_deltas", INT64, (1,), "multimodal RoPE delta"),
    _unserved("lora_task_id", UINT64, (1,), "LoRA adapter id", reshape=True),
    _unserved("lora_weights", FP16, (-1, -1), "LoRA weights [modules x layers, flattened]", ragged=True),
    _unserved("lora_config", INT32, (-1, 3), "rows of [module id, layer, rank]", ragged=True),
    _unserved("context_phase_params", UINT8, (-1,), "state of a context-only response", ragged=True),
    _unserved("skip_cross_attn_blocks", BOOL, (1,), "skip cross attention", ragged=True, neutral=False),
    _retention("token_range_starts", (-1,), "starts of ranges of prompt tokens"),
    _retention("token_range_ends", (-1,), "ends, exclusive; -1: open"),
    _retention("token_range_priorities", (-1,), "0 goes first, 100 last; else 35"),
    _retention("token_range_durations_ms", (-1,), "from the end; -1: for good"),
    _retention("decode_priority", (1,), "of generated tokens"),
    _retention("decode_duration_ms", (1,), "how long that holds"),
    Tensor(
        "guided_decoding_guide_type",
        BYTES,
        (1,),
        "json, json_schema, regex, ebnf_grammar or structural_tag; Inflight's own: lark_grammar, choice",
        **_GUIDE,
    ),
    Tensor("guided_decoding_guide", BYTES, (1,), "schema, regex, grammar, tags or choices; none for json", **_GUIDE),
    Tensor(
        "guide_start_ids", INT32, (-1,), "the guide holds behind these tokens only", ragged=True, own=True, **_PORTABLE
    ),
    _unserved("lookahead_window_size", INT32, (1,), "lookahead decoding: window", ragged=True),
    _unserved("lookahead_ngram_size", INT32, (1,), "lookahead decoding: n-gram", ragged=True),
    _unserved("lookahead_verification_set_size", INT32, (1,), "lookahead decoding: candidates", ragged=True),
    _scalar("min_p", FP32, "drop tokens less likely than min_p times the likeliest", neutral=0.0, **_OF_MODELS),
    _scalar("num_top_log_probs", INT32, "fill top_log_probs with so many tokens (at most 20)", neutral=0, **_OF_MODELS),
    _scalar("num_prompt_log_probs", INT32, "fill prompt_log_probs, and so many top ones (0 to 20)", **_SCORES),
    Tensor("log_prob_token_ids", INT32, (-1,), "fill token_log_probs: of these ids", ragged=True, **_SCORES),
    _scalar("pooling", BYTES, "generate nothing, fill embedding: of the last token, or the mean of all", **_SCORES),
    _scalar("ignore_eos", BOOL, "do not end at an end id", own=True),
    _scalar("final_perf_metrics", BOOL, "as return_perf_metrics, in the last response only", own=True),
    _scalar("priority", INT32, "higher is served first; 0 by default", neutral=0, **_OF_MODELS),
    _scalar("deadline_ms", INT32, "milliseconds from arrival after which the request ends", **_OF_MODELS),
    _scalar(
        "client_id",
        BYTES,
        "whose turn it uses, with batching.fairness; where the door or an API key names the client, that name counts",
        **_OF_MODELS,
    ),
    _scalar("lora_name", BYTES, "LoRA adapter, by its name in the deployment", own=True, served_by=(TRTLLM,)),
    Tensor("end_ids", INT32, (-1,), "several end ids; end_id wins over them", ragged=True, own=True),
    Tensor("stop_strings", BYTES, (-1,), "stop strings, matched on text", ragged=True, own=True),
    _scalar("stream_key", INT64, "with stop: end this stream only", own=True),
    _scalar("heartbeat", BOOL, "send empty responses while the request has nothing to say", own=True),
    Tensor("resumed_ids", INT32, (-1,), "what an earlier run of the request has generated", ragged=True, **_RESUME),
    Tensor("resumed_log_probs", FP32, (-1,), "their log-probs; needed with return_log_probs", ragged=True, **_RESUME),
    _scalar("return_token_ids", BOOL, "fill token_ids and used_seed, which resume a stream", neutral=False, **_RESUME),
    _scalar("trace_context", BYTES, "the request's trace; from the tokenizer, where traces are on", **_OWN),
    _scalar("inspect", BOOL, "alone: answer with `snapshot` and do nothing else", neutral=False, **_OWN),
)


def _output(name: str, dtype: str, doc: str, dims: tuple[int, ...] = (1,), own: bool = False) -> Tensor:
    return Tensor(name, dtype, dims, doc, own=own)


PERFORMANCE_OUTPUTS = (
    _output("kv_cache_alloc_new_blocks", INT32, "KV blocks newly allocated"),
    _output("kv_cache_reused_blocks", INT32, "KV blocks taken from the prefix cache"),
    _output("kv_cache_alloc_total_blocks", INT32, "both together"),
    _output("arrival_time_ns", INT64, "when the engine got the request"),
    _output("first_scheduled_time_ns", INT64, "when it first ran"),
    _output("first_token_time_ns", INT64, "when its first token was made"),
    _output("last_token_time_ns", INT64, "when its last token was made"),
    _output("acceptance_rate", FP32, "share of draft tokens accepted"),
    _output("total_accepted_draft_tokens", INT32, "draft tokens accepted"),
    _output("total_draft_tokens", INT32, "draft tokens proposed"),
)
PER_REQUEST_OUTPUTS: tuple[Tensor, ...] = (
    _output("cum_log_probs", FP32, "sum of the log-probs so far [beams]; a beam's has its end id's too", (-1,)),
    _output("output_log_probs", FP32, "log-prob of each new token [beams, n], padded with -1", (-1, -1)),
    _output("context_logits", FP32, "logits of the prompt [n, vocab]; before the last response n is 0", (-1, -1)),
    _output("generation_logits", FP32, "logits of each new token [beams, n, vocab]", (-1, -1, -1)),
    _output("batch_index", INT32, "row of the request's batch; only if it has several"),
    _output("sequence_index", INT32, "which of num_return_sequences; only if several"),
    *PERFORMANCE_OUTPUTS,
    _output("num_input_tokens", INT32, "tokens of the prompt"),
    _output("num_output_tokens", INT32, "tokens generated so far, of all beams"),
    _output("num_cached_tokens", INT32, "prompt tokens taken from the prefix cache, at the end", own=True),
    _output(
        "num_cache_write_tokens",
        INT32,
        "prompt tokens written to the prefix cache, in whole blocks, at the end",
        own=True,
    ),
    _output("finish_reason", BYTES, "at the end: stop, length, cancelled, deadline; unknown: upstream's", own=True),
    _output("top_log_prob_ids", INT32, "the likeliest tokens at each position [n, k]", (-1, -1), own=True),
    _output("top_log_probs", FP32, "their log-probs [n, k]", (-1, -1), own=True),
    _output("token_log_probs", FP32, "log-probs of log_prob_token_ids at each position [n, m]", (-1, -1), own=True),
    _output("prompt_log_probs", FP32, "log-prob of each token of the prompt but the first, once", (-1,), own=True),
    _output("prompt_top_log_prob_ids", INT32, "the likeliest in the place of each [n - 1, k]", (-1, -1), own=True),
    _output("prompt_top_log_probs", FP32, "their log-probs [n - 1, k]", (-1, -1), own=True),
    _output("embedding", FP32, "with pooling: the hidden state behind the last norm [hidden]", (-1,), own=True),
    _output("token_ids", INT32, "ids of the response's new tokens [n]", (-1,), own=True),
    _output("used_seed", UINT64, "with a sampled sequence's first response: what it is sampled by", own=True),
)
"""What the engine says about a request and the detokenizer hands through to the client."""

_IDS = (
    _output("output_ids", INT32, "ids [beams, n]; short beams end in -1, short rows of a batch in pad_id", (-1, -1)),
    _output("sequence_length", INT32, "their number [beams]", (-1,)),
)
_STREAM_STATE = (
    _output("stream_key", INT64, "the stream's key, unique while the engine lives", own=True),
    _output("text_limit", INT32, "characters of the generated text that may be shown so far", own=True),
    _output("echo_length", INT32, "how many leading output_ids are the prompt", own=True),
    _output("resumed_output_ids", INT32, "with the first response: resumed_ids, already shown", (-1,), own=True),
    _output("resumed_text_limit", INT32, "how many characters of their text could be shown", own=True),
    _output("failure", BYTES, "with the last response of a request that fails: Triton's code, message", (2,), own=True),
    _output("trace_span", BYTES, "with a sequence's last response, where it is traced: its request's span", own=True),
)
ENGINE_OUTPUTS = (
    *_IDS,
    *PER_REQUEST_OUTPUTS,
    _output("context_phase_params", UINT8, "never sent: context-only requests are refused", (-1,)),
    *_STREAM_STATE,
    _output("snapshot", BYTES, "to `inspect`: requests and KV cache at this moment, as JSON", own=True),
)

DETOKENIZER_INPUTS = (*_IDS, *_STREAM_STATE, *PER_REQUEST_OUTPUTS)
DETOKENIZER_OUTPUTS = (
    _output(
        "text_output", BYTES, "a flat list, each row's beams in turn, the best first; new text, if streaming", (-1,)
    ),
    _output("text_start", INT32, "where this text starts in the generated text, in characters", own=True),
    _output("text_end", INT32, "where it ends", own=True),
    *PER_REQUEST_OUTPUTS,
)
EXPECTATION, MARK = "expectation", "mark"
UPSTREAM_DETOKENIZER_INPUTS = (
    *DETOKENIZER_INPUTS,
    _output(EXPECTATION, BYTES, "alone: how the tokenizer's next requests may end", own=True),
)
UPSTREAM_DETOKENIZER_OUTPUTS = (
    *DETOKENIZER_OUTPUTS,
    _output(
        MARK, INT32, "to `expectation`: for each request, how the engine is to mark its responses", (-1,), own=True
    ),
)
"""After upstream's C++ backend, which hands nothing of ours through, the tokenizer tells the detokenizer by a call."""

TOKENIZER_INPUTS = (
    Tensor("text_input", BYTES, (1,), "the prompt"),
    _unserved("decoder_text_input", BYTES, (1,), "decoder prompt of encoder-decoder models", neutral=b""),
    Tensor(
        "max_tokens", INT32, (1,), "most tokens to generate; limits.default_max_tokens of the deployment by default"
    ),
    Tensor("bad_words", BYTES, (-1,), "words that must not be generated", ragged=True),
    Tensor("stop_words", BYTES, (-1,), "strings that end the generation; never shown", ragged=True),
    Tensor("end_id", INT32, (1,), "end id in place of the checkpoint's; -1: none"),
    Tensor("pad_id", INT32, (1,), "pad id in place of the checkpoint's"),
    _unserved("prompt_table_extra_id", UINT64, (1,), "id that keeps KV reuse apart"),
    Tensor("embedding_bias_words", BYTES, (-1,), "words whose tokens get a bias", ragged=True),
    Tensor("embedding_bias_weights", FP32, (-1,), "the bias of each", ragged=True),
    Tensor("messages", BYTES, (1,), "a chat as JSON, instead of text_input", own=True),
    Tensor("chat_template_kwargs", BYTES, (1,), "a JSON object for the chat template", own=True),
)
ENGINE_INPUT = {tensor.name: tensor for tensor in ENGINE_INPUTS}


def _to_engine(names: str) -> tuple[Tensor, ...]:
    """Return these inputs of the engine as outputs of the stage before it."""
    return tuple(replace(ENGINE_INPUT[name], reshape=False, ragged=False) for name in names.split())


TOKENIZER_OUTPUTS = _to_engine(
    "input_ids input_lengths request_output_len end_id pad_id bad_words_list embedding_bias "
    "end_ids stop_strings heartbeat trace_context"
)
UPSTREAM_TOKENIZER_OUTPUTS = _to_engine(
    "input_ids input_lengths request_output_len end_id pad_id stop_words_list bad_words_list embedding_bias "
    "runtime_top_k runtime_top_p temperature seed exclude_input_in_output "
    "return_num_input_tokens return_num_output_tokens return_perf_metrics"
)
"""Before upstream's C++ backend the tokenizer sends what that one has, and reads every input of the client's: it is the
only stage of ours that can refuse one by name."""

ENGINE_NAME_OF = {
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "length_penalty": "len_penalty",
    "stream": "streaming",
}
"""The ensemble inputs that upstream's engine calls by another name."""

_PASSED_TO_ENGINE = (
    "num_return_sequences exclude_input_in_output top_k top_p temperature length_penalty repetition_penalty min_tokens "
    "presence_penalty frequency_penalty prompt_ignore_length seed return_log_probs return_context_logits "
    "return_generation_logits return_perf_metrics return_num_input_tokens return_num_output_tokens "
    "return_num_cached_tokens beam_width stream prompt_embedding_table "
    "prompt_vocab_size lora_task_id lora_weights lora_config guided_decoding_guide_type guided_decoding_guide "
    "guide_start_ids "
    "min_p num_top_log_probs num_prompt_log_probs log_prob_token_ids pooling ignore_eos final_perf_metrics priority "
    "deadline_ms client_id lora_name resumed_ids resumed_log_probs return_token_ids"
).split()
ENSEMBLE_INPUTS = (
    *TOKENIZER_INPUTS,
    *(replace(ENGINE_INPUT[ENGINE_NAME_OF.get(name, name)], name=name, reshape=False) for name in _PASSED_TO_ENGINE),
)
ENSEMBLE_OUTPUTS = DETOKENIZER_OUTPUTS

STAGES: dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = {
    ENSEMBLE: (ENSEMBLE_INPUTS, ENSEMBLE_OUTPUTS),
    TOKENIZER: (TOKENIZER_INPUTS, TOKENIZER_OUTPUTS),
    ENGINE: (ENGINE_INPUTS, ENGINE_OUTPUTS),
    DETOKENIZER: (DETOKENIZER_INPUTS, DETOKENIZER_OUTPUTS),
}
"""Model name to its inputs and outputs."""
