"""A GGUF model's tokenizer as the files of a Hugging Face checkpoint: ``tokenizer.json`` and what goes with it.

``tokenizer.ggml.model`` is ``gpt2``, a byte-level BPE with its merges, or ``llama``, SentencePiece's BPE: there a
token's score says which merge comes first, and bytes that no token has are tokens of their own. Both become a BPE of
the Rust library, the second as transformers converts SentencePiece's (``convert_slow_tokenizer.generate_merges``).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np

from inflight.errors import DeploymentError, nearest
from inflight.gguf.metadata import Described
from inflight.gguf.words import WORDS, Words
from inflight.turn_ends import turn_ends

log = logging.getLogger(__name__)

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5
"""``tokenizer.ggml.token_type``; 6 is a byte's."""
_LONGEST_PIECE = 1024
"""Characters; a piece's splits are tried one by one."""
_MOST_MERGED = 1 << 25
"""Characters of what merges make, each by itself. Mistral's 32,000 pieces come to 325,000, a hundredth of it."""
_MARK = "▁"
"""SentencePiece's space."""
_TEMPLATE = "tokenizer.chat_template"
_SAMPLING = {
    "temp": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "penalty_repeat": "repetition_penalty",
}  # fmt: skip
"""The keys of ``general.sampling`` that are read, and what generation_config.json calls them."""
_MAY_BE_NONE, _NO_TOKEN = ("padding", "unknown"), (-1, (1 << 32) - 1)
"""Special tokens that some files number so where the model has none."""
_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")


class _Vocabulary:
    """``tokenizer.ggml``: tokens, their types, and the special ones."""

    def __init__(self, model: Described) -> None:
        self._of, self._data = model, model.metadata
        self.architecture = model.metadata.get("general.architecture")
        self.model = self.find("model", str, "none")
        self.tokens: list[str] = self.find("tokens", list, [])
        if not all(type(token) is str for token in self.tokens) or not self.tokens:
            raise self.wrong("tokens", len(self.tokens), "a list of strings")
        types = self._numbers("token_type")
        self.types: list[int] = [_NORMAL] * len(self.tokens) if types is None else types.tolist()
        self.special = {
            name: self.tokens[number]
            for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
            if (number := self._token(key)) is not None
        }
        """Texts, by transformers' names."""

    @property
    def ids(self) -> dict[str, int]:
        """The vocabulary, without what only fills gaps between numbers.

        Raises:
            DeploymentError: a token is there twice.
        """
        twice, count = Counter(self.tokens).most_common(1)[0]
        if count > 1:
            raise self.wrong("tokens", twice, "there once")
        return {
            token: number
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind != _UNUSED or token != f"[PAD{number}]"
        }

    @property
    def added(self) -> list[dict[str, Any]]:
        """The tokens that are found in text before all else."""
        strips = self.architecture == "phi3" and self.model == "llama"  # as Phi-3's tokenizer.json has it
        return [
            {
                "id": number, "content": token, "special": kind == _CONTROL, "normalized": False, "single_word": False,
                "lstrip": False, "rstrip": strips and kind == _CONTROL and token not in _PHI3_KEEPS_SPACE,
            }
            for number, (token, kind) in enumerate(zip(self.tokens, self.types, strict=True))
            if kind in (_CONTROL, _USER_DEFINED) or (kind == _UNKNOWN and token == self.special.get("unk"))
        ]  # fmt: skip

    @property
    def end_ids(self) -> list[int]:
        """The tokens that end an answer."""
        ends = {number for key in ("eos", "eot", "eom") if (number := self._token(key)) is not None}
        control = {token: at for at, token in enumerate(self.tokens) if self.types[at] in (_CONTROL, _USER_DEFINED)}
        inner = {control["<|end|>"]} - turn_ends(control) if "<|end|>" in control else set()
        return sorted((ends | turn_ends(control)) - inner)

    @property
    def templates(self) -> list[dict[str, str]]:
        """The chat templates that are read, as tokenizer_config.json lists several."""
        found = []
        for name in ("default", "tool_use"):
            key = _TEMPLATE if name == "default" else f"{_TEMPLATE}.{name}"
            if (template := self._data.get(key)) is None:
                continue
            if not isinstance(template, str):
                raise DeploymentError(f"{self._of.path}: {key} is {template!r:.200}; it must be a string")
            found.append({"name": name, "template": template})
        return found

    @property
    def sampling(self) -> dict[str, float]:
        """How the model's makers sample, as generation_config.json has it."""
        found = dict[str, float]()
        for key, name in _SAMPLING.items():
            if (value := self._data.get(f"general.sampling.{key}")) is None:
                continue
            if type(value) not in (int, float) or not np.isfinite(value):
                raise DeploymentError(
                    f"{self._of.path}: general.sampling.{key} is {value!r:.200}; it must be a finite number"
                )
            found[name] = value
        return found

    @property
    def scores(self) -> list[float]:
        """Of the tokens: the merge into the one with the highest comes first."""
        scores = self._numbers("scores")
        if scores is None or not np.isfinite(scores).all():
            raise self.wrong("scores", None if scores is None else "not finite", f"{len(self.tokens)} finite numbers")
        return [float(score) for score in scores]

    def find(self, name: str, kind: type, default: Any) -> Any:
        """Return a value, or ``default`` where there is none."""
        value = self._data.get(f"tokenizer.ggml.{name}", default)
        if type(value) is not kind and value is not default:
            raise self.wrong(name, value, f"a {kind.__name__}")
        return value

    def wrong(self, name: str, value: Any, allowed: str) -> DeploymentError:
        """Return the error of a value."""
        return _wrong(self._of, name, value, allowed)

    def _numbers(self, name: str) -> np.ndarray | None:
        """Return a list with a number for each token."""
        values = self._data.get(f"tokenizer.ggml.{name}")
        if values is not None and (not isinstance(values, np.ndarray) or len(values) != len(self.tokens)):
            raise self.wrong(name, values, f"a list of {len(self.tokens)} numbers")
        return values

    def _token(self, name: str) -> int | None:
        """Return the number of a special token; None: there is none."""
        number = self.find(f"{name}_token_id", int, None)
        if name in _MAY_BE_NONE and number in _NO_TOKEN:
            return None
        if number is not None and not 0 <= number < len(self.tokens):
            raise self.wrong(f"{name}_token_id", number, f"the number of one of {len(self.tokens)} tokens")
        return number


