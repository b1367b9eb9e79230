"""Measures what a quantized checkpoint lost beside the original: perplexity, divergence, exact answers, recall.

``Layers`` tells where: how far each layer's weights are off, and what restoring it would save.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from inflight.engine.models.layers import RmsNorm
from inflight.engine.quant.formats import E2M1_MAX, E4M3_MAX
from inflight.engine.scoring import Logits, Scorer
from inflight.export.data import DataSet, Example, Row, RowEncoder, as_texts
from inflight.export.stages import Journal, Progress, tracked
from inflight.text.tokenizer import Tokenizer

_SHARES = (0.25, 0.5, 0.9)
"""How much of the longest sequence the prompts fill."""
_PROBES, _PROBE_TOKENS = 8, 128
"""Examples that are used to look at single layers, the longest ones, and how many tokens of each."""
_AFTER_NORM = dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "attention_norm") | dict.fromkeys(
    ("gate_proj", "up_proj", "gate_up_proj"), "mlp_norm"
)
"""The model's name for the norm before a linear."""
_FEWEST = 10
"""Answers of the original's that a share is taken of: of three, one that tips over would be a third."""
KV_CACHE = "KV cache"
_LARGEST_CODE = {"FP8": E4M3_MAX, "W4A8_AWQ": E4M3_MAX, "NVFP4": E4M3_MAX * E2M1_MAX}
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
        """Exact answers, as a share of the original's number; None: it gives too few to compare."""
        return self.exact[1] / self.exact[0] if self.exact[0] >= _FEWEST else None

    @property
    def long_context_recall(self) -> float | None:
        """Recalled answers, as a share of the original's number; None: it recalls too few to compare."""
        return self.recalled[1] / self.recalled[0] if self.recalled[0] >= _FEWEST else None


def kl_divergence(original: Tensor, other: Tensor) -> Tensor:
    """Return the Kullback-Leibler divergence of each row of logits from the original's: ``[n]``, in nats."""
    p, q = original.log_softmax(-1), other.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def measure(
    original: Logits,
    quantized: Logits,
    examples: Sequence[Example],
    recall: Sequence[Example],
    end_ids: Collection[int],
    progress: Progress,
    journal: Journal,
) -> Quality:
    """Score both checkpoints on held-out examples, and on long prompts whose answer stands far back.

    Greedy decoding gives an answer exactly if, and only if, each of its tokens is the likeliest after the right ones
    before it: one pass over prompt and answer tells, and no text is generated. What the journal has is taken from it.
    """
    both = (original, quantized)
    rows = [
        journal.step(f"row {index}", partial(_compare, both, example, end_ids))
        for index, example in enumerate(tracked(examples, "comparing with the original", progress))
    ]
    recalled = [
        journal.step(f"recall {index}", partial(_recall, both, example, end_ids))
        for index, example in enumerate(tracked(recall, "recalling from long prompts", progress))
    ]
    positions = sum(row["positions"] for row in rows)
    before, after = (math.exp(sum(row["losses"][which] for row in rows) / positions) for which in (0, 1))
    return Quality(
        (before, after),
        sum(row["divergence"] for row in rows) / positions,
        [float(f"{row['divergence'] / row['positions']:.3g}") for row in rows],
        (sum(row["exact"][0] for row in rows), sum(row["exact"][1] for row in rows)),
        sum(bool(example.prompt) for example in examples),
        (sum(row[0] for row in recalled), sum(row[1] for row in recalled)),
        len(recall),
    )


def _compare(both: Sequence[Logits], example: Example, end_ids: Collection[int]) -> dict[str, Any]:
    """Return an example's sums of log-losses and of divergences, and whether greedy decoding gives it exactly."""
    first = max(1, len(example.prompt))  # of a plain text, the first token is given
    logits = [model.logits(example.tokens, first - 1).cpu() for model in both]
    targets = torch.tensor(example.tokens[first:])
    return {
        "positions": len(targets),
        "losses": [float(functional.cross_entropy(one[:-1], targets, reduction="sum")) for one in logits],
        "divergence": float(kl_divergence(logits[0][:-1], logits[1][:-1]).sum()),
        "exact": [bool(example.prompt) and _is_exact(one, example, end_ids) for one in logits],
    }


