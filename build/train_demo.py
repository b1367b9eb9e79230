"""Train the demo model: a tiny chat model about LLM serving that calls tools, for `deployments/demo/model`.

    python build/train_demo.py                 a model like the committed one, in the default number of steps
    python build/train_demo.py --minutes 3     as many steps as fit; prints the --steps that repeat it
    python build/train_demo.py --start-from deployments/demo/model     goes on with it, after a change of its lessons

Seeded: the same steps on the same machine give the same weights. It needs torch, tokenizers, safetensors, Jinja2 and
PyYAML, not the `inflight` package, and it writes a standard Hugging Face folder.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from demo.conversation import Segment
from demo.copying import Copying
from demo.evaluate import evaluate, print_table
from demo.lessons import Lessons, load_lessons
from demo.llama import Llama, LlamaConfig
from demo.tokenizer import END_OF_TEXT, PAD, TURN_END, save_tokenizer, train_tokenizer
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

ROOT = Path(__file__).resolve().parent.parent
IGNORED = -100
FIRST_TOKENS, HEAVY, LOOKING_WEIGHT = 6, 5.0, 0.3
Batch = tuple[Tensor, Tensor, Tensor]


def encode(tokenizer: Tokenizer, segments: list[Segment], limit: int) -> tuple[list[int], list[int]]:
    """Return token ids and labels, both at most `limit` long; labels outside trained segments are ignored."""
    ids, labels = [], []
    for text, trained in segments:
        tokens = tokenizer.encode(text).ids
        ids += tokens
        labels += tokens if trained else [IGNORED] * len(tokens)
    return ids[:limit], labels[:limit]


def rows(lessons: Lessons, tokenizer: Tokenizer, length: int, seed: int) -> Iterator[tuple[list[int], ...]]:
    """Yield packed rows for ever: ids, labels and the number of the document each token belongs to."""
    rng = random.Random(seed)
    pad = tokenizer.token_to_id(PAD)
    row: tuple[list[int], ...] = ([], [], [])
    while True:
        for document, segments in enumerate(lessons.epoch(rng), start=1):
            ids, labels = encode(tokenizer, segments, length)
            if len(row[0]) + len(ids) > length:
                space = length - len(row[0])
                yield row[0] + [pad] * space, row[1] + [IGNORED] * space, row[2] + [0] * space
                row = ([], [], [])
            row[0].extend(ids)
            row[1].extend(labels)
            row[2].extend([document] * len(ids))


def batches(source: Iterator[tuple[list[int], ...]], size: int) -> Iterator[Batch]:
    """Yield ids [size, length], labels [size, length] and mask [size, 1, length, length]: causal within a document."""
    while True:
        ids, labels, documents = (torch.tensor(part) for part in zip(*(next(source) for _ in range(size)), strict=True))
        same = documents[:, None, :, None] == documents[:, None, None, :]
        yield ids, labels, same.tril()


def weights_of(chosen: Tensor, copied: Tensor) -> Tensor:
    """Return the weight of each trained token.

    An answer's first tokens, which choose the answer, count for more, and so do words that are `copied`.
    """
    before = F.pad(chosen, (1, 0))[:, :-1]
    first = F.pad((chosen & ~before).float(), (FIRST_TOKENS - 1, 0))
    heavy = F.max_pool1d(first, FIRST_TOKENS, stride=1).bool() | copied
    return (1 + (HEAVY - 1) * heavy)[chosen]


def loss_of(model: Llama, copying: Copying, batch: Batch) -> Tensor:
    """Return the weighted cross-entropy of the trained tokens, and of the heads that learn to copy.

    Logits are computed for the trained positions alone.
    """
    ids, labels, mask = batch
    targets = labels[:, 1:]
    chosen = targets != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        logits = model.logits(model(ids, mask)[:, :-1][chosen])
    copied, looking = copying.loss(ids, chosen, mask)
    weights = weights_of(chosen, copied)
    wrong = F.cross_entropy(logits.float(), targets[chosen], reduction="none")
    return (wrong * weights).sum() / weights.sum() + LOOKING_WEIGHT * looking


def optimizer_of(model: Llama, rate: float) -> torch.optim.AdamW:
    """Return AdamW with weight decay on matrices only."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98))


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: linear warm-up, then a cosine down to a fiftieth."""
    warm = min(100, steps // 10 + 1)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm))))


def measure_steps(model: Llama, loss_of: Callable[[Batch], Tensor], batch: Batch, minutes: float) -> int:
    """Return how many steps fit into `minutes`, from the time of a few that change nothing."""
    started = 0.0
    for trial in range(6):
        if trial == 1:
            started = time.monotonic()
        loss_of(batch).backward()
    model.zero_grad()
    return max(10, int(minutes * 60 / ((time.monotonic() - started) / 5 * 1.1)))


def train(model: Llama, loss_of: Callable[[Batch], Tensor], source: Iterator[Batch], steps: int, peak: float) -> None:
    """Train in place, printing loss and the time that is left."""
    optimizer = optimizer_of(model, peak)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps, peak)
        loss = loss_of(next(source))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            left = (time.monotonic() - started) / (step + 1) * (steps - step - 1)
            print(f"step {step + 1:5}/{steps}  loss {loss.item():.3f}  left {left / 60:4.1f} min", flush=True)


@torch.no_grad()
def start_from(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Take the weights of `folder`; a token that it lacks begins as the mean of those that spell it there."""
    model.load_state_dict(read_weights(folder))
    old = Tokenizer.from_file(str(folder / "tokenizer.json"))
    known, embeddings = old.get_vocab(), model.embed_tokens.weight.clone()
    for token, number in tokenizer.get_vocab().items():
        spelled = [known[token]] if token in known else old.encode(tokenizer.decode([number])).ids
        model.embed_tokens.weight[number] = embeddings[spelled].mean(0)