def tokenizer_files(model: Described) -> dict[str, dict[str, Any]]:
    """Return a model's ``tokenizer.json``, and what ``described_files`` returns.

    Raises:
        DeploymentError: the kind of tokenizer is not supported, or what must be there is missing or wrong.
    """
    require_kind(model)
    vocabulary = _Vocabulary(model)
    log.info("making a tokenizer of the %d tokens in the file", len(vocabulary.tokens))
    make = _byte_level if vocabulary.model == "gpt2" else _sentencepiece
    tokenizer = {"version": "1.0", "added_tokens": vocabulary.added, **make(vocabulary)}
    return {"tokenizer.json": tokenizer, **_described(vocabulary)}


def described_files(model: Described) -> dict[str, dict[str, Any]]:
    """Return a model's ``tokenizer_config.json`` and ``generation_config.json``, whatever the kind of its tokenizer.

    Raises:
        DeploymentError: what they are made of is wrong.
    """
    return _described(_Vocabulary(model)) if "tokenizer.ggml.tokens" in model.metadata else {}


def _described(vocabulary: _Vocabulary) -> dict[str, dict[str, Any]]:
    config: dict[str, Any] = {f"{name}_token": token for name, token in vocabulary.special.items()}
    if templates := vocabulary.templates:
        config["chat_template"] = templates
    generation: dict[str, Any] = {"eos_token_id": vocabulary.end_ids, **vocabulary.sampling}
    if (pad := vocabulary.special.get("pad")) is not None:
        generation["pad_token_id"] = vocabulary.tokens.index(pad)
    return {"tokenizer_config.json": config, "generation_config.json": generation}


def require_kind(model: Described) -> None:
    """Require that a model's tokenizer is of a kind that is known.

    Raises:
        DeploymentError: it is not; the message names it.
    """
    kind, words = (model.metadata.get(f"tokenizer.ggml.{name}", "none") for name in ("model", "pre"))
    if kind not in ("gpt2", "llama"):
        raise _wrong(model, "model", kind, f"gpt2 or llama; {_BESIDE}")
    if kind == "gpt2" and not (isinstance(words, str) and words in WORDS):
        raise _wrong(model, "pre", words, f"one of {', '.join(WORDS)}{nearest(str(words), WORDS)}; {_BESIDE}")


def _wrong(model: Described, name: str, value: Any, allowed: str) -> DeploymentError:
    """Return the error of a value."""
    return DeploymentError(f"{model.path}: tokenizer.ggml.{name} is {value!r:.200}; it must be {allowed}")


