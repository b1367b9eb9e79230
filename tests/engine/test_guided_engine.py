"""Guided decoding in the engine, with random models: what ends by itself is valid, and nothing else changes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from typing import Any

import jsonschema
import pytest

from inflight.clock import now_ns
from inflight.engine.chunk import Chunk
from inflight.engine.engine import Engine
from inflight.engine.model_runner import ModelRunner
from inflight.engine.request import FinishReason, Output, Request
from inflight.errors import DeadlineExceeded, InvalidRequest, UnsupportedFeature
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings
from tests.engine.support.checkpoints import VOCAB, checkpoint
from tests.engine.support.driving import ask, assert_idle, finish, load, run
from tests.engine.support.guiding import byte_tokenizer, compiles_nothing, end_id, random_schema
from tests.engine.support.speculating import speculating
from tests.support.tables import each_row

PROMPT = tuple(range(40, 60))
SCHEMA = json.dumps({"type": "array", "items": {"enum": ["a", 12, None, True]}, "minItems": 4, "maxItems": 12})
RECURSIVE = 'root ::= item\nitem ::= "(" [a-c]* item? ")"'


def _engine(guided: dict[str, Any] | None = None, **more: Any) -> Engine:
    """Return an engine; ``guided``: its settings of guided decoding that are not the usual ones."""
    more["guided_decoding"] = GuidedDecodingSettings(**guided or {})
    return load(checkpoint("llama"), byte_tokenizer(), **{"max_batch_size": 16, "num_blocks": 1024} | more)


def _guided(kind: str, text: str = "", prompt: Sequence[int] = PROMPT, **more: Any) -> Request:
    start_ids = more.pop("start_ids", ())
    sampling = {"max_tokens": 200, "temperature": 1.0, "seed": 1, "end_ids": frozenset({end_id()})}
    return ask(prompt, **sampling | {"guide": Guide(kind, text, start_ids)} | more)  # type: ignore[arg-type]


def _text(output: Output) -> str:
    return byte_tokenizer().decode(output.tokens)


def _run(engine: Engine, *requests: Request) -> list[Output]:
    outputs = run(engine, requests)
    return [outputs[request.key] for request in requests]


@pytest.mark.proof
@pytest.mark.sweep(most=3)
@pytest.mark.parametrize(("seed", "rounds"), [(5, 4), *((seed, 9) for seed in range(10, 17))])
def test_what_ends_by_itself_is_valid(seed: int, rounds: int) -> None:
    """Random schemas, random models, temperature 1: an end is an end of the schema, or of ``max_tokens``."""
    source, engine, ended = random.Random(seed), _engine(), 0
    for _ in range(rounds):
        schemas = [random_schema(source) for _ in range(16)]
        requests = [
            _guided("json_schema", json.dumps(schema), [source.randrange(VOCAB) for _ in range(12)], seed=row)
            for row, schema in enumerate(schemas)
        ]
        for schema, output in zip(schemas, _run(engine, *requests), strict=True):
            assert output.error is None, (schema, output.error)
            if output.finish_reason is FinishReason.STOP:
                ended += 1
                validator = jsonschema.Draft202012Validator(
                    schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
                )
                validator.validate(json.loads(_text(output)))
    assert ended > 12 * rounds


@pytest.mark.proof
@each_row(
    ("kind", "text", "pattern"),
    [
        ("regex", "[0-9]{3}-(x|yz)", "[0-9]{3}-(x|yz)"),
        ("choice", '["a", "ab", "b c"]', "a|ab|b c"),
        ("ebnf_grammar", 'root ::= "<" [a-z]{2,5} ">"', "<[a-z]{2,5}>"),
        ("lark_grammar", 'start: "<" /[a-z]{2,5}/ ">"', "<[a-z]{2,5}>"),
    ],
)
def test_each_kind_ends_with_its_grammar(kind: str, text: str, pattern: str) -> None:
    for more in ({}, {"ignore_eos": True}, {"end_ids": frozenset[int]()}, {"temperature": 0.0}):
        for output in _run(_engine(), *(_guided(kind, text, **{"seed": seed} | more) for seed in range(4))):
            assert output.finish_reason is FinishReason.STOP
            assert re.fullmatch(pattern, _text(output))


def test_end_ids_end_only_a_complete_text() -> None:
    """With ``ignore_eos`` a text goes on as long as its guide allows more."""
    ends, ignores = _run(_engine(), _guided("regex", "[a-z]+"), _guided("regex", "[a-z]+", ignore_eos=True))
    assert (ends.finish_reason, ignores.finish_reason) == (FinishReason.STOP, FinishReason.LENGTH)
    assert re.fullmatch("[a-z]+", _text(ends))
    assert re.fullmatch("[a-z]{200,}", _text(ignores))


@pytest.mark.proof
def test_a_grammar_may_name_the_end_id() -> None:
    [output] = _run(_engine(), _guided("lark_grammar", 'start: "ab" <|end|>'))
    assert (_text(output), output.finish_reason) == ("ab", FinishReason.STOP)
    [other] = _run(_engine(), _guided("lark_grammar", 'start: "ab" <|other|> "c"'))
    assert other.tokens[-2:] == [end_id() + 1, *byte_tokenizer().spelling("c")]


def test_stop_strings_and_max_tokens_cut_a_guided_text() -> None:
    cut, short = _run(
        _engine(), _guided("regex", "(abc){50}", stop_strings=("cab",)), _guided("regex", "(abc){50}", max_tokens=5)
    )
    assert cut.finish_reason is FinishReason.STOP
    assert _text(cut)[: cut.text_limit] == "ab"
    assert short.finish_reason is FinishReason.LENGTH


@pytest.mark.proof
def test_tokens_without_a_text_are_never_made() -> None:
    """The model's vocabulary is larger than the tokenizer's; a class that allows everything does not allow those."""
    outputs = _run(_engine(), *(_guided("regex", "(?s:.)*", seed=seed, ignore_eos=True) for seed in range(8)))
    assert all(token < end_id() for output in outputs for token in output.tokens)


def test_no_bias_allows_what_the_guide_forbids() -> None:
    forbidden, allowed = byte_tokenizer().spelling("z")[0], byte_tokenizer().spelling("b")[0]
    bias = {forbidden: float("inf"), allowed: 1e4}
    [output] = _run(_engine(), _guided("regex", "[abc]{6}", logit_bias=bias, repetition_penalty=1.1))
    assert _text(output) == "bbbbbb"


@pytest.mark.proof
@each_row(
    ("text", "more", "said"),
    [
        ("[abc]{3}", {"min_tokens": 9}, "min_tokens is 9; guided_decoding_guide ends the text after "),
        ("a", {"bad": "a"}, "leave no token that could come next"),
        ("aab", {"bad": "b"}, "leave no token that could come next"),
    ],
)
def test_contradictions_end_their_request_alone(text: str, more: dict[str, Any], said: str) -> None:
    bad = [(token,) for piece in more.pop("bad", "") for token in byte_tokenizer().spelling(piece)]
    wrong, right = _guided("regex", text, bad_sequences=tuple(bad), **more), _guided("regex", "[abc]{3}")
    outputs = _run(_engine(), wrong, right)
    assert isinstance(outputs[0].error, InvalidRequest)
    assert said in str(outputs[0].error)
    assert (outputs[1].error, outputs[1].finish_reason) == (None, FinishReason.STOP)


@pytest.mark.proof
def test_a_guide_that_fails_under_way_ends_its_request_alone() -> None:
    """llguidance gives up on a row of more than 2,000 alternatives, which it meets with the first token."""
    alternatives = [{"type": "object", "properties": {"a": {"const": one}}, "required": ["a"]} for one in range(2500)]
    engine = _engine({"max_guide_bytes": 1 << 20})
    failing, fine = _guided("json_schema", json.dumps({"anyOf": alternatives})), _guided("regex", "[ab]{40}")
    outputs = _run(engine, failing, fine)
    assert "cannot be followed any further" in str(outputs[0].error)
    assert re.fullmatch("[ab]{40}", _text(outputs[1]))


def test_start_ids_leave_what_comes_before_free() -> None:
    engine = _engine()
    [free] = _run(engine, ask(PROMPT, 40, temperature=1.0, seed=1))
    start = tuple(free.tokens[10:12])
    before = next(place for place in range(41) if tuple(free.tokens[place : place + 2]) == start)
    [output] = _run(engine, _guided("choice", '["abc"]', start_ids=start))
    assert output.tokens[: before + 2] == free.tokens[: before + 2]
    assert byte_tokenizer().decode(output.tokens[before + 2 :]) == "abc"
    assert output.finish_reason is FinishReason.STOP


def test_no_end_before_the_guide_has_begun() -> None:
    never = (VOCAB - 1, VOCAB - 2, VOCAB - 1)
    bias = {end_id(): 1e4}
    [output] = _run(_engine(), _guided("choice", '["abc"]', start_ids=never, logit_bias=bias, max_tokens=30))
    assert output.finish_reason is FinishReason.LENGTH


@pytest.mark.proof
@each_row("method", ["ngram", "draft_target"])
@each_row("candidates", [1, 3])
def test_speculation_changes_no_token(method: str, candidates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And no draft that its guide forbids is verified."""
    verified: list[Chunk] = []
    compute = ModelRunner.run
    guides = [("json_schema", SCHEMA), ("ebnf_grammar", RECURSIVE), ("regex", "(ab|abc|b c){20,30}"), ("json", "")]
    requests = [(kind, text, {"seed": seed, "temperature": seed % 2}) for seed in range(4) for kind, text in guides]

    def outputs(engine: Engine) -> list[list[int]]:
        made = _run(engine, *(_guided(kind, text, **more) for kind, text, more in requests), ask(PROMPT, 60))
        assert all(output.error is None for output in made)
        return [output.tokens for output in made]

    plain = outputs(_engine())

    def spy(self: ModelRunner, chunks: Sequence[Chunk], *others: Any) -> Any:
        for chunk in chunks:
            guide = chunk.sequence.guide
            if chunk.drafts and guide is not None:
                verified.append(chunk)
                for path in _paths(chunk):
                    assert guide.allowed_prefix(path) == len(path)
        return compute(self, chunks, *others)

    monkeypatch.setattr(ModelRunner, "run", spy)
    engine = speculating(
        method=method, candidates=candidates, tokenizer=byte_tokenizer(), max_batch_size=20, num_blocks=1024
    )
    assert outputs(engine) == plain
    assert verified