def read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the weights of a demo model in float32."""
    state = load_file(folder / "model.safetensors")
    return {name.removeprefix("model."): weight.float() for name, weight in state.items()}


def save(model: Llama, tokenizer: Tokenizer, target: Path, scratch: Path) -> None:
    """Write the Hugging Face folder into `scratch`, then swap it for `target`: a server never reads half a model."""
    fresh, old = scratch / "model", scratch / "model.old"
    for folder in (fresh, old):
        shutil.rmtree(folder, ignore_errors=True)
    fresh.mkdir(parents=True)
    ends = [tokenizer.token_to_id(token) for token in (TURN_END, END_OF_TEXT)]
    pad = tokenizer.token_to_id(PAD)
    generation = {"do_sample": False, "eos_token_id": ends, "pad_token_id": pad}
    config = model.config.to_hf(ends, pad)
    (fresh / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (fresh / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, fresh, model.config.max_position_embeddings)
    save_file(model.hf_state(), fresh / "model.safetensors", metadata={"format": "pt"})
    for path in fresh.iterdir():
        path.chmod(0o644)
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.exists():
        target.rename(old)
    fresh.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="choose the steps that fit into this time instead")
    parser.add_argument("--start-from", type=Path, help="folder of a demo model to go on with")
    parser.add_argument("--batch", type=int, default=2, help="rows per step (default %(default)s)")
    parser.add_argument("--length", type=int, default=1024, help="tokens per row (default %(default)s)")
    parser.add_argument("--rate", type=float, default=1.5e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "deployments/demo/model")
    parser.add_argument("--scratch", type=Path, default=ROOT / "artifacts/demo", help="on the same disk as --output")
    return parser.parse_args()


def main() -> None:
    """Make the tokenizer, train, save, and measure."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    lessons, config = load_lessons(), LlamaConfig()
    texts = lessons.prose(args.seed), lessons.structured(args.seed), lessons.values.words()
    tokenizer = train_tokenizer(*texts, config.vocab_size)
    model = Llama(config)
    if args.start_from:
        start_from(model, tokenizer, args.start_from)
    size = sum(p.numel() for p in model.parameters())
    facts = len(lessons.corpus.facts)
    print(f"{facts} facts, {tokenizer.get_vocab_size()} tokens, {size / 1e6:.2f} million parameters")
    source = batches(rows(lessons, tokenizer, args.length, args.seed), args.batch)
    loss = partial(loss_of, model, Copying(model, tokenizer))
    steps = measure_steps(model, loss, next(source), args.minutes) if args.minutes else args.steps
    print(f"training for --steps {steps}", flush=True)
    source = batches(rows(lessons, tokenizer, args.length, args.seed), args.batch)
    train(model, loss, source, steps, args.rate)
    save(model, tokenizer, args.output, args.scratch)
    print_table(evaluate(model, tokenizer, lessons))


if __name__ == "__main__":
    main()
