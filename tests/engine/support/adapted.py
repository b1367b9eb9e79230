"""Small random checkpoints of every causal language model of transformers, and what the adapter makes of them.

``python -m tests.engine.support.adapted`` writes ``tests/facts/adapted_architectures.json``.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRANSFORMERS_VERBOSITY"] = "critical"

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from inflight.engine.checkpoint import load_config
from inflight.errors import DeploymentError
from tests.engine.support.checkpoints import PROMPTS, VOCAB
from tests.engine.support.driving import ask, load, run

FACTS = Path(__file__).parents[2] / "facts" / "adapted_architectures.json"
COUNT = 12
PROMPTS_OF_ALL = PROMPTS[8:20]
"""Short and long, and some with a common beginning."""
_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": 0, "initializer_range": 0.15, "init_std": 0.15,
}  # fmt: skip
_MOST: dict[str, int] = {
    "num_experts": 12, "num_local_experts": 12, "n_routed_experts": 12, "moe_num_experts": 12,
    "num_experts_per_tok": 3, "moe_k": 3, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40, "shared_intermediate_size": 40, "dense_intermediate_size": 96,
    "q_lora_rank": 24, "kv_lora_rank": 16,
}  # fmt: skip
"""Where a type has more by itself, its small model has as many: with hundreds of experts it would take a gigabyte."""
_HEADS, _WINDOW = {"head_dim": 16}, {"sliding_window": 8}
_MIXED = _WINDOW | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]}
_LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}  # fmt: skip
_EXPERTS = {
    "num_experts_per_tok": 2, "n_routed_experts": 8, "moe_intermediate_size": 32, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1,
}  # fmt: skip
_CAPS = _HEADS | _WINDOW | {"attn_logit_softcapping": 0.7, "final_logit_softcapping": 1.5}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_DECODER = {"is_decoder": True}
_PER_LAYER = {
    "head_dim": 16,
    "sliding_window": 8,
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": VOCAB,
}
_GEMMA4 = _PER_LAYER | {
    "global_head_dim": 32, "num_kv_shared_layers": 0,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
}  # fmt: skip
SPECIAL: dict[str, dict[str, Any]] = {
    "axk1": {"num_key_value_heads": 4, "initializer_range": 0.08},
    "beam": _HEADS,
    "codegen": {"rotary_dim": 8},
    "cohere2": _WINDOW,
    "cohere_compass_text": _HEADS | {"rope_parameters": {"full_attention": _ROPE}},
    "cwm": _HEADS | {"bos_token_id": 0, "eos_token_id": 0},
    "deepseek_v2": _LATENT | _EXPERTS | {"n_routed_experts": 4},
    "deepseek_v3": _LATENT | _EXPERTS,
    "dots1": _HEADS | _EXPERTS | {"n_shared_experts": 1},
    "ernie4_5": _HEADS,
    "exaone4": _MIXED,
    "gemma2": _CAPS,
    "gemma3_text": _HEADS | _WINDOW,
    "gemma3n_text": _PER_LAYER | {
        "num_kv_shared_layers": 1, "num_hidden_layers": 5, "intermediate_size": [96] * 5,
        "activation_sparsity_pattern": [0.0] * 5, "laurel_rank": 8, "altup_num_inputs": 2,
        "layer_types": [
            "sliding_attention", "sliding_attention", "full_attention", "sliding_attention", "full_attention",
        ],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _HEADS | _MIXED | {"global_head_dim": 32, "num_kv_shared_layers": 0},
    "gemma4_assistant": {
        "text_config": _SMALL | _GEMMA4 | {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0},
    },
    "glm": _HEADS,
    "glm4": _HEADS,
    "glm4_moe_lite": _LATENT | _EXPERTS,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "num_layers": 4, "num_hidden_layers": 4},
    "gpt_oss": _HEADS | _WINDOW | {"num_local_experts": 6, "num_experts_per_tok": 3},
    "helium": _HEADS,
    "hunyuan_v1_dense": _HEADS,
    "hunyuan_v1_moe": _HEADS | {"num_experts": 4, "moe_topk": 2},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "minicpm3": _LATENT,
    "ministral": _HEADS | _WINDOW,
    "mistral": _WINDOW,
    "mixtral": _WINDOW | {"num_local_experts": 4},
    "modernbert-decoder": {
        "bos_token_id": 0, "eos_token_id": 0, "cls_token_id": 0, "sep_token_id": 0, "local_attention": 8,
    },
    "olmo3": _MIXED,
    "qwen2": {"initializer_range": 0.2},
    "qwen3": {"head_dim": 32},
    "seed_oss": _HEADS | {"initializer_range": 0.2},
    "smollm3": _WINDOW | {"use_sliding_window": True, "no_rope_layers": [1, 0, 1]},
    "starcoder2": _WINDOW | {"use_bias": True},
    "vaultgemma": _CAPS,
    "youtu": _LATENT,
    **dict.fromkeys(
        ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
         "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "big_bird"),
        _DECODER,
    ),
    "xmod": _DECODER | {"default_language": "en_XX"},
    "reformer": _DECODER,
}  # fmt: skip
"""What a small model of a type needs beside ``_SMALL``: sizes that fit each other, and options worth a look."""


class Verdict(NamedTuple):
    """What became of one class."""

    served: bool
    why: str
    """Why it is refused; empty if it is served."""


def all_types() -> dict[str, str]:
    """Return the type of the configuration of each class; those of models with images come as their text types."""
    kinds: dict[str, list[str]] = {}
    for kind, name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        if not name.endswith("ForConditionalGeneration"):
            kinds.setdefault(name, []).append(kind)
    own = {name: min(of, key=lambda kind: (not kind.endswith("_text"), len(kind))) for name, of in kinds.items()}
    return {kind: name for name, kind in sorted(own.items())}


@functools.cache
def small_checkpoint(kind: str) -> Path:
    """Write a small random checkpoint of a type, without weights if the model cannot be built; return where."""
    directory = Path(_folder().name) / kind
    config = _config(kind)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind]]
    try:
        load_config(_saved(config, directory), "transformers")
    except DeploymentError:
        return directory
    torch.manual_seed(sum(map(ord, kind)))
    config._attn_implementation = "eager"
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    _vary(model)
    model.save_pretrained(directory)
    return directory


def _saved(config: Any, directory: Path) -> Path:
    config.save_pretrained(directory)
    return directory


def _config(kind: str) -> Any:
    """Return a small configuration; where small sizes do not fit, the type's own."""
    made = transformers.CONFIG_MAPPING[kind]
    special = SPECIAL.get(kind)
    try:
        known = made()
        fewer = {name: most for name, most in _MOST.items() if (getattr(known, name, None) or 0) > most}
        small = {name: value for name, value in _SMALL.items() if hasattr(known, name)} | fewer
        return made(**small | (special or {}))
    except Exception:
        if special is None:
            return made()
        return made(**_SMALL | special)


