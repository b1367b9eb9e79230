"""Writes the model repository's pbtxt files from the contract: ``python scripts/write_pbtxt.py [DIRECTORY]``.

The files are complete, so that the server starts with auto-completion off, and static: nothing in them depends on the
deployment. What does (decoupled or not, which engine) is a variant of the file, chosen with ``--model-config-name``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

from inflight.contract import (
    DETOKENIZER,
    ENGINE,
    ENGINE_NAME_OF,
    ENSEMBLE,
    ENSEMBLE_INPUTS,
    MAX_BATCH_SIZE,
    STAGES,
    TENSORRTLLM,
    TOKENIZER,
    TOKENIZER_INPUTS,
    UPSTREAM_DETOKENIZER_INPUTS,
    UPSTREAM_DETOKENIZER_OUTPUTS,
    UPSTREAM_TOKENIZER_OUTPUTS,
    Tensor,
)
from inflight.serve.repository import DEFAULT_VARIANT

HEADER = "# Written from inflight/contract.py by `make contract`; a test holds it equal. Do not edit.\n"


@dataclass(frozen=True)
class Variant:
    """What a variant of the model repository sets."""

    engine_backend: str
    decoupled: bool
    """Whether a request may have several responses; otherwise it has exactly one."""

    @property
    def upstream(self) -> bool:
        """Whether the engine's backend is upstream's, which knows upstream's tensors only."""
        return self.engine_backend == TENSORRTLLM

    def stage(self, model: str) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Return the inputs and outputs of ``model`` in this variant."""
        inputs, outputs = STAGES[model]
        if not self.upstream:
            return inputs, outputs
        if model == TOKENIZER:
            return ENSEMBLE_INPUTS, UPSTREAM_TOKENIZER_OUTPUTS
        if model == ENGINE:
            return tuple(one for one in inputs if not one.own), tuple(one for one in outputs if not one.own)
        if model == DETOKENIZER:
            return UPSTREAM_DETOKENIZER_INPUTS, UPSTREAM_DETOKENIZER_OUTPUTS
        return inputs, outputs


VARIANTS = {
    DEFAULT_VARIANT: Variant("inflight_engine", decoupled=True),
    "unary": Variant("inflight_engine", decoupled=False),
    "trtllm": Variant("trtllm_engine", decoupled=True),
    "trtllm_unary": Variant("trtllm_engine", decoupled=False),
    "tensorrtllm": Variant(TENSORRTLLM, decoupled=True),
    "tensorrtllm_unary": Variant(TENSORRTLLM, decoupled=False),
}
_TOKENIZERS_OWN = {tensor.name for tensor in TOKENIZER_INPUTS}
"""Inputs that end at the tokenizer."""
_UPSTREAM_REQUIRES = ("input_lengths", "request_output_len")
"""Inputs that are not optional where upstream's backend reads them."""
_ONE_INSTANCE = "instance_group [ { count: 1 kind: KIND_CPU } ]\n"
_DECOUPLED = "model_transaction_policy { decoupled: true }\n"


def render(model: str, name: str = DEFAULT_VARIANT) -> str:
    """Return the complete pbtxt text of ``model`` in the variant of this name."""
    variant = VARIANTS[name]
    backend = variant.engine_backend if model == ENGINE else model
    parts = [HEADER, f'name: "{model}"\n']
    parts.append('platform: "ensemble"\n' if model == ENSEMBLE else f'backend: "{backend}"\n')
    parts.append(f"max_batch_size: {MAX_BATCH_SIZE}\n")
    inputs, outputs = variant.stage(model)
    if not variant.upstream:
        # A batch of no rows of such an input passes Triton's checks of sizes, and its Python backend crashes (2.51).
        inputs = tuple(replace(tensor, reshape=False) for tensor in inputs)
    required = _UPSTREAM_REQUIRES if model == ENGINE and variant.upstream else ()
    parts += [_tensors("input", inputs, required), _tensors("output", outputs)]
    parts.append(_steps(variant) if model == ENSEMBLE else _ONE_INSTANCE)
    # No stage has a dynamic batcher: for one raw string that is shorter than its length says, Triton's Python backend
    # (2.51) fails all requests of a batch. Where upstream's backend serves, the engine batches, as with upstream.
    if model in (ENGINE, DETOKENIZER) and variant.decoupled:
        parts.append(_DECOUPLED)
    return "".join(parts)


