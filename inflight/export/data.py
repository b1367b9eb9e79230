"""Calibration and held-out data: JSON lines or plain text, sampled to a stated mix, as token ids.

A row of JSON lines is a conversation (``messages``, ending with the assistant's answer), a ``prompt`` with its
``completion``, or a ``text``; a file of plain text has a document per paragraph. This module does not know what the
data is used for.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from inflight.errors import DeploymentError, InvalidRequest
from inflight.text.chat import chat_template_of, parse_messages
from inflight.text.tokenizer import Tokenizer

DEFAULT_DESCRIPTION = (
    "Inflight's own questions, answers and pages about LLM serving, in English: a stand-in for your data"
)
Row = dict[str, Any]
"""One checked row of a file: ``messages``, ``prompt`` and ``completion``, or ``text``."""


@dataclass(frozen=True)
class Example:
    """One row as token ids."""

    prompt: tuple[int, ...]
    """Empty for a plain text."""
    completion: tuple[int, ...]
    """What is measured: the answer, or the text itself."""
    chat: bool
    """Whether an end id belongs after the completion."""

    @property
    def tokens(self) -> list[int]:
        """Prompt and completion."""
        return [*self.prompt, *self.completion]


@dataclass(frozen=True)
class Source:
    """One file of a mix."""

    path: Path
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Source:
        """Read ``FILE`` or ``FILE:WEIGHT``.

        Raises:
            DeploymentError: no such file, or a weight that is not above zero.
        """
        path, weight = Path(text), 1.0
        name, _, number = text.rpartition(":")
        if name and not path.exists():
            path = Path(name)
            try:
                weight = float(number)
            except ValueError:
                weight = 0.0
            if not 0 < weight < math.inf:
                raise DeploymentError(f"data: the weight {number!r} is not a number above zero")
        if not path.is_file():
            raise DeploymentError(f"data: {path} is not a file; give FILE or FILE:WEIGHT, JSON lines or text")
        return cls(path, weight)


class DataSet:
    """A sampled mix of files: the same sources, count and seed give the same rows."""

    def __init__(self, sources: Sequence[Source], count: int, seed: int = 1) -> None:
        """Take ``count`` rows in all; a file that has too few gives all it has.

        Raises:
            DeploymentError: a file cannot be read or has no rows.
        """
        rng = random.Random(seed)
        whole = sum(source.weight for source in sources)
        self._rows: list[Row] = []
        self.mix: dict[str, int] = {}
        digest = hashlib.sha256(f"{count} {seed}".encode())
        for source in sources:
            rows = _rows(source.path)
            digest.update(f"{source.weight} ".encode() + json.dumps(rows, sort_keys=True).encode())
            taken = rng.sample(rows, min(len(rows), round(count * source.weight / whole)))
            if not taken:
                raise DeploymentError(f"data: {source.path}: its weight gives it none of {count} rows")
            name = source.path.name if source.path.name not in self.mix else str(source.path)
            self.mix[name] = self.mix.get(name, 0) + len(taken)
            self._rows += taken
        self.sha256 = digest.hexdigest()
        """The hash of the files' contents, their weights, the count and the seed."""

    def describe(self) -> str:
        """Return the mix in words."""
        return ", ".join(f"{count} rows of {name}" for name, count in self.mix.items())

    def examples(self, tokenizer: Tokenizer, max_length: int) -> list[Example]:
        """Return the rows as token ids, cut at ``max_length``; rows with fewer than two tokens are left out.

        Raises:
            DeploymentError: no row is left.
        """
        encoder = RowEncoder(tokenizer, max_length)
        examples = [encoder.encode(row) for row in self._rows]
        usable = [one for one in examples if one.completion and len(one.tokens) > 1]
        if not usable:
            raise DeploymentError(f"data: {self.describe()}: none has two tokens or more")
        return usable

    def answered(self) -> list[Row]:
        """Return the rows that are a question with its answer."""
        return [row for row in self._rows if "text" not in row]


def _rows(path: Path) -> list[Row]:
    try:
        text = path.read_bytes().decode()
    except OSError as error:
        raise DeploymentError(f"data: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DeploymentError(f"data: {path} is not UTF-8: {error.reason} at byte {error.start}") from None
    if path.suffix in (".jsonl", ".json"):
        rows = [_row(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    else:
        rows = [{"text": part.strip()} for part in text.split("\n\n") if part.strip()]
    if not rows:
        raise DeploymentError(f"data: {path} has no rows")
    return rows


def _row(path: Path, number: int, line: str) -> Row:
    try:
        match json.loads(line):
            case {"messages": [*given]}:
                messages = parse_messages(json.dumps(given))
                if messages[-1]["role"] == "assistant" and isinstance(messages[-1].get("content"), str):
                    return {"messages": messages}
            case {"text": str(text)}:
                return {"text": text}
            case {"prompt": str(prompt), "completion": str(completion)}:
                return {"prompt": prompt, "completion": completion}
    except (ValueError, InvalidRequest) as error:
        raise DeploymentError(f"data: {path}, line {number}: {error}") from None
    raise DeploymentError(
        f"data: {path}, line {number}: a JSON object with `messages` that end with the assistant's, with `prompt` and "
        "`completion`, or with `text` is expected"
    )


class RowEncoder:
    """Turns rows into token ids, conversations by the checkpoint's chat template."""

    def __init__(self, tokenizer: Tokenizer, max_length: int) -> None:
        self._template = chat_template_of(tokenizer.config)
        self._tokenizer, self._max_length = tokenizer, max_length

    def encode(self, row: Row) -> Example:
        """Return the row, at most ``max_length`` tokens long."""
        limit = self._max_length
        if "text" in row:
            ids = self._tokenizer.encode_batch([row["text"]], add_special_tokens=True)[0]
            return Example((), tuple(ids[:limit]), chat=False)
        template = self._template if "messages" in row else None
        if template is None:
            prompt, completion = as_texts(row)
        else:
            *before, last = row["messages"]
            prompt, completion = template.render(before), last["content"]
        first = self._tokenizer.encode_batch([prompt], add_special_tokens=template is None)[0]
        answer = self._tokenizer.encode_batch([completion])[0][:limit]
        # A prompt that is too long loses its beginning: the answer needs its end.
        return Example(tuple(first[max(0, len(first) + len(answer) - limit) :]), tuple(answer), template is not None)


def as_texts(row: Row) -> tuple[str, str]:
    """Return what a row asks and what it answers; a conversation as plain lines, as a base model reads it."""
    if "prompt" in row:
        return row["prompt"], row["completion"]
    *before, answer = (message["content"] for message in row["messages"])
    return "".join(f"{text}\n" for text in before), answer