def _vary(model: Any) -> None:
    """Shake norms, biases and what else is one number per channel: all ones or zeros would hide mistakes."""
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point() and (tensor.dim() == 1 or "bias" in name):
                tensor += 0.3 * torch.randn_like(tensor)
        if model.config.tie_word_embeddings:
            model.get_input_embeddings().weight *= 0.1


@functools.cache
def small_reference(kind: str) -> Any:
    """Return the checkpoint as transformers loads it, float32, plain attention."""
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(transformers.AutoConfig.from_pretrained(small_checkpoint(kind)))]
    return model.from_pretrained(small_checkpoint(kind), dtype=torch.float32, attn_implementation="eager").eval()


def likeliest(model: Any, prompt: list[int], output: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return what transformers finds likeliest in place of each token of an output, and log-probs ``[tokens, vocab]``.

    An output that it would not generate differs at its first such token.
    """
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *output]]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    return logits.argmax(-1).tolist(), logits.float().log_softmax(-1)


def judge(kind: str, device: str = "cpu") -> Verdict:
    """Serve a small model of a type, mixed, chunked, preempted and reused, and compare each token with transformers'.

    Raises:
        AssertionError: it is served, and differs.
    """
    directory = small_checkpoint(kind)
    try:
        engine = load(
            directory, modeling="transformers", device=device, num_blocks=32, max_tokens_per_step=24,
            policy="max_utilization",
        )  # fmt: skip
    except DeploymentError as error:
        return Verdict(False, re.sub(r"\d\.\de-\d+", "N", str(error).replace(str(directory), "DIRECTORY")))
    reference = small_reference(kind)
    requests = [ask(prompt, COUNT, log_probs=True, ignore_eos=True) for prompt in PROMPTS_OF_ALL]
    outputs = run(engine, requests)
    for request in requests:
        output = outputs[request.key]
        expected, log_probs = likeliest(reference, request.prompt, output.tokens)
        assert output.tokens == expected, f"{kind}: prompt of {len(request.prompt)} tokens"
        chosen = log_probs.gather(-1, torch.tensor(output.tokens)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(output.log_probs), chosen, atol=1e-4, rtol=0)
    return Verdict(True, "")


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="inflight-adapted-")


def main() -> None:
    """Judge all types, or those that are named, and write the facts."""
    facts = json.loads(FACTS.read_text()) if FACTS.exists() and len(sys.argv) > 1 else {}
    facts.pop("transformers", None)
    types = all_types()
    for kind in sys.argv[1:] or types:
        try:
            verdict = judge(kind)
        except Exception as error:
            print("WRONG", kind, types[kind], type(error).__name__, " ".join(str(error).split())[:200], flush=True)
            continue
        print("served" if verdict.served else "refused", kind, verdict.why[:200], flush=True)
        facts[types[kind]] = {"type": kind, "served": verdict.served, "why": verdict.why}
        kept = {"transformers": transformers.__version__, **dict(sorted(facts.items()))}
        FACTS.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