def _recall(both: Sequence[Logits], example: Example, end_ids: Collection[int]) -> list[bool]:
    """Return for each model whether greedy decoding gives the answer to a long prompt."""
    first = len(example.prompt) - 1
    return [_is_exact(model.logits(example.tokens, first), example, end_ids) for model in both]


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
class LayerError:
    """How far one decoder layer's numbers are from the original's."""

    layer: str
    worst_linear: str
    weight_error: float
    """The worst linear's error: the norm of the difference from the original's weight, relative to the norm of it."""
    range: float | None
    """The largest input, key or value that its scale keeps, as a multiple of the largest seen, where that is least:
    below 1, values are cut off. None: nothing but weights is quantized."""
    range_of: str
    """The linear whose inputs, or ``KV cache``."""


class Layers:
    """The decoder layers of both checkpoints, looked at one by one on a few tokens of the longest examples."""

    def __init__(self, original: Scorer, quantized: Scorer, examples: Sequence[Example]) -> None:
        """Compute the probes with the original; its largest keys and values are noted."""
        longest = sorted(examples, key=lambda one: len(one.tokens), reverse=True)[:_PROBES]
        self._original, self._quantized = original, quantized
        self._probes = [one.tokens[:_PROBE_TOKENS] for one in longest]
        largest = zip(*(original.kv_ranges(tokens) for tokens in self._probes), strict=True)
        self._keys, self._values = (torch.stack(found).amax(0) for found in largest)  # [layers] each
        self._names = [f"model.layers.{index}" for index in range(len(self._keys))]

    def errors(self) -> list[LayerError]:
        """Return how far each layer is from the original's, by its weights and by the ranges of its scales."""
        weights, ranges = weight_errors(self._original, self._quantized), _input_ranges(self._quantized, self._probes)
        scales, found = self._quantized.kv_scales, []
        for index, layer in enumerate(self._names):
            worst = max((name for name in weights if name.startswith(f"{layer}.")), key=weights.__getitem__)
            own = {name: value for name, value in ranges.items() if name.startswith(f"{layer}.")}
            if scales is not None and self._keys[index]:  # 0: the layer has no attention
                kept = min(scales.keys[index] / self._keys[index], scales.values[index] / self._values[index])
                own[KV_CACHE] = E4M3_MAX * float(kept)
            narrowest = min(own, key=own.__getitem__, default="")
            found.append(LayerError(layer, worst, weights[worst], own.get(narrowest), narrowest))
        return found

    def costs(self, progress: Progress, journal: Journal) -> dict[str, float]:
        """Return how much smaller the KL divergence is, in nats, with each layer as in the original; dearest first.

        A layer is put back as it is in the original, the scales of its cache too; the others stay quantized. The
        distributions are then that much closer to the original's.
        """
        expected = [self._original.logits(tokens) for tokens in self._probes]

        def divergence() -> float:
            rows = [
                kl_divergence(before, self._quantized.logits(tokens))
                for before, tokens in zip(expected, self._probes, strict=True)
            ]
            return float(torch.cat(rows).mean())

        def restored(index: int) -> float:
            layer = {self._names[index]: self._original.model.get_submodule(self._names[index])}
            scales = (self._keys[index] / E4M3_MAX, self._values[index] / E4M3_MAX)
            with self._quantized.replaced(layer), self._quantized.rescaled(index, *scales):
                return divergence()

        whole = journal.step("all layers", divergence)
        saved = {
            layer: whole - journal.step(layer, partial(restored, index))
            for index, layer in enumerate(tracked(self._names, "finding the layers that cost most", progress))
        }
        return dict(sorted(saved.items(), key=lambda one: -one[1]))


def _input_ranges(scorer: Scorer, probes: Sequence[Sequence[int]]) -> dict[str, float]:
    """Return for each linear that rounds its inputs the largest one it keeps, as a multiple of the largest it got."""
    largest: dict[str, float] = {}

    def note(name: str, linear: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        smoothed = inputs[0] if linear.pre_quant_scale is None else inputs[0] * linear.pre_quant_scale
        largest[name] = max(largest.get(name, 0.0), float(smoothed.abs().max()))

    rounding = {name: one for name, one in scorer.linears.items() if getattr(one, "input_scale", None) is not None}
    hooks = [one.register_forward_pre_hook(partial(note, name)) for name, one in rounding.items()]
    try:
        for tokens in probes if rounding else ():
            scorer.logits(tokens)
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

    AWQ moves scales from the weight into the norm before it, or into the linear's input; the product of
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
