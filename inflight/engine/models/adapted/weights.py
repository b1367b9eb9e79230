"""Counts the weights of a model of transformers, after a dry run: its matrices, and how many parameters are none."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from inflight.engine.models.adapted.experts import PER_TOKEN
from inflight.engine.models.config import Matrix, OutlinedWeights


def outlined_weights(model: nn.Module) -> OutlinedWeights:
    """Return the weights of a model of transformers; ``model``: on the meta device, and called once.

    The matrices are those of ``nn.Linear`` and of GPT-2's ``Conv1D``, and each expert's where those of a layer are one
    tensor of three dimensions. Other matrices, such as routers', count with ``others``: they are small.
    """
    output = model.get_output_embeddings()  # type: ignore[operator]
    tables = {id(one.weight): one.weight.numel() for one in model.modules() if isinstance(one, nn.Embedding)}
    embedding = sum(tables.values())
    heads = 0 if output is None or id(output.weight) in tables else output.weight.numel()
    matrices = [one for name, module in model.named_modules() if module is not output for one in _of(name, module)]
    total = sum(one.numel() for one in model.parameters())  # a tied head comes once
    counted = sum(one.outputs * (one.inputs + one.bias) for one in matrices)
    return OutlinedWeights(tuple(matrices), embedding, heads, others=total - counted - embedding - heads)


def _of(name: str, module: nn.Module) -> Iterator[Matrix]:
    """Yield the matrices of one module."""
    from transformers.pytorch_utils import Conv1D

    if isinstance(module, nn.Linear):
        yield Matrix(name, module.in_features, module.out_features, module.bias is not None)
    elif isinstance(module, Conv1D):
        yield Matrix(name, module.nx, module.nf, bias=True)
    elif (per_token := getattr(module, PER_TOKEN, None)) is not None:
        for kind, stack in module.named_parameters(recurse=False):
            if stack.dim() == 3:
                count, rows, columns = stack.shape
                # Which of the two sizes are inputs makes no difference to bytes and work.
                yield from (Matrix(f"{name}.{index}.{kind}", columns, rows, False, per_token / count)
                            for index in range(count))  # fmt: skip