def files() -> dict[str, str]:
    """Return every file of the model repository, by path relative to it, with its text.

    A model has a file for each variant in which it differs. To the engine's files for upstream's backend
    ``inflight.serve.repository`` adds what depends on the deployment.
    """
    texts = {f"{model}/1/.gitkeep": "" for model in STAGES}
    for model in STAGES:
        default = texts[f"{model}/config.pbtxt"] = render(model)
        for name in VARIANTS:
            if (text := render(model, name)) != default:
                texts[f"{model}/configs/{name}.pbtxt"] = text
    return texts


def write(directory: Path) -> None:
    """Write the model repository into ``directory``."""
    for name, text in files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def _tensors(kind: str, tensors: tuple[Tensor, ...], required: tuple[str, ...] = ()) -> str:
    lines = (_tensor(tensor, optional=kind == "input" and tensor.name not in required) for tensor in tensors)
    return f"{kind} [\n" + ",\n".join(f"  {line}" for line in lines) + "\n]\n"


def _tensor(tensor: Tensor, optional: bool) -> str:
    dtype = "STRING" if tensor.dtype == "BYTES" else tensor.dtype
    text = f'name: "{tensor.name}" data_type: TYPE_{dtype} dims: [ {", ".join(map(str, tensor.dims))} ]'
    if tensor.reshape:
        text += " reshape: { shape: [ ] }"
    if optional:
        text += " optional: true"
        if tensor.ragged:
            text += " allow_ragged_batch: true"
    return f"{{ {text} }}"


def _steps(variant: Variant) -> str:
    """The wiring: client's tensors keep their names; a tensor between stages is called ``_name``."""
    tokenizer_inputs, tokenizer_outputs = variant.stage(TOKENIZER)
    engine_inputs, engine_outputs = variant.stage(ENGINE)
    detokenizer_inputs, detokenizer_outputs = STAGES[DETOKENIZER]
    to_engine = {tensor.name: f"_{tensor.name}" for tensor in tokenizer_outputs}
    takes = {tensor.name for tensor in engine_inputs if not variant.upstream or tensor.served(TENSORRTLLM)}
    of_client = {ENGINE_NAME_OF.get(one.name, one.name): one.name for one in ENSEMBLE_INPUTS}
    from_client = {
        name: client
        for name, client in of_client.items()
        if name in takes and name not in to_engine and client not in _TOKENIZERS_OWN
    }
    from_engine = {tensor.name: f"_{tensor.name}" for tensor in engine_outputs if tensor in detokenizer_inputs}
    steps = [
        _step(TOKENIZER, {tensor.name: tensor.name for tensor in tokenizer_inputs}, to_engine),
        _step(ENGINE, to_engine | from_client, from_engine),
        _step(DETOKENIZER, from_engine, {tensor.name: tensor.name for tensor in detokenizer_outputs}),
    ]
    return "ensemble_scheduling {\n  step [\n" + ",\n".join(steps) + "\n  ]\n}\n"


def _step(model: str, inputs: dict[str, str], outputs: dict[str, str]) -> str:
    maps = [f'input_map {{ key: "{key}" value: "{value}" }}' for key, value in inputs.items()]
    maps += [f'output_map {{ key: "{key}" value: "{value}" }}' for key, value in outputs.items()]
    lines = "\n".join(f"      {line}" for line in maps)
    return f'    {{\n      model_name: "{model}"\n      model_version: -1\n{lines}\n    }}'


if __name__ == "__main__":
    write(Path(sys.argv[1] if len(sys.argv) > 1 else "model_repository"))
