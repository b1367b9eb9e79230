"""A program: reads checkpoints with whichever transformers it finds, and writes what each says to a fixed input.

    python read_checkpoints.py OUTPUT < DIRECTORIES

It takes the directories from its input, one a line, so that it loads PyTorch while they are still being made.
Of a quantized checkpoint the configuration is taken, and the weights from ``decoded.safetensors`` beside it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file

LENGTH = 400
Found = dict[str, dict[str, object]]
"""By directory: the older names of the rotary embedding, where there are such, and the logits."""
_NAMES = ("rope_theta", "rope_scaling", "rope_local_base_freq", "partial_rotary_factor", "torch_dtype")


def understand(directories: Iterable[str | Path]) -> Found:
    """Return what this transformers makes of checkpoints; under "", its version."""
    transformers.logging.set_verbosity_error()
    found: Found = {"": {"version": transformers.__version__}}
    for directory in map(str, directories):
        config = transformers.AutoConfig.from_pretrained(directory)
        weights = Path(directory, "decoded.safetensors")
        if weights.is_file():
            del config.quantization_config
        state = load_file(weights if weights.is_file() else Path(directory, "model.safetensors"))
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
            raise ValueError(f"{directory}: {missing} are missing, {unexpected} unexpected")
        model.tie_weights()
        length = min(LENGTH, config.max_position_embeddings)
        ids = torch.randint(1, config.vocab_size, (1, length), generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits[0].clone()
        found[directory] = {name: str(getattr(config, name, None)) for name in _NAMES} | {"logits": logits}
    return found


if __name__ == "__main__":
    torch.save(understand(sys.stdin.read().splitlines()), sys.argv[1])
