"""How far the guide layer keeps to JSON Schema: every instance goes through it token by token.

An instance is written as Python writes JSON, with its properties in the schema's order where the suite has them so.
Wrongly accepted is what is invalid and passes: there must be none. Wrongly refused is valid, and either its schema is
refused or it does not pass.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from llguidance import LLMatcher

from benchmarks.guided.suites import Case
from benchmarks.result import Result
from inflight.engine.guided.grammar import Grammars
from inflight.engine.guided.guide_check import parser_limits
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.errors import InvalidRequest
from inflight.resources import DEMO
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings
from inflight.text.tokenizer import Tokenizer

_REASON = re.compile(r"guided_decoding_guide: (?P<keyword>\S+) at (?P<place>the root|\S*): ?(?P<why>.*)")
_MOST_REASONS = 25


@dataclass
class _Counts:
    """What came of a suite."""

    schemas: int = 0
    refused_schemas: int = 0
    instances: int = 0
    right: int = 0
    wrongly_accepted: int = 0
    wrongly_refused_by_schema: int = 0
    wrongly_refused: int = 0
    accepted: list[str] = field(default_factory=list)
    """The topics of what was wrongly accepted."""


class GuideLayer:
    """Says whether the guide layer accepts an instance, as the demo model's tokens."""

    def __init__(self) -> None:
        self._tokenizer = Tokenizer.from_checkpoint(DEMO / "model")
        self._vocabulary = Vocabulary(self._tokenizer, self._tokenizer.config.vocab_size)
        settings = GuidedDecodingSettings()
        self._limits = parser_limits(settings.max_grammar_size, settings.max_lexer_states)
        self._grammars = Grammars(self._vocabulary.tokens, self._limits)

    def grammar(self, schema: Any) -> str:
        """Return a schema's grammar. Raises InvalidRequest: it is refused."""
        return self._grammars.of(Guide("json_schema", json.dumps(schema)))

    def accepts(self, grammar: str, instance: Any) -> bool:
        """Return whether the tokens of an instance pass one by one, and the text may end behind them."""
        matcher = LLMatcher(self._vocabulary.tokens, grammar, log_level=0, limits=self._limits)
        tokens = self._tokenizer.spelling(json.dumps(instance, ensure_ascii=False))
        return all(matcher.try_consume_tokens([token]) for token in tokens) and matcher.is_accepting()


def measure_conformance(name: str, title: str, cases: Iterable[Case]) -> Iterator[Result]:
    """Yield the table of a suite: by draft or source, then by what its schemas are refused for."""
    layer, counts, reasons = GuideLayer(), dict[str, _Counts](), Counter[str]()
    for case in cases:
        _count(layer, case, counts.setdefault(case.suite, _Counts()), reasons)
    yield Result(name, title, _finding(counts), [_row(suite, one) for suite, one in counts.items()])
    rows: list[dict[str, float | str]] = [
        {"keyword": keyword, "refused schemas": number} for keyword, number in reasons.most_common(_MOST_REASONS)
    ]
    finding = f"The {_MOST_REASONS} keywords, with llguidance's reasons, that most schemas are refused for."
    yield Result(f"{name}-refusals", f"{title}: what schemas are refused for", finding, rows)


def _count(layer: GuideLayer, case: Case, counts: _Counts, reasons: Counter[str]) -> None:
    counts.schemas += 1
    counts.instances += len(case.instances)
    try:
        grammar = layer.grammar(case.schema)
    except InvalidRequest as error:
        counts.refused_schemas += 1
        reasons[_reason(str(error))] += 1
        valid = sum(is_valid for _, is_valid in case.instances)
        counts.wrongly_refused_by_schema += valid
        counts.right += len(case.instances) - valid
        return
    for instance, is_valid in case.instances:
        accepted = layer.accepts(grammar, instance)
        counts.right += accepted == is_valid
        counts.wrongly_refused += is_valid and not accepted
        if accepted and not is_valid:
            counts.wrongly_accepted += 1
            counts.accepted.append(case.topic)


def _reason(error: str) -> str:
    """Return the keyword of a refusal, with what about it, where one keyword has several reasons."""
    found = _REASON.match(error)
    if found is None:
        return error.removeprefix("guided_decoding_guide").strip(" :")[:60]
    keyword, why = found["keyword"], found["why"]
    if why.startswith(("Unknown format", "Unsatisfiable", "Resource")):
        return f"{keyword}: {' '.join(why.split()[:3])}"
    return keyword


def _row(suite: str, counts: _Counts) -> Mapping[str, float | str]:
    return {
        "suite": suite,
        "schemas": counts.schemas,
        "refused": counts.refused_schemas,
        "instances": counts.instances,
        "right": counts.right,
        "wrongly accepted": counts.wrongly_accepted,
        "wrongly refused, schema refused": counts.wrongly_refused_by_schema,
        "wrongly refused, schema enforced": counts.wrongly_refused,
    }


def _finding(counts: Mapping[str, _Counts]) -> str:
    accepted = [topic for one in counts.values() for topic in one.accepted]
    instances = sum(one.instances for one in counts.values())
    if accepted:
        return f"Of {instances} instances {len(accepted)} are wrongly accepted: {', '.join(sorted(set(accepted)))}."
    return f"Of {instances} instances none is wrongly accepted."