_BESIDE = "of another kind, put the model's tokenizer.json and tokenizer_config.json beside the file"


def _byte_level(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return what ``tokenizer.json`` says of a byte-level BPE."""
    words: Words = WORDS[vocabulary.find("pre", str, "none")]
    ids = vocabulary.ids
    model = {"type": "BPE", "vocab": ids, "merges": _listed_merges(vocabulary, ids), "ignore_merges": words.whole}
    return {
        "normalizer": words.normalizer and {"type": words.normalizer},
        "pre_tokenizer": words.rules(),
        "post_processor": _ends(vocabulary, words.begins),
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": model,
    }


def _listed_merges(vocabulary: _Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the merges that the file lists. Without them, text would become single bytes, which are tokens too."""
    listed, merges = vocabulary.find("merges", list, []), list[tuple[str, str]]()
    for merge in listed:
        at = merge.find(" ", 1)  # a token may itself begin with a space
        left, right = merge[: max(at, 0)], merge[at + 1 :]
        if left not in ids or right not in ids or left + right not in ids:
            raise vocabulary.wrong("merges", merge, "two tokens that make a third, with a space between them")
        merges.append((left, right))
    if not merges:
        for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True):
            if kind == _NORMAL and len(token) > 1:
                raise vocabulary.wrong("merges", None, f"there, by which tokens like {token[:40]!r} are made")
    return merges


def _sentencepiece(vocabulary: _Vocabulary) -> dict[str, Any]:
    """Return what ``tokenizer.json`` says of a SentencePiece BPE."""
    if vocabulary.find("remove_extra_whitespaces", bool, False):
        raise vocabulary.wrong("remove_extra_whitespaces", True, f"false; {_BESIDE}")
    prefixed = vocabulary.find("add_space_prefix", bool, True)
    marks = {"type": "Replace", "pattern": {"String": " "}, "content": _MARK}
    rules: list[dict[str, Any]] = [
        {"type": "Replace", "pattern": {"String": _MARK}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    prepend = {"type": "Prepend", "prepend": _MARK}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    return {
        "normalizer": {"type": "Sequence", "normalizers": [prepend, marks] if prefixed else [marks]},
        "pre_tokenizer": None,
        "post_processor": _ends(vocabulary, True),
        "decoder": {"type": "Sequence", "decoders": [*rules, strip] if prefixed else rules},
        "model": {
            "type": "BPE", "vocab": vocabulary.ids, "merges": _merges(vocabulary),
            "unk_token": vocabulary.special.get("unk"), "fuse_unk": True, "byte_fallback": True,
        },
    }  # fmt: skip


def _merges(vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Return the merges that SentencePiece would make, by the scores of what they make."""
    normal = {
        token: number
        for number, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True))
        if kind == _NORMAL
    }
    longest = max(normal, key=len, default="")
    if len(longest) > _LONGEST_PIECE:
        raise vocabulary.wrong("tokens", longest[:20], f"of at most {_LONGEST_PIECE} characters")
    tokens, scores, merges, characters = vocabulary.tokens, vocabulary.scores, list[tuple[float, str, str]](), 0
    for token, number in normal.items():
        halves = ((normal.get(token[:at]), normal.get(token[at:])) for at in range(1, len(token)))
        known = sorted((left, right) for left, right in halves if left is not None and right is not None)
        # The vocabulary's own strings: those of the halves would take the square of the file's size.
        merges += [(scores[number], tokens[left], tokens[right]) for left, right in known]
        characters += len(known) * len(token)
        if characters > _MOST_MERGED:
            allowed = f"such that what merges make has at most {_MOST_MERGED} characters"
            raise vocabulary.wrong("tokens", f"{len(tokens)} pieces", allowed)
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _ends(vocabulary: _Vocabulary, begins: bool) -> dict[str, Any] | None:
    """Return the ``post_processor``: which special tokens text begins and ends with, where it is asked for them."""
    names = {
        "bos": vocabulary.find("add_bos_token", bool, begins),
        "eos": vocabulary.find("add_eos_token", bool, False),
    }
    wanted = {name: vocabulary.special[name] for name, wants in names.items() if wants and name in vocabulary.special}
    if not wanted:
        return None
    before, after = ([{"SpecialToken": {"id": wanted[name], "type_id": 0}}] if name in wanted else [] for name in names)
    single = [*before, {"Sequence": {"id": "A", "type_id": 0}}, *after]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {
            token: {"id": token, "ids": [vocabulary.tokens.index(token)], "tokens": [token]}
            for token in wanted.values()
        },
    }
