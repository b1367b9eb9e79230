"""The demo checkpoint as transformers computes it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import transformers

from inflight.resources import DEMO
from inflight.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_checkpoint(DEMO / "model")


@functools.cache
def model() -> Any:
    """Return the model, in float32."""
    return transformers.AutoModelForCausalLM.from_pretrained(DEMO / "model", dtype=torch.float32).eval()


def ids_of(text: str, special: bool = True) -> list[int]:
    """Return a text's token ids."""
    return list(TOKENIZER.encode_batch([text], add_special_tokens=special)[0])


@torch.inference_mode()
def next_log_probs(prompt: Sequence[int]) -> torch.Tensor:
    """Return the log-probs ``[vocab]`` of the token behind a prompt."""
    log_probs: torch.Tensor = model()(torch.tensor([list(prompt)])).logits[0, -1].log_softmax(-1)
    return log_probs


@torch.inference_mode()
def states(prompt: Sequence[int]) -> torch.Tensor:
    """Return the last hidden states ``[tokens, hidden]`` of a prompt, float64."""
    made: torch.Tensor = model().model(torch.tensor([list(prompt)])).last_hidden_state[0].double()
    return made
