"""The table of what a checkpoint says in several places, and the line by which a start tells what does not count.

Readers of checkpoints settle each fact as its row says, and call ``overruled`` where the losing place says something
else; a test builds a checkpoint for each row. The rules are those of ``transformers`` 5. A row that differs says why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)


class Fact(NamedTuple):
    """A thing that a checkpoint or a GGUF file may say more than once."""

    places: tuple[str, ...]
    """Places where it may stand; an earlier one wins over a later one."""
    rule: str
    """How the places are settled, in words."""
    why: str


_GENERATION, _CONFIG, _TOKENIZER = "generation_config.json", "config.json", "tokenizer_config.json"
FACTS: dict[str, Fact] = {
    "output head": Fact(
        ("tensors `lm_head.*`", f"`tie_word_embeddings` of {_CONFIG}"),
        "A head in the file is the model's, unless it equals the embedding; without one, `true` ties the two.",
        "A fine-tune may train the head and leave the old `true` in place.",
    ),
    "names of tensors": Fact(
        ("the prefix of `embed_tokens.weight`", f"`architectures` of {_CONFIG}"),
        "Tensors are found with and without `model.`; `Qwen3Model` is the backbone of `Qwen3ForCausalLM`.",
        "Embedding models are published as backbones. One that has no head gives embeddings and no text.",
    ),
    "architecture": Fact(
        (f"`model_type` of {_CONFIG}", f"`architectures` of {_CONFIG}"),
        "`model_type` names the model's code, where Inflight knows it.",
        "transformers chooses the code by `model_type` alone.",
    ),
    "type of the weights": Fact(
        (f"`dtype` of {_CONFIG}", f"`torch_dtype` of {_CONFIG}", f"`dtype` of `text_config` in {_CONFIG}"),
        "The newer name wins over the older one, and what stands outside over what a text part says.",
        "transformers reads them in this order.",
    ),
    "quantization": Fact(
        (f"`quantization_config` of {_CONFIG}", "hf_quant_config.json"),
        "hf_quant_config.json counts where `quantization_config` is absent, or says `modelopt` too.",
        "ModelOpt writes both; other formats are described by `quantization_config` alone.",
    ),
    "rotary embedding": Fact(
        (f"`rope_scaling` of {_CONFIG}", f"`rope_parameters` of {_CONFIG}"),
        "`rope_scaling`, the older spelling, wins as a whole.",
        "transformers takes a `rope_scaling` in place of `rope_parameters`: who stretches a context by hand adds it.",
    ),
    "base of the rotary embedding": Fact(
        ("`rope_theta` within the rotary parameters", f"`rope_theta` of {_CONFIG}"),
        "The one within wins.",
        "transformers only fills it in where it is missing.",
    ),
    "type of the rotary embedding": Fact(
        ("`rope_type` of the rotary parameters", "`type` of the rotary parameters"),
        "The newer name wins.",
        "transformers only fills it in where it is missing.",
    ),
    "length before scaling": Fact(
        (f"`original_max_position_embeddings` of {_CONFIG}", "the same within the rotary parameters"),
        "The one outside wins, unless kinds of layers have parameters of their own.",
        "transformers overwrites the one within.",
    ),
    "longest sequence": Fact(
        (f"`max_position_embeddings` of {_CONFIG}", f"`model_max_length` of {_TOKENIZER}"),
        "The model's own length counts.",
        "A tokenizer's length cuts training rows. `limits.max_sequence_length` of a deployment sets a shorter one.",
    ),
    "end ids": Fact(
        (f"`eos_token_id` of {_GENERATION}", f"`eos_token_id` of {_CONFIG}", "`eos_token` of the tokenizer's files"),
        "All of them end an answer; of the later places, only tokens that the tokenizer calls special. So do special "
        "tokens whose names say so (`<|im_end|>`, `<|eot_id|>`, …), as llama.cpp has it.",
        "Here Inflight differs from transformers, which takes the first place alone: fine-tunes for chat often change "
        "one file of three, and then run on past the end of an answer. A GGUF file of the model ends alike.",
    ),
    "padding": Fact(
        (f"`pad_token_id` of {_GENERATION}", f"`pad_token_id` of {_CONFIG}", "`pad_token` of the tokenizer's files"),
        "The first place that names a token of the vocabulary; else an end id.",
        "It fills tensors and changes no answer.",
    ),
    "special tokens": Fact(
        (f"{_TOKENIZER}", "special_tokens_map.json"),
        f"{_TOKENIZER} wins if it has `added_tokens_decoder`; else special_tokens_map.json does.",
        "transformers reads the older file only beside a settings file from before `added_tokens_decoder`.",
    ),
    "beginning and end of a text": Fact(
        ("`post_processor` of tokenizer.json", f"`add_bos_token` and `add_eos_token` of {_TOKENIZER}"),
        "tokenizer.json says which special tokens a text begins and ends with.",
        "transformers drops both flags where there is a tokenizer.json.",
    ),
    "chat template": Fact(
        ("chat_template.jinja", "additional_chat_templates/", f"`chat_template` of {_TOKENIZER}", "chat_template.json"),
        "Files of templates win over entries of the same name; `tool_use` is taken where tools are given.",
        "As transformers has it, but for one thing: a file beside them does not hide the other names.",
    ),
    "sampling defaults": Fact(
        (_GENERATION, f"the same fields in {_CONFIG}"),
        f"{_CONFIG} counts where there is no {_GENERATION}.",
        "transformers reads them from there for checkpoints from before that file.",
    ),
    "GGUF: tokenizer": Fact(
        ("tokenizer.json beside the file", "`tokenizer.ggml.*`"),
        "A tokenizer.json in the same folder wins, with the files that go with it.",
        "Whoever puts it there means it; tokenizers of kinds that the metadata cannot describe are served so.",
    ),
    "GGUF: end ids": Fact(
        ("`eos_token_id`, `eot_token_id` and `eom_token_id` of `tokenizer.ggml`", "tokens named as ends of a turn"),
        "All of them end an answer.",
        "llama.cpp's rule; files name one or two of a model's.",
    ),
    "GGUF: vocabulary": Fact(
        ("rows of `token_embd.weight`", "`vocab_size` of the architecture", "`tokenizer.ggml.tokens`"),
        "The rows count.",
        "They are what the model can look up.",
    ),
    "GGUF: sampling defaults": Fact(
        ("`general.sampling.*`",),
        "They are the checkpoint's, as generation_config.json would give them.",
        "llama.cpp's conversion writes them from that file, and its programs sample so.",
    ),
}  # fmt: skip
"""All facts by name, as messages and docs/checkpoints.md have it."""


def overruled(fact: str, taken: str, other: str, said: object) -> None:
    """Log that a place of a checkpoint says something that does not count.

    Args:
        fact: of ``FACTS``.
        taken: the place that counts, and what it says.
        other: the place that does not.
        said: what that says.
    """
    assert fact in FACTS, fact
    log.warning("%s: %s counts; %s says %.120r, which does not (docs/checkpoints.md)", fact, taken, other, said)


def first_said(fact: str, said: Mapping[str, T], shown: Callable[[T], str]) -> T:
    """Return what the first place says, and log the other places that say something else.

    Args:
        fact: of ``FACTS``.
        said: what each place says, the one that wins first; one at least.
        shown: writes what counts for the log.
    """
    winner, chosen = next(iter(said.items()))
    for place, value in said.items():
        if value != chosen:
            overruled(fact, f"{shown(chosen)} of {winner}", place, value)
    return chosen