def _paths(chunk: Chunk) -> list[list[int]]:
    paths: list[list[int]] = []
    for token, parent in zip(chunk.drafts, chunk.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@pytest.mark.proof
@each_row(
    "settings",
    [
        {"num_blocks": 60, "policy": "max_utilization", "prefix_reuse": False},
        {"num_blocks": 60, "policy": "max_utilization"},
        {"max_tokens_per_step": 20, "prefill_chunk_tokens": 3},
        {"cpu_step": "pytorch"},
        {"mode": "static"},
    ],
)
def test_no_setting_changes_a_guided_token(settings: dict[str, Any]) -> None:
    guides = [("json_schema", SCHEMA), ("ebnf_grammar", RECURSIVE), ("regex", "[ab]{30,60}")]
    requests = [
        (kind, text, {"seed": seed, "prompt": PROMPT[seed:] * 2 if kind == "regex" else PROMPT[seed:]})
        for seed in range(4)
        for kind, text in guides
    ]
    expected = _run(_engine(), *(_guided(kind, text, **more) for kind, text, more in requests))
    engine = _engine(**settings)
    _run(engine, *(_guided(kind, text, max_tokens=1) for kind, text in guides))  # kept: all requests run together
    outputs = _run(engine, *(_guided(kind, text, **more) for kind, text, more in requests))
    assert [output.tokens for output in outputs] == [output.tokens for output in expected]
    assert ("policy" in settings) == (engine._scheduler.preemptions > 0)


@pytest.mark.proof
def test_overlap_changes_no_guided_token(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [("json_schema", SCHEMA, 1), ("regex", "[ab]{30,60}", 2)]

    def outputs(engine: Engine) -> list[list[int]]:
        guided = (_guided(kind, text, seed=seed) for kind, text, seed in requests)
        return [output.tokens for output in _run(engine, *guided, ask(PROMPT, 150), ask(PROMPT[:3], 9))]

    expected = outputs(_engine())
    monkeypatch.setattr(ModelRunner, "overlaps", True)
    engine = _engine()
    assert outputs(engine) == expected
    assert engine._overlap is not None
    assert engine._overlap.launches  # once the guided requests have ended


@pytest.mark.proof
def test_free_requests_are_not_changed_by_guided_ones() -> None:
    free = [ask(PROMPT[place:], 40, temperature=1.0, seed=place) for place in range(4)]
    alone = [output.tokens for output in _run(_engine(), *free)]
    again = [ask(PROMPT[place:], 40, temperature=1.0, seed=place) for place in range(4)]
    guided = [_guided("json_schema", SCHEMA, seed=seed) for seed in range(6)]
    outputs = _run(_engine(), *guided[:3], *again, *guided[3:])
    assert [output.tokens for output in outputs[3:7]] == alone


def test_a_request_waits_for_its_guide_as_in_the_queue() -> None:
    engine = _engine()
    with compiles_nothing(engine):
        engine.submit(_guided("regex", "[ab]{3}"))
        assert engine.step() == []
        assert engine.num_waiting == 1
        assert engine.busy
        assert 0 < engine.due_in_s < 0.1
    [output] = finish(engine).values()
    assert output.error is None
    assert output.tokens


def test_a_request_can_be_cancelled_while_its_guide_is_compiled() -> None:
    engine, request = _engine(), _guided("regex", "[ab]{3}")
    with compiles_nothing(engine):
        engine.submit(request)
        engine.cancel(request.key)
        [output] = engine.step()
        assert output.finish_reason is FinishReason.CANCELLED
        assert (engine.busy, engine.num_waiting) == (False, 0)
        assert_idle(engine)
    [again] = _run(engine, _guided("regex", "[ab]{3}"))
    assert again.error is None


def test_a_deadline_can_pass_while_a_guide_is_compiled() -> None:
    engine = _engine()
    with compiles_nothing(engine):
        engine.submit(_guided("regex", "[ab]{3}", deadline_ns=now_ns() + 1))
        [output] = finish(engine).values()
    assert isinstance(output.error, DeadlineExceeded)


@pytest.mark.proof
def test_a_guide_that_takes_too_long_is_refused() -> None:
    engine = _engine({"compile_timeout_s": 0.01})
    slow, free = _guided("json_schema", '{"type": "integer", "multipleOf": 499979}'), ask(PROMPT, 5)
    outputs = _run(engine, slow, free)
    assert "takes more than 0.01 s of CPU time to compile" in str(outputs[0].error)
    assert outputs[1].tokens


def test_guides_are_compiled_once_and_kept_within_limits() -> None:
    engine = _engine({"cached_guides": 2})
    assert engine._guides is not None
    compiler = engine._guides._compiler
    _run(engine, *(_guided("regex", "[ab]{3}", seed=seed) for seed in range(5)))
    first = compiler.ask(Guide("regex", "[ab]{3}"))
    assert first.done.is_set()
    _run(engine, _guided("regex", "[cd]{3}"), _guided("regex", "("), _guided("regex", "[ef]{3}"))
    assert len(compiler._kept) == 2
    assert compiler.ask(Guide("regex", "[ab]{3}")) is not first


def test_failure_of_the_engine_ends_requests_that_wait_for_guides() -> None:
    engine = _engine()
    with compiles_nothing(engine):
        engine.submit(_guided("regex", "[ab]{3}"))
        [output] = engine.fail_all(InvalidRequest("all fail"))
    assert str(output.error) == "all fail"
    assert engine.num_waiting == 0


@each_row(
    ("request_", "error", "said"),
    [
        (
            _guided("json", beam_width=2, temperature=None, seed=None),
            UnsupportedFeature,
            "guided_decoding_guide_type is",
        ),
        (_guided("regex", "a" * 65_537), InvalidRequest, "guided_decoding_guide has 65537 bytes; the limit is 65536"),
        (_guided("json", start_ids=(VOCAB,)), InvalidRequest, f"guide_start_ids has token {VOCAB}"),
        (_guided("json", start_ids=(5, end_id())), InvalidRequest, f"guide_start_ids has token {end_id()}, which is"),
    ],
)
def test_what_is_seen_at_once_is_refused_at_once(request_: Request, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        _engine().validate(request_)


def test_an_engine_without_a_tokenizer_has_no_guides() -> None:
    with pytest.raises(InvalidRequest, match="guided_decoding_guide_type: this engine has no tokenizer"):
        load(checkpoint("llama")).validate(_guided("json"))
