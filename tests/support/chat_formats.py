"""Tokenizers of the families of chat models, and outputs as those models write them."""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import llguidance
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from inflight.text.checkpoint import TextConfig
from inflight.text.output.events import ArgumentsDelta, CallStart, ContentDelta, OutputEvent, ReasoningDelta
from inflight.text.output.format import ChatFormat
from inflight.text.output.markers import MarkedDetokenizer, Marker, Piece
from inflight.text.output.tools import Tool
from inflight.text.tokenizer import Tokenizer
from tests.support.tokenizers import TEXTS

Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Family:
    """What a family's tokenizer and template have, and how it writes calls."""

    name: str
    render: Callable[[list[Call]], str]
    template: str
    special: tuple[str, ...] = ()
    added: tuple[str, ...] = ()
    """Tokens that are not special: they have text."""
    reasoning: tuple[str, str] | None = None
    """How reasoning is written before an answer."""
    after: str = ""
    """What stands between the reasoning and the calls."""
    answer: str = ""
    """What stands before the text of an answer."""
    most: int = 3
    """Most calls of one output."""


def _hermes(calls: list[Call]) -> str:
    one = '<tool_call>\n{{"name": {}, "arguments": {}}}\n</tool_call>'
    return "\n".join(one.format(json.dumps(name), _json(values)) for name, values in calls)


def _xml(calls: list[Call]) -> str:
    texts = []
    for name, values in calls:
        shown = ((key, value if isinstance(value, str) else _json(value)) for key, value in values.items())
        inside = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in shown)
        texts.append(f"<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>")
    return "\n".join(texts)


def _llama(calls: list[Call]) -> str:
    return "; ".join(f'{{"name": {json.dumps(name)}, "parameters": {_json(values)}}}' for name, values in calls)


def _mistral_list(calls: list[Call]) -> str:
    listed = (f'{{"name": {json.dumps(name)}, "arguments": {_json(values)}}}' for name, values in calls)
    return f"[TOOL_CALLS][{', '.join(listed)}]"


def _mistral(calls: list[Call]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{_json(values)}" for name, values in calls)


def _deepseek(calls: list[Call]) -> str:
    one = "<｜tool▁call▁begin｜>{}<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
    inside = "".join(one.format(name, _json(values)) for name, values in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _deepseek_v3(calls: list[Call]) -> str:
    one = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n{}\n```<｜tool▁call▁end｜>"
    inside = "\n".join(one.format(name, _json(values)) for name, values in calls)
    return f"<｜tool▁calls▁begin｜>{inside}<｜tool▁calls▁end｜>"


def _harmony(calls: list[Call]) -> str:
    [(name, values)] = calls
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(values)}"


def _gemma4(calls: list[Call]) -> str:
    return "".join(f"<|tool_call>call:{name}{_notation(values)}<tool_call|>" for name, values in calls)


def _notation(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_notation(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_notation, value)) + "]"
    return f'<|"|>{value}<|"|>' if isinstance(value, str) else _json(value)


def _gemma3(calls: list[Call]) -> str:
    lines = (f"{name}({', '.join(f'{key}={_python(one)}' for key, one in values.items())})" for name, values in calls)
    return "```tool_code\n{}\n```".format("\n".join(lines))


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_python(key)}: {_python(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_python, value)) + "]"
    return _json(value) if isinstance(value, str) else repr(value)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


_CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{{ tools }}"
_THINK = ("<think>\n", "\n</think>\n\n")
_DEEPSEEK = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
)
_HARMONY = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
_HARMONY_REASONING = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant")
FAMILIES = [
    Family("hermes", _hermes, _CHATML + "<tool_call>", added=("<tool_call>", "</tool_call>")),
    Family(
        "hermes",
        _hermes,
        _CHATML + "<tool_call> </think>",
        added=("<tool_call>", "</tool_call>", "<think>", "</think>"),
        reasoning=_THINK,
    ),
    Family("hermes", _hermes, _CHATML + "<tool_call>", special=("<tool_call>", "</tool_call>")),
    Family("qwen_xml", _xml, _CHATML + "<tool_call><function=", added=("<think>", "</think>"), reasoning=_THINK),
    Family("llama", _llama, "{{ messages }}{{ tools }}<|python_tag|>", special=("<|python_tag|>", "<|eom_id|>")),
    Family("llama", _llama, '{{ messages }}{{ tools }} {"name": function name, "parameters": dictionary}<|eot_id|>'),
    Family("mistral", _mistral_list, "{{ messages }}{{ tools }}[TOOL_CALLS]", special=("[TOOL_CALLS]",)),
    Family(
        "mistral",
        _mistral,
        "{{ messages }}{{ tools }}[TOOL_CALLS][ARGS]",
        special=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
        reasoning=("[THINK]", "[/THINK]"),
    ),
    Family(
        "deepseek",
        _deepseek,
        "{{ messages }}{{ tools }}" + _DEEPSEEK[0],
        added=(*_DEEPSEEK, "<think>", "</think>"),
        reasoning=("<think>", "</think>"),
    ),
    Family("deepseek", _deepseek_v3, "{{ messages }}{{ tools }}```json" + _DEEPSEEK[0], special=_DEEPSEEK),
    Family(
        "harmony",
        _harmony,
        "{{ messages }}{{ tools }}<|channel|>",
        special=_HARMONY,
        reasoning=_HARMONY_REASONING,
        answer="<|channel|>final<|message|>",
        most=1,
    ),
    Family(
        "gemma4",
        _gemma4,
        "{{ messages }}{{ tools }}<|tool_call>",
        special=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        reasoning=("<|channel>thought\n", "<channel|>"),
    ),
    Family("gemma3", _gemma3, "{{ messages }}{{ tools }}<start_of_turn>```tool_code"),
]


@functools.cache
def tokenizer_of(index: int) -> Tokenizer:
    """Return a small byte-level tokenizer with the tokens of ``FAMILIES[index]``."""
    family = FAMILIES[index]
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    calls = [("get_weather", {"city": "Paris", "days": 3, "exact": True}), ("search", {"query": "x\ny", "n": None})]
    texts = [*TEXTS, *(family.render([call]) for call in calls)] * 2
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, special_tokens=["<|end_of_text|>"], initial_alphabet=alphabet)
    backend.train_from_iterator(texts, trainer)
    backend.add_special_tokens([AddedToken(token, special=True) for token in family.special])
    backend.add_tokens([AddedToken(token, special=False) for token in family.added])
    return Tokenizer(backend, TextConfig(backend.get_vocab_size(), frozenset({0}), 0, {}, family.template))


