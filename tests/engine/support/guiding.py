"""A tokenizer for the small random checkpoints, whose vocabulary is larger, and schemas made at random."""

from __future__ import annotations

import functools
import random
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from inflight.text.checkpoint import TextConfig
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.checkpoints import VOCAB

_JOINED = ('{"', '":', '",', ', "', '": "', "tr", "ue", "fa", "ls", "nu", "ll", "12", "ab", "abc")
END_NAME, OTHER_NAME = "<|end|>", "<|other|>"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of all bytes, some pairs of them, and two special tokens: fewer than ``VOCAB``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    spelt = [piece.replace(" ", "Ġ") for piece in _JOINED]
    vocabulary = {piece: place for place, piece in enumerate([*alphabet, *spelt])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([END_NAME, OTHER_NAME])
    end = backend.token_to_id(END_NAME)
    assert len(backend.get_vocab()) < VOCAB
    return Tokenizer(backend, TextConfig(VOCAB, frozenset({end}), None, {}, None))


def end_id() -> int:
    """Return the end id of ``byte_tokenizer``."""
    return min(byte_tokenizer().config.end_ids)


def random_schema(source: random.Random, depth: int = 0) -> Any:
    """Return a schema that ends soon for whoever writes at random: strings and arrays have a greatest length."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const", "format", "pattern"]
    kinds += ["object", "array", "anyOf", "nullable", "map"] if depth < 3 else []
    kind = source.choice(kinds)
    inner = functools.partial(random_schema, source, depth + 1)
    match kind:
        case "string":
            return {"type": "string", "minLength": source.randrange(3), "maxLength": source.randrange(3, 9)}
        case "integer" | "number":
            low = source.randrange(-50, 50)
            bounds = source.choice([{}, {"multipleOf": 3}, {"exclusiveMinimum": low - 1}]) if kind == "integer" else {}
            return {"type": kind, "minimum": low, "maximum": low + source.randrange(4, 500)} | bounds
        case "boolean" | "null":
            return {"type": kind}
        case "enum":
            return {
                "enum": source.sample(["a", "é", 1, -2.5, None, True, "x\ny", [1, {"b": 2}]], source.randrange(1, 5))
            }
        case "const":
            return {"const": source.choice(["", 'quote"s', 0, {"k": [1, 2]}])}
        case "format":
            return {"type": "string", "format": source.choice(["date", "time", "date-time", "uuid", "ipv4"])}
        case "pattern":
            return {"type": "string", "pattern": source.choice([r"^\d{2,4}$", "^[a-c]+x$", r"^\S.$"]), "maxLength": 8}
        case "array":
            tuple_ = {"prefixItems": [inner()]} if source.random() < 0.4 else {}
            return {"type": "array", "items": inner(), "minItems": source.randrange(2), "maxItems": 3} | tuple_
        case "anyOf":
            return {"anyOf": [inner(), inner()]}
        case "nullable":
            return {"anyOf": [inner(), {"type": "null"}]}
        case "map":
            return {"type": "object", "additionalProperties": inner(), "maxProperties": 2}
        case _:
            names = source.sample(["a", "b", "name", "größe", "x/y", 'q"'], source.randrange(1, 4))
            required = source.sample(names, source.randrange(len(names) + 1))
            properties = {name: inner() for name in names}
            return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}
