"""What a quantized checkpoint lost beside the original: perplexity, divergence, exact answers, recall; and by layer.

A layer's cost is told by its weights, and by what restoring it would save.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.layers import RmsNorm
from inflight.engine.quant.formats import E2M1_MAX, E4M3_MAX
from inflight.engine.scoring import Scorer
from inflight.export.data import DataSet, Example, Row, RowEncoder, as_texts
from inflight.export.stages import Progress, tracked
from inflight.text.tokenizer import Tokenizer

_SHARES = (0.25, 0.5, 0.9)
"""How much of the longest sequence the prompts fill."""
_PROBES = 8
"""Examples that are used to find the layers; the longest ones."""
_AFTER_NORM = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "attention_norm") | dict.fromkeys(
    ("gate_proj", "up_proj", "gate_up_proj"), "mlp_norm"
)
"""The model's name for the norm before a linear."""
KV_CACHE = "KV cache"
_LARGEST_CODE = {"FP8": E4M3_MAX, "W4A8_AWQ": E4M3_MAX, "NVFP4": E4M3_MAX * E2M1_MAX, "W8A8_SQ_PER_CHANNEL": 127.0}
"""The largest multiple of ``input_scale`` that an input keeps, by scheme."""


@dataclass
class Quality:
    """The measurements over one set of examples; the original's and the quantized checkpoint's."""

    perplexity: tuple[float, float]
    """The perplexity of the completions, given their prompts."""
    kl_divergence: float
    """Mean over the completions' positions, of the quantized distribution from the original's, in nats."""
    kl_of_examples: list[float] = field(default_factory=list)
    """The mean of each example's positions."""
    exact: tuple[int, int] = (0, 0)
    """How many answers greedy decoding gives exactly."""
    asked: int = 0
    recalled: tuple[int, int] = (0, 0)
    """How many of the long prompts' answers it gives exactly."""
    recall_asked: int = 0

    @property
    def perplexity_increase(self) -> float:
        """The increase of the perplexity, as a fraction of the original's."""
        return self.perplexity[1] / self.perplexity[0] - 1

    @property
    def exact_match(self) -> float | None:
        """Exact answers, as a share of the original's number; None: it gives none."""
        return self.exact[1] / self.exact[0] if self.exact[0] else None

    @property
    def long_context_recall(self) -> float | None:
        """Recalled answers, as a share of the original's number; None: it recalls nothing."""
        return self.recalled[1] / self.recalled[0] if self.recalled[0] else None