@dataclass
class Read:
    """What an output consists of."""

    content: str = ""
    reasoning: str = ""
    calls: list[tuple[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, events: list[OutputEvent]) -> Read:
        """Join events, as a client does."""
        content, reasoning = [], []
        calls: list[tuple[str, list[str]]] = []
        for event in events:
            match event:
                case ContentDelta(text):
                    content.append(text)
                case ReasoningDelta(text):
                    reasoning.append(text)
                case CallStart(index, name):
                    assert index == len(calls)
                    calls.append((name, []))
                case ArgumentsDelta(index, text):
                    assert index == len(calls) - 1
                    calls[index][1].append(text)
        return cls("".join(content), "".join(reasoning), [(name, "".join(parts)) for name, parts in calls])

    @property
    def values(self) -> list[Call]:
        """Return the calls with their arguments as values."""
        return [(name, json.loads(text)) for name, text in self.calls]


def read_tokens(
    chat: ChatFormat, tokenizer: Tokenizer, tools: list[Tool], chunks: list[list[int]], reasoning_open: bool = False
) -> Read:
    """Read an output that comes in these chunks of tokens."""
    marked, parser = MarkedDetokenizer(tokenizer, chat.markers), chat.parser(tools, reasoning_open=reasoning_open)
    events = [event for chunk in chunks for event in parser.push(marked.push(chunk))]
    return Read.of(events + parser.push(marked.finish()) + parser.finish())


class _Tokens:
    """A vocabulary as llguidance's wrapper wants it: each token is the bytes that our detokenizer makes of it."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        size = tokenizer.config.vocab_size
        self.eos_token_id = size
        pieces = [tokenizer.token_bytes[token] for token in range(size)]
        self.special_token_ids = [size, *(token for token, piece in enumerate(pieces) if piece is None)]
        names = [tokenizer.token_text(token).encode() for token in range(size)]
        self.tokens = [_bytes(piece, name) for piece, name in zip(pieces, names, strict=True)] + [b"<end>"]
        self._encode = tokenizer.spelling

    def __call__(self, text: str) -> list[int]:
        return self._encode(str(text))


def _bytes(piece: bytes | str | None, name: bytes) -> bytes:
    return name if piece is None else piece if isinstance(piece, bytes) else piece.encode()


def grammar_tokens(tokenizer: Tokenizer) -> llguidance.LLTokenizer:
    """Return llguidance's view of a vocabulary."""
    return llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Tokens(tokenizer)))


def pieces_of(chat: ChatFormat, tokenizer: Tokenizer, text: str) -> list[Piece]:
    """Return an output as its characters and markers."""
    special = {name: Marker(token, name) for name, token in tokenizer.special_tokens.items() if token in chat.markers}
    if not special:
        return list(text)
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return [one for part in parts for one in ([special[part]] if part in special else part)]


def whole(pieces: list[Piece]) -> list[Piece]:
    """Return pieces with neighbouring texts joined."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and isinstance(piece, str) and isinstance(joined[-1], str):
            joined[-1] += piece
        else:
            joined.append(piece)
    return joined


def grows_with_length(read: Callable[[int], Any]) -> bool:
    """Return whether reading so many characters takes time that grows with the number, and not with its square.

    Eight times as many take 64 times as long in the latter case.
    """

    def seconds(size: int) -> float:
        began = time.process_time()
        read(size)
        return time.process_time() - began

    short = min(seconds(50_000) for _ in range(3))
    return any(seconds(400_000) < 24 * max(short, 0.01) for _ in range(3))
