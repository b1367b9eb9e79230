"""Train the demo's draft model: a smaller Llama that guesses what the demo model says, for `deployments/demo/draft`.

    python build/train_draft.py                 the committed draft, in the default number of steps
    python build/train_draft.py --minutes 3     as many steps as fit; prints the --steps that repeat it

It is distilled: on the demo's corpus it learns the demo model's own distribution of each next token, not the text
(arXiv:1503.02531). Its embedding begins as the principal components of the demo model's. At the end the share of tokens
on which both agree is measured, on answers that the demo model generates. Seeded, like `train_demo.py`, whose parts it
uses; it writes no tokenizer: it has the demo model's.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch
from demo.lessons import load_lessons
from demo.llama import Llama, LlamaConfig
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F
from train_demo import IGNORED, ROOT, Batch, batches, measure_steps, read_weights, rows, train

MODEL = ROOT / "deployments/demo/model"
SHAPE = LlamaConfig(
    hidden_size=128, intermediate_size=384, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
)
"""One layer: on a CPU a small model's time is that of its layers, one after the other."""
PROMPTS = 40
ANSWER_TOKENS = 96


def load_teacher() -> Llama:
    """Return the demo model with its committed weights."""
    teacher = Llama(LlamaConfig())
    teacher.load_state_dict(read_weights(MODEL))
    return teacher.eval().requires_grad_(False)


def new_draft(teacher: Llama) -> Llama:
    """Return a draft model to train: its embedding holds the most of the teacher's that fits (Eckart-Young)."""
    draft = Llama(SHAPE)
    weight = teacher.embed_tokens.weight
    left, values, _ = torch.linalg.svd(weight, full_matrices=False)
    size = SHAPE.hidden_size
    draft.embed_tokens.weight.data.copy_(left[:, :size] * values[:size])
    return draft


def loss_of(draft: Llama, teacher: Llama, batch: Batch) -> Tensor:
    """Return the cross-entropy of the draft's distribution against the teacher's, where the demo was trained."""
    ids, labels, mask = batch
    chosen = labels[:, 1:] != IGNORED
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            wanted = teacher.logits(teacher(ids, mask)[:, :-1][chosen])
        logits = draft.logits(draft(ids, mask)[:, :-1][chosen])
    return F.cross_entropy(logits.float(), wanted.float().softmax(-1))


@torch.inference_mode()
def agreement(draft: Llama, teacher: Llama, prompts: list[list[int]], ends: set[int]) -> float:
    """Return the share of the teacher's greedy tokens that are the draft's first choice too."""
    same = total = 0
    for prompt in prompts:
        ids = list(prompt)
        while len(ids) < len(prompt) + ANSWER_TOKENS and (len(ids) == len(prompt) or ids[-1] not in ends):
            ids.append(int(_next(teacher, ids)[-1]))
        guesses = _next(draft, ids)[len(prompt) - 1 : -1].tolist()
        same += sum(guess == token for guess, token in zip(guesses, ids[len(prompt) :], strict=True))
        total += len(guesses)
    return same / total


def _next(model: Llama, ids: list[int]) -> Tensor:
    """Return the likeliest next token at each position."""
    mask = torch.ones(1, 1, len(ids), len(ids), dtype=torch.bool).tril()
    return model.logits(model(torch.tensor([ids]), mask))[0].argmax(-1)


def prompts_of(source: Iterator[Batch]) -> list[list[int]]:
    """Return the beginnings of documents, up to the first token that was trained."""
    prompts: list[list[int]] = []
    while len(prompts) < PROMPTS:
        ids, labels, _ = next(source)
        for row, trained in zip(ids, (labels != IGNORED).tolist(), strict=True):
            first = trained.index(True) if True in trained else 0
            if first > 1:
                prompts.append(row[:first].tolist())
    return prompts[:PROMPTS]


def save(draft: Llama, target: Path) -> None:
    """Write the checkpoint."""
    target.mkdir(parents=True, exist_ok=True)
    base = json.loads((MODEL / "config.json").read_text())
    config = draft.config.to_hf(base["eos_token_id"], base["pad_token_id"])
    (target / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(draft.hf_state(), target / "model.safetensors", metadata={"format": "pt"})
    for path in target.iterdir():
        path.chmod(0o644)


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="optimizer steps (default %(default)s)")
    parser.add_argument("--minutes", type=float, help="choose the steps that fit into this time instead")
    parser.add_argument("--batch", type=int, default=2, help="rows per step (default %(default)s)")
    parser.add_argument("--length", type=int, default=512, help="tokens per row (default %(default)s)")
    parser.add_argument("--rate", type=float, default=4e-3, help="peak learning rate (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default %(default)s)")
    parser.add_argument("--output", type=Path, default=ROOT / "deployments/demo/draft")
    return parser.parse_args()


def main() -> None:
    """Train, save, and measure."""
    args = arguments()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    lessons, tokenizer, teacher = load_lessons(), Tokenizer.from_file(str(MODEL / "tokenizer.json")), load_teacher()
    draft = new_draft(teacher)
    print(f"{sum(p.numel() for p in draft.parameters()) / 1e6:.2f} million parameters")

    def source(seed: int) -> Iterator[Batch]:
        return batches(rows(lessons, tokenizer, args.length, seed), args.batch)

    loss = partial(loss_of, draft, teacher)
    steps = measure_steps(draft, loss, next(source(args.seed)), args.minutes) if args.minutes else args.steps
    print(f"training for --steps {steps}", flush=True)
    train(draft, loss, source(args.seed), steps, args.rate)
    save(draft, args.output)
    ends = set(json.loads((MODEL / "generation_config.json").read_text())["eos_token_id"])
    share = agreement(draft, teacher, prompts_of(source(args.seed + 1)), ends)
    print(f"agrees with the demo model on {share:.1%} of the tokens that it generates")


if __name__ == "__main__":
    main()
