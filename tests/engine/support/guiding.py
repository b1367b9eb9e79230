"""A tokenizer for the small random checkpoints, whose vocabulary is larger; guides as grammars, and walks in them."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import decoders, models, pre_tokenizers

from inflight.engine.engine import Engine
from inflight.engine.guided.compiler import Compilation, CompiledGuide, GuideCompiler
from inflight.engine.guided.grammar import Grammars
from inflight.engine.guided.masks import next_masks
from inflight.engine.guided.state import GuideState
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.errors import InflightError
from inflight.sampling import Guide, SamplingParams
from inflight.settings.guided import GuidedDecodingSettings
from inflight.text.checkpoint import TextConfig
from inflight.text.tokenizer import Tokenizer
from tests.engine.support.checkpoints import VOCAB

_JOINED = ('{"', '":', '",', ', "', '": "', "tr", "ue", "fa", "ls", "nu", "ll", "12", "ab", "abc")
COMPILE_WAIT_S = 120
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


BYTES = LLTokenizer("byte")


@functools.cache
def grammar(kind: str, text: str) -> str:
    """Return the grammar of a guide, for tokens that are bytes. Raises InvalidRequest: it is refused."""
    return Grammars(BYTES, LLParserLimits()).of(Guide(kind, text))  # type: ignore[arg-type]


def accepts(kind: str, guide: Any, text: str) -> bool:
    """Return whether a guide accepts a text, byte by byte."""
    written = guide if isinstance(guide, str) else json.dumps(guide)
    matcher, content = LLMatcher(BYTES, grammar(kind, written), log_level=0), list(text.encode())
    return bool(matcher.try_consume_tokens(content) == len(content) and matcher.is_accepting())


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of ``byte_tokenizer``."""
    return Vocabulary(byte_tokenizer(), VOCAB)


@contextmanager
def compiles_nothing(engine: Engine) -> Iterator[None]:
    """Hold the engine's compiler up: no guide that it is asked for meanwhile is compiled before the end."""
    assert engine._guides is not None
    with engine._guides._compiler._worker._making_vocabulary:
        yield


def guide_state(kind: str, text: str, **sampling: Any) -> GuideState:
    """Return the state of a sequence with a guide, of the tokens of ``byte_tokenizer``."""
    tokens, guide = vocabulary().tokens, Guide(kind, text)  # type: ignore[arg-type]
    matcher = LLMatcher(tokens, Grammars(tokens, LLParserLimits()).of(guide), log_level=0)
    given: dict[str, Any] = {"guide": guide, "end_ids": frozenset({end_id()})} | sampling
    params = SamplingParams(10, **given)
    return GuideState(CompiledGuide(matcher, vocabulary()), params)


def allowed(state: GuideState) -> list[int]:
    """Return the tokens that a guide allows next."""
    [mask] = next_masks([state])
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), count=VOCAB, bitorder="little")).tolist()


def guide_compiler(**settings: Any) -> GuideCompiler:
    """Return a compiler of one thread, whose process runs."""
    made = GuideCompiler(
        lambda: Vocabulary(byte_tokenizer(), VOCAB), GuidedDecodingSettings(**{"compile_threads": 1} | settings)
    )
    assert isinstance(result_of(made, made.ask(regex("first"))), CompiledGuide)
    return made


def regex(text: str) -> Guide:
    """Return the guide of an expression."""
    return Guide("regex", text)


def result_of(compiler: GuideCompiler, compilation: Compilation) -> CompiledGuide | InflightError | None:
    """Return what comes of a compilation."""
    assert compilation.done.wait(COMPILE_WAIT_S)
    return compiler.result(compilation)


_ENDING = ('"', "}", "]", '":', '",')
_UNUSUAL = ('"', "\\", "u", "/", "0", "9", ".", "e", "-", "\x7f", "\n")


