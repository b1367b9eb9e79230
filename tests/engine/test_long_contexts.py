"""Contexts of 131,072 tokens: what scales the rotary embedding does what transformers does, at the far end of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from inflight.engine.models.rope import RotaryEmbedding
from inflight.engine.request import Output
from inflight.errors import DeploymentError, InvalidRequest
from tests.engine.support.checkpoints import VOCAB, checkpoint, vary
from tests.engine.support.driving import ask, load, run

LONGEST, PROMPT, BLOCK, ORIGINAL = 131_072, 131_000, 64, 4096
_SIZE: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1,
    "num_key_value_heads": 1, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0,
    "tie_word_embeddings": False, "max_position_embeddings": LONGEST,
}  # fmt: skip
ROPES: dict[str, tuple[str, dict[str, Any]]] = {
    "yarn": (
        "Llama",
        {"rope_parameters": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": ORIGINAL}},
    ),
    "longrope": (
        "Phi3",
        {
            "original_max_position_embeddings": ORIGINAL,
            "rope_parameters": {
                "rope_type": "longrope",
                "short_factor": [1.0] * 8,
                "long_factor": [1.0 + 4.0 * place for place in range(8)],
                "original_max_position_embeddings": ORIGINAL,
            },
        },
    ),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}, "max_position_embeddings": ORIGINAL},
    ),
}


def _write(name: str, directory: Path) -> None:
    kind, special = ROPES[name]
    config = getattr(transformers, f"{kind}Config")(**(_SIZE | special))
    config.rope_parameters["rope_theta"] = 10_000.0
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    vary(model)
    model.save_pretrained(directory)


def _last_query(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
    """Attention of the last token alone: with one layer, the others' make no difference to its logits."""
    attended, weights = sdpa_attention_forward(
        module, query[:, :, -1:], key, value, None, **(options | {"is_causal": False})
    )
    return attended.expand(-1, query.shape[2], -1, -1), weights


@torch.inference_mode()
def _expected(directory: Path, prompt: list[int]) -> Tensor:
    """Return the log-probs ``[vocab]`` behind a prompt by transformers, with frequencies for the longest sequence."""
    transformers.AttentionInterface.register("last_query", _last_query)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, attn_implementation="last_query").eval()
    rotary = model.model.rotary_emb
    frequencies, _ = ROPE_INIT_FUNCTIONS[rotary.rope_type](model.config, torch.device("cpu"), seq_len=LONGEST)
    rotary.register_buffer("inv_freq", frequencies, persistent=False)
    rotary.max_seq_len_cached = LONGEST  # it keeps those of the longest sequence so far
    logits: Tensor = model(torch.tensor([prompt]), logits_to_keep=1, use_cache=False).logits
    return logits[0, -1].log_softmax(-1)


def _check(output: Output, expected: Tensor) -> None:
    assert output.log_probs is not None
    assert output.generation_logits is not None
    got = torch.as_tensor(output.generation_logits[0]).log_softmax(-1)
    assert output.tokens[0] == expected.argmax()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert output.log_probs[0] == pytest.approx(expected.max().item(), abs=1e-4)


@pytest.mark.sweep(most=1)
@pytest.mark.proof
@pytest.mark.parametrize("name", ROPES)
def test_the_end_of_a_long_prompt_is_that_of_transformers(name: str, tmp_path: Path) -> None:
    """In 64 chunks; then with another end behind the same beginning, which is reused."""
    _write(name, tmp_path)
    prompt = torch.randint(1, VOCAB, (PROMPT,), generator=torch.Generator().manual_seed(1)).tolist()
    other = [*prompt[:-10], *range(1, 11)]
    engine = load(
        tmp_path, block_size=BLOCK, num_blocks=LONGEST // BLOCK + 4, max_sequence_length=LONGEST,
        max_tokens_per_step=2048, max_batch_size=2,
    )  # fmt: skip
    for asked, reused in ((prompt, 0), (other, (PROMPT - 10) // BLOCK * BLOCK)):
        request = ask(asked, 1, log_probs=True, generation_logits=True, ignore_eos=True)
        output = run(engine, [request])[request.key]
        _check(output, _expected(tmp_path, asked))
        assert output.metrics is not None
        assert output.metrics.cached_tokens == reused
        assert reused or output.metrics.prefill_steps >= PROMPT // 2048
    with pytest.raises(InvalidRequest, match="the prompt length .131072 tokens. exceeds the limit; prompt and output"):
        engine.validate(ask([1] * LONGEST, 1))


KINDS: dict[str, dict[str, Any]] = {
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": ORIGINAL,
    },
    "yarn": {"factor": 40.0, "original_max_position_embeddings": ORIGINAL},
    "longrope": {
        "short_factor": [1.0] * 48, "long_factor": [1.0 + 3.7 * place for place in range(48)],
        "original_max_position_embeddings": ORIGINAL,
    },
    "dynamic": {"factor": 3.3},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("theta", [1e4, 5e5])
def test_frequencies_are_those_of_transformers_to_the_last_bit(kind: str, theta: float) -> None:
    """At position 131,072 the last bit of a frequency moves a key by as much as tokens depend on."""
    rope = KINDS[kind] | {"rope_type": kind, "rope_theta": theta}
    length = ORIGINAL if kind == "dynamic" else LONGEST
    config = transformers.LlamaConfig(
        hidden_size=96, num_attention_heads=1, num_key_value_heads=1, max_position_embeddings=length,
        rope_parameters=dict(rope), original_max_position_embeddings=ORIGINAL,
    )  # fmt: skip
    frequencies, scale = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=LONGEST)
    ours = RotaryEmbedding(rope, 96, length, LONGEST)
    assert torch.equal(ours.frequencies, frequencies)
    assert ours.scale == pytest.approx(scale)


def test_no_more_is_served_than_the_model_was_made_for() -> None:
    with pytest.raises(DeploymentError) as error:
        load(checkpoint("llama, yarn"), max_sequence_length=513)
    assert str(error.value) == (
        "limits.max_sequence_length is 513; LlamaForCausalLM was made for 512 tokens (max_position_embeddings in its "
        "config.json)"
    )