def kl_divergence(original: Tensor, other: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each row of logits from the original's: ``[n]``, in nats."""
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measure(
    original: Scorer,
    quantized: Scorer,
    examples: Sequence[Example],
    recall: Sequence[Example],
    end_ids: Collection[int],
    progress: Progress,
) -> Quality:
    """Score both checkpoints on held-out examples, and on long prompts whose answer stands far back.

    Greedy decoding gives an answer exactly if, and only if, each of its tokens is the likeliest after the right ones
    before it: one pass over prompt and answer tells, and no text is generated.
    """
    losses, divergences, exact, positions = [0.0, 0.0], [], [0, 0], 0
    found = Quality((0.0, 0.0), 0.0, recall_asked=len(recall))
    for example in tracked(examples, "comparing with the original", progress):
        first = max(1, len(example.prompt))  # of a plain text, the first token is given
        both = [model.logits(example.tokens)[first - 1 :].cpu() for model in (original, quantized)]
        targets = torch.tensor(example.tokens[first:])
        for index, logits in enumerate(both):
            losses[index] += float(functional.cross_entropy(logits[:-1], targets, reduction="sum"))
            exact[index] += bool(example.prompt) and _is_exact(logits, example, end_ids)
        divergence = kl_divergence(both[0][:-1], both[1][:-1])
        divergences.append(float(divergence.sum()))
        found.kl_of_examples.append(float(f"{float(divergence.mean()):.3g}"))
        found.asked += bool(example.prompt)
        positions += len(targets)
    found.perplexity = (math.exp(losses[0] / positions), math.exp(losses[1] / positions))
    found.kl_divergence = sum(divergences) / positions
    found.exact = (exact[0], exact[1])
    recalled = [0, 0]
    for example in tracked(recall, "recalling from long prompts", progress):
        for index, model in enumerate((original, quantized)):
            recalled[index] += _is_exact(model.logits(example.tokens)[len(example.prompt) - 1 :], example, end_ids)
    found.recalled = (recalled[0], recalled[1])
    return found


def _is_exact(logits: Tensor, example: Example, end_ids: Collection[int]) -> bool:
    """Return whether greedy decoding gives the completion; in a chat, with its end.

    ``logits`` begin with the prompt's last token: ``[len(completion) + 1, vocab]``.
    """
    *likeliest, last = logits.argmax(-1).tolist()
    return likeliest == list(example.completion) and (not example.chat or not end_ids or last in end_ids)


def recall_examples(data: DataSet, tokenizer: Tokenizer, max_length: int, count: int) -> list[Example]:
    """Make prompts of many questions with their answers, that ask the first one again.

    The answer is in the prompt, at its beginning: a model repeats it if attention still reaches that far. ``count``
    prompts are made, in equal parts for each of ``_SHARES``; each has at most ``max_length`` tokens with its answer.
    """
    encoder, rows, rng = RowEncoder(tokenizer, max_length), data.answered(), random.Random(1)
    lengths = [len(encoder.encode(row).tokens) for row in rows]
    made = []
    for index in range(count if len(rows) > 1 else 0):
        asked, *others = rng.sample(range(len(rows)), len(rows))
        rest, taken = max_length * _SHARES[index % len(_SHARES)] - 2 * lengths[asked], [rows[asked]]
        for other in others:
            if lengths[other] > rest:
                break
            rest -= lengths[other]
            taken.append(rows[other])
        if len(taken) > 1:
            made.append(encoder.encode(_joined([*taken, rows[asked]])))
    return made


def _joined(rows: list[Row]) -> Row:
    """Return several questions and answers as one row; those of a mixed file are joined as prompts."""
    if all("messages" in row for row in rows):
        return {"messages": [message for row in rows for message in row["messages"]]}
    *before, (last, completion) = (as_texts(row) for row in rows)
    return {"prompt": "".join(f"{question}{answer}\n" for question, answer in before) + last, "completion": completion}


@dataclass(frozen=True)
class LayerCost:
    """What one decoder layer lost."""

    layer: str
    kl_saved: float
    """How much smaller the KL divergence is, in nats, with this layer as in the original."""
    worst_linear: str
    weight_error: float
    """The worst linear's error: the norm of the difference from the original's weight, relative to the norm of it."""
    range: float | None
    """The largest input, key or value that its scale keeps, as a multiple of the largest seen, where that is least:
    below 1, values are cut off. None: nothing but weights is quantized."""
    range_of: str
    """The linear whose inputs, or ``KV cache``."""


def layer_costs(
    original: Scorer, quantized: Scorer, examples: Sequence[Example], progress: Progress
) -> list[LayerCost]:
    """Return what each decoder layer costs, the dearest first.

    A layer is put back as it is in the original, the scales of its cache too; the others stay quantized. The
    distributions are then that much closer to the original's.
    """
    probes = sorted(examples, key=lambda one: len(one.tokens), reverse=True)[:_PROBES]
    expected = [original.logits(example.tokens) for example in probes]
    errors = weight_errors(original, quantized)

    def divergence() -> float:
        rows = [
            kl_divergence(before, quantized.logits(example.tokens))
            for before, example in zip(expected, probes, strict=True)
        ]
        return float(torch.cat(rows).mean())

    largest = zip(*(original.kv_ranges(example.tokens) for example in probes), strict=True)
    keys, values = (torch.stack(found).amax(0) for found in largest)  # [layers] each
    ranges = _input_ranges(quantized, probes)
    whole, costs = divergence(), []
    layers = [f"model.layers.{index}" for index in range(len(keys))]
    for index, layer in enumerate(tracked(layers, "finding the layers that cost most", progress)):
        restored = quantized.replaced({layer: original.model.get_submodule(layer)})
        with restored, quantized.rescaled(index, keys[index] / E4M3_MAX, values[index] / E4M3_MAX):
            saved = whole - divergence()
        worst = max((name for name in errors if name.startswith(f"{layer}.")), key=errors.__getitem__)
        own = {name: value for name, value in ranges.items() if name.startswith(f"{layer}.")}
        if (scales := quantized.kv_scales) is not None and keys[index]:  # 0: the layer has no attention
            kept = min(scales.keys[index] / keys[index], scales.values[index] / values[index])
            own[KV_CACHE] = E4M3_MAX * float(kept)
        narrowest = min(own, key=own.__getitem__, default="")
        costs.append(LayerCost(layer, saved, worst, errors[worst], own.get(narrowest), narrowest))
    return sorted(costs, key=lambda cost: -cost.kl_saved)


def _input_ranges(scorer: Scorer, probes: Sequence[Example]) -> dict[str, float]:
    """Return for each linear that rounds its inputs the largest one it keeps, as a multiple of the largest it got."""
    largest: dict[str, float] = {}

    def note(name: str, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        smoothed = inputs[0] if linear.pre_quant_scale is None else inputs[0] * linear.pre_quant_scale
        largest[name] = max(largest.get(name, 0.0), float(smoothed.abs().max()))

    rounding = {name: one for name, one in scorer.linears.items() if getattr(one, "input_scale", None) is not None}
    hooks = [one.register_forward_pre_hook(partial(note, name)) for name, one in rounding.items()]
    try:
        for example in probes:
            scorer.logits(example.tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return {
        name: float(one.input_scale) * _LARGEST_CODE[one.quant_algo] / largest[name]
        for name, one in rounding.items()
        if largest[name]  # nothing is cut off where nothing comes in
    }


@torch.inference_mode()
def weight_errors(original: Scorer, quantized: Scorer) -> dict[str, float]:
    """Return how far each linear's weight is from the original's: ``|W' - W| / |W|``, Frobenius norms.

    AWQ and SmoothQuant move scales from the weight into the norm before it, or into the linear's input; the product of
    both is compared.
    """
    errors = {}
    for name in quantized.linears:
        if ".layers." in name:
            expected, found = (scorer.weight(name) * _gain(scorer, name) for scorer in (original, quantized))
            errors[name] = float((found - expected).norm() / expected.norm())
    return errors


def _gain(scorer: Scorer, name: str) -> Tensor | float:
    """Return what a linear's inputs are multiplied by before it: ``[columns]``, or 1."""
    smoothed: Tensor | None = getattr(scorer.linears[name], "pre_quant_scale", None)
    gain = 1.0 if smoothed is None else smoothed.float()
    layer, last = scorer.model.get_submodule(".".join(name.split(".")[:3])), name.rpartition(".")[2]
    norm = getattr(layer, _AFTER_NORM.get(last, ""), None)
    return gain * norm.gain() if isinstance(norm, RmsNorm) else gain