def walk(state: GuideState, source: random.Random, pieces: Sequence[str], most: int = 300) -> str | None:
    """Return a text of tokens that are drawn from what a guide allows; None: it has not ended after ``most``.

    Where it is allowed, one of the pieces comes next now and then. Most other tokens are those that make escapes and
    numbers unusual; the later, the more of them end something.
    """
    ids = {piece: byte_tokenizer().spelling(piece)[0] for piece in {*_ENDING, *_UNUSUAL}}
    ending, unusual = {ids[piece] for piece in _ENDING}, {ids[piece] for piece in _UNUSUAL}
    made: list[int] = []
    while len(made) < most:
        for token in _next_piece(state, source, pieces):
            state.push(token)
            made.append(token)
        tokens = allowed(state)
        assert tokens, f"nothing may follow {byte_tokenizer().decode(made)!r}"
        preferred = ending | {end_id()} if source.random() < len(made) / 100 else unusual
        token = source.choice([one for one in tokens if one in preferred and source.random() < 0.8] or tokens)
        if token == end_id():
            return byte_tokenizer().decode(made)
        state.push(token)
        made.append(token)
        if state.is_over():
            return byte_tokenizer().decode(made)
    return None


def _next_piece(state: GuideState, source: random.Random, pieces: Sequence[str]) -> list[int]:
    """Return the tokens of a piece that the guide allows as a whole, and leaves something to follow."""
    for piece in source.sample(pieces, min(len(pieces), 5)) if source.random() < 0.5 else ():
        tokens = byte_tokenizer().spelling(piece)
        if state.allowed_prefix(tokens) == len(tokens) and not state.ahead(tokens).is_over():
            return tokens
    return []


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


NAMES = ("a", "b", "ab", "name", "größe", "x/y", 'q"', "\\", "\n", "\x7f", "\x1b", "😀", "")
_NUMBERS = (0, 1, -1, 0.5, 0.1, -0.25, 9.99, 1e-7, 100, 12345, -7.125, 2**53 - 1)


def open_schema(source: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a schema of objects with free names, of numbers with bounds, of references: whatever may go wrong."""
    kinds = ["number", "number", "closed", "enum", "pattern"]
    kinds += ["object", "object", "object", "allOf", "oneOf", "array", "any"] if depth < 3 else []
    inner = functools.partial(open_schema, source, depth + 1)
    match source.choice(kinds):
        case "number":
            keywords = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
            bounds = {keyword: source.choice(_NUMBERS) for keyword in source.sample(keywords, source.randrange(3))}
            return {"type": source.choice(["number", "integer"])} | bounds
        case "closed":
            return random_schema(source, depth + 1)
        case "enum":
            return {source.choice(["const", "enum"]): source.sample([*_NUMBERS, "a", "\n", {"b": [0.1]}], 2)}
        case "pattern":
            return {"type": "string", "pattern": source.choice(["^[^a]*$", r"^\s?.$", "b", r"^[\x00-z]{2}$"])}
        case "object":
            return _open_object(source, inner)
        case "allOf":
            return (
                {"allOf": [inner(), inner()]}
                if source.random() < 0.5
                else _open_object(source, inner) | {"allOf": [inner()]}
            )
        case "oneOf":
            kinds_ = [_open_object(source, inner) for _ in range(2)]
            for name, one in zip(("a", "b"), kinds_, strict=True):
                one["properties"] = {"kind": {"const": name}} | one["properties"]
                one["required"] = ["kind", *one["required"]]
            return {"oneOf": kinds_}
        case "array":
            return {"type": "array", "prefixItems": [inner()], "items": inner(), "maxItems": 3}
        case _:
            return {}


def _open_object(source: random.Random, inner: Any) -> dict[str, Any]:
    names = source.sample(NAMES, source.randrange(4))
    made: dict[str, Any] = {
        "type": "object",
        "properties": {name: inner() if source.random() < 0.9 else False for name in names},
        "required": source.sample(NAMES, source.randrange(2)) * source.randrange(1, 3),
    }
    if source.random() < 0.5:
        made["additionalProperties"] = inner() if source.random() < 0.8 else False
    if source.random() < 0.3:
        made["patternProperties"] = {source.choice(["^a", r"\s", "^.$", "[^b]", r"\u00f6|/"]): inner()}
    if source.random() < 0.3:
        made["minProperties"] = source.randrange(3)
    return made
