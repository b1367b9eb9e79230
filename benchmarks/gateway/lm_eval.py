"""lm-eval on the gateway and on transformers: the same tasks, the same checkpoint, and the scores beside each other.

lm-eval runs in its own environment (``make clients ARGS=lm-eval``) and downloads nothing: the tasks are written here,
from the questions and answers that the repository brings.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.clients import CLIENTS, LM_EVAL
from benchmarks.gateway.served import KEY, Served
from inflight.errors import EngineFailure
from inflight.resources import HELD_OUT_DATA, ROOT

QUESTIONS = HELD_OUT_DATA
CHOICE, ROLLING, GENERATION = "inflight_choice", "inflight_rolling", "inflight_generation"
TASKS = (CHOICE, ROLLING, GENERATION)
"""One for each kind of lm-eval's requests: log-likelihoods of continuations, of whole texts, and generated texts."""
_CHOICES = 4
_OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}


@dataclass(frozen=True)
class Scores:
    """What one run of lm-eval says."""

    metrics: Mapping[str, Mapping[str, float]]
    """By task, then by metric."""
    samples: Mapping[str, list[Any]]
    """By task: what the model answered to each document's requests, in order."""


def on_both(served: Served, checkpoint: Path, folder: Path, count: int) -> tuple[Scores, Scores]:
    """Score ``count`` documents of each task on transformers and on a gateway that serves the same checkpoint."""
    write_tasks(folder, count)
    length = {"max_length": 1024}
    theirs = evaluate("hf", {"pretrained": checkpoint, "dtype": "float32", **length}, folder, "hf")
    asked = {
        "base_url": f"{served.url}/v1/completions",
        "model": served.gateway.model_name,
        "tokenizer": checkpoint,
        "num_concurrent": 4,
        **length,
    }
    return theirs, evaluate("local-completions", asked, folder, "gateway", KEY)


def differences(theirs: Scores, ours: Scores) -> Iterator[dict[str, float | str]]:
    """Yield a row for each metric of a task, with the largest difference of what the task's requests were answered.

    It is relative to the log-likelihood, and for texts the number of those that differ.
    """
    for task in TASKS:
        pairs = list(zip(_flat(theirs.samples[task]), _flat(ours.samples[task]), strict=True))
        worst = float(sum(a != b for a, b in pairs)) if task == GENERATION else max(_relative(a, b) for a, b in pairs)
        for metric, value in theirs.metrics[task].items():
            if metric != "sample_len" and "stderr" not in metric:
                found = {"transformers": value, "gateway": ours.metrics[task][metric]}
                yield {"task": task, "metric": metric.partition(",")[0], **found, "largest_difference": worst}


def _flat(samples: Iterable[Any]) -> Iterator[Any]:
    """Yield what each request was answered: a log-likelihood as text, or a text."""
    for document in samples:
        for answer in document:
            yield answer[0] if isinstance(answer, list) else answer


def _relative(one: str, other: str) -> float:
    return abs(float(one) - float(other)) / abs(float(one))


def write_tasks(folder: Path, count: int) -> None:
    """Write the tasks and their documents, ``count`` for each task."""
    shutil.rmtree(folder, ignore_errors=True)  # of an earlier run, whose results would be read too
    folder.mkdir(parents=True)
    turns = [json.loads(line)["messages"] for line in QUESTIONS.read_text().splitlines()[: count + _CHOICES]]
    answers = [answer["content"] for _, answer in turns]
    documents = [
        {
            "question": turns[index][0]["content"],
            "text": f"{turns[index][0]['content']} {answers[index]}",
            "answer": answers[index],
            "choices": answers[index : index + _CHOICES],
            "gold": 0,
        }
        for index in range(count)
    ]
    data = folder / "documents.json"
    data.write_text("\n".join(map(json.dumps, documents)) + "\n")
    for name, task in _tasks().items():
        source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data.resolve())}}}
        (folder / f"{name}.yaml").write_text(yaml.safe_dump({"task": name, "test_split": "test", **source, **task}))


def _tasks() -> dict[str, dict[str, Any]]:
    return {
        CHOICE: {
            "output_type": "multiple_choice",
            "doc_to_text": "Question: {{question}}\nAnswer:",
            "doc_to_choice": "choices",
            "doc_to_target": "gold",
            "metric_list": [{"metric": name, "aggregation": "mean"} for name in ("acc", "acc_norm")],
        },
        ROLLING: {
            "output_type": "loglikelihood_rolling",
            "doc_to_text": "",
            "doc_to_target": "text",
            "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
        },
        GENERATION: {
            "output_type": "generate_until",
            "doc_to_text": "<|im_start|>user\n{{question}}<|im_end|>\n<|im_start|>assistant\n",
            "doc_to_target": "answer",
            "generation_kwargs": {"until": ["<|im_end|>"], "max_gen_toks": 32, "do_sample": False, "temperature": 0},
            "metric_list": [{"metric": "exact_match", "aggregation": "mean"}],
        },
    }


def evaluate(model: str, arguments: Mapping[str, Any], folder: Path, name: str, key: str = "") -> Scores:
    """Run lm-eval's command with a model of its own, on the tasks of ``folder``; ``name`` names the run's files.

    Raises:
        InflightError: its environment is not there.
        EngineFailure: it failed; the message has its last words.
    """
    output = folder / name
    command = [
        *(str(CLIENTS.home_of(LM_EVAL, ROOT / CLIENTS.folder).python), "-m", "lm_eval"),
        *("--model", model, "--model_args", ",".join(f"{key}={value}" for key, value in arguments.items())),
        *("--tasks", ",".join(TASKS), "--include_path", str(folder), "--output_path", str(output), "--log_samples"),
    ]
    with (folder / f"{name}.log").open("w+") as log:
        environment = _environment(folder) | {"OPENAI_API_KEY": key or "none"}
        code = subprocess.run(command, stdout=log, stderr=log, env=environment).returncode
        if code:
            log.seek(0)
            raise EngineFailure(f"lm-eval ended with code {code}: {log.read()[-2000:]}")
    return _read(output)


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | _OFFLINE | {"HF_HOME": str((folder / "hub").resolve()), "PYTHONPATH": ""}


def _read(output: Path) -> Scores:
    [results] = output.rglob("results_*.json")
    metrics = {
        task: {metric: value for metric, value in found.items() if isinstance(value, int | float)}
        for task, found in json.loads(results.read_text())["results"].items()
    }
    return Scores(metrics, {task: list(_samples(output, task)) for task in TASKS})


def _samples(output: Path, task: str) -> Iterator[Any]:
    [path] = output.rglob(f"samples_{task}_*.jsonl")
    documents = [json.loads(line) for line in path.read_text().splitlines()]
    for document in sorted(documents, key=lambda one: one["doc_id"]):
        yield document["filtered_resps"]
