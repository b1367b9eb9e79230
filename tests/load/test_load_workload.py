"""Requests are made as the scenario says: their lengths, what they share, and the same ones every time."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from inflight.client.request import build_request
from inflight.load.recordings import read_conversations, read_trace
from inflight.load.scenario import ScenarioError, validate_scenario
from inflight.load.workload import Session, Workload
from tests.load.support.scenarios import demo_writer, fixed, request_class, workload

MIXED = (
    request_class("chat", 12, 5, format="messages", turns={"count": fixed(3)}, system_prompt={"tokens": 30}),
    request_class(
        "rag",
        9,
        6,
        weight=2,
        documents={"count": 6, "tokens": {"distribution": "uniform", "min": 5, "max": 9}, "per_request": 2},
        cancellations={"share": 0.5, "after_tokens": {"distribution": "uniform", "min": 1, "max": 4}},
    ),
)


def _bytes(made: Workload, count: int = 40) -> bytes:
    """Return the requests of the first sessions as they are sent, and the arrival times."""
    sessions = [made.session(number) for number in range(count)]
    inputs = [
        build_request(one.prompt(turn, ["an answer"] * turn), one.options(turn), stream=True, request_id="x").inputs
        for one in sessions
        for turn in range(len(one.turns))
    ]
    return json.dumps([inputs, [repr(one) for one in sessions], made.arrivals]).encode()


def _tokens(session: Session, turn: int = 0) -> int:
    prompt = session.prompt(turn, [])
    assert isinstance(prompt, str)
    return demo_writer().count(prompt)


def test_the_same_seed_makes_the_same_bytes() -> None:
    phases = [{"duration_s": 20, "rate": 3}]
    first = _bytes(workload(*MIXED, phases=phases))
    assert first == _bytes(workload(*MIXED, phases=phases))
    assert first == _bytes(workload(*MIXED, phases=phases, seed=0))
    assert first != _bytes(workload(*MIXED, phases=phases, seed=1))


def test_a_session_does_not_depend_on_those_before_it() -> None:
    alone, after = workload(*MIXED), workload(*MIXED)
    for number in range(9):
        after.session(number)
    assert alone.session(9) == after.session(9)


@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_prompts_have_their_length(length: int) -> None:
    made = workload(request_class(prompt=length))
    assert {_tokens(made.session(number)) for number in range(20)} == {length}


def test_a_shared_prefix_is_shared_to_the_token() -> None:
    made = workload(request_class(prompt=10, system_prompt={"tokens": 50}))
    prompts = [str(made.session(number).prompt(0, [])).split(" ") for number in range(5)]
    assert {len(words) for words in prompts} == {60}
    assert len({tuple(words[:50]) for words in prompts}) == 1
    assert len({tuple(words[50:]) for words in prompts}) == 5


def test_variants_of_a_system_prompt() -> None:
    made = workload(request_class(system_prompt={"tokens": 50, "variants": 3}))
    assert len({made.session(number).system for number in range(60)}) == 3


def test_documents_are_drawn_with_a_skew_and_not_twice() -> None:
    documents = {"count": 5, "tokens": fixed(8), "per_request": 2, "skew": 1.0}
    made = workload(request_class(prompt=4, documents=documents))
    firsts: Counter[str] = Counter()
    for number in range(400):
        words = str(made.session(number).prompt(0, [])).split(" ")
        assert len(words) == 20
        first, second = " ".join(words[:8]), " ".join(words[8:16])
        assert first != second
        firsts[first] += 1
    shares = sorted((count / 400 for count in firsts.values()), reverse=True)
    weights = [1 / rank for rank in range(1, 6)]
    assert shares == pytest.approx([weight / sum(weights) for weight in weights], abs=0.07)


def test_weights_priorities_clients_and_cancellations() -> None:
    made = workload(
        request_class("a", weight=3, priority=5, client_id="shop"),
        request_class("b", cancellations={"share": 0.25, "after_ms": fixed(200)}, ignore_eos=False),
    )
    sessions = [made.session(number) for number in range(1000)]
    ours = [one for one in sessions if one.class_name == "b"]
    assert len(ours) / 1000 == pytest.approx(0.25, abs=0.05)
    assert sum(one.turns[0].cancel_after_s == 0.2 for one in ours) / len(ours) == pytest.approx(0.25, abs=0.09)
    options = {one.class_name: one.options(0) for one in sessions}
    assert (options["a"].priority, options["a"].client_id, options["a"].ignore_eos) == (5, "shop", True)
    assert (options["b"].priority, options["b"].client_id, options["b"].ignore_eos) == (None, None, None)


def test_a_conversation_sends_the_servers_answers() -> None:
    turns = {"count": fixed(3), "think_ms": fixed(250)}
    chat = workload(request_class(turns=turns, format="messages", system_prompt={"tokens": 6})).session(0)
    asked = [turn.text for turn in chat.turns]
    assert chat.prompt(2, ["one", "two"]) == [
        {"role": "system", "content": chat.system},
        {"role": "user", "content": asked[0]},
        {"role": "assistant", "content": "one"},
        {"role": "user", "content": asked[1]},
        {"role": "assistant", "content": "two"},
        {"role": "user", "content": asked[2]},
    ]
    assert [turn.think_s for turn in chat.turns] == [0, 0.25, 0.25]
    plain = workload(request_class(turns=turns)).session(0)
    first, second, _ = (turn.text for turn in plain.turns)
    assert plain.prompt(1, ["one"]) == f"{first} one {second}"


def _trace(path: Path, **trace: Any) -> Workload:
    data = {"name": "t", "trace": {"file": path.name, "block_tokens": 4, **trace}}
    return Workload(validate_scenario(data, path.parent, "t.toml"), demo_writer())


ROWS = [
    {"timestamp": 500, "input_length": 10, "output_length": 3, "hash_ids": [7, 8, 9]},
    {"timestamp": 2500, "input_length": 12, "output_length": 4, "hash_ids": [7, 8, 1]},
    {"timestamp": 1500, "input_length": 11, "output_length": 5, "hash_ids": [7, 2, 3]},
    {"timestamp": 3500, "input_length": 9, "output_length": 6},
]


def test_a_trace_shares_prefixes_exactly_by_its_hash_ids(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row | {"model": "any"}) + "\n" for row in ROWS))
    made = _trace(path, time_scale=0.5)
    assert made.arrivals == [0, 0.5, 1.0, 1.5]
    sessions = [made.session(number) for number in range(4)]
    assert [one.turns[0].max_tokens for one in sessions] == [3, 5, 4, 6]
    words = [str(one.prompt(0, [])).split(" ") for one in sessions]
    assert [_tokens(one) for one in sessions] == [10, 11, 12, 9]
    (seven, eight_nine), (also_seven, two_three), (both, one), own = (
        (words[0][:4], words[0][4:]),
        (words[1][:4], words[1][4:]),
        (words[2][:8], words[2][8:]),
        words[3],
    )
    assert seven == also_seven == both[:4]
    assert both == words[0][:8], "the blocks 7 and 8"
    assert len({tuple(part[:3]) for part in (seven, eight_nine, two_three, one, own)}) == 5, "nothing else is shared"


def test_a_trace_as_csv(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    lines = [f"{r['timestamp']},{r['input_length']},{r['output_length']},{' '.join(map(str, r.get('hash_ids', [])))}"  # type: ignore[arg-type]
             for r in ROWS]  # fmt: skip
    path.write_text("timestamp,input_length,output_length,hash_ids\n" + "\n".join(lines) + "\n")
    json_lines = tmp_path / "trace.jsonl"
    json_lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    assert read_trace(path) == read_trace(json_lines)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("nonsense", "line 2: not valid JSON"),
        ("[1]", "line 2: a JSON object is expected"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 1}', "line 2: `input_length` is 0: "),
        ('{"timestamp": 1, "input_length": 4}', "line 2: `output_length` is missing"),
        ('{"timestamp": 1e400, "input_length": 4, "output_length": 1}', "line 2: `timestamp` is inf: .* finite"),
        ('{"timestamp": 1, "input_length": 4, "output_length": 1, "hash_ids": [-5]}', "line 2: `hash_ids.0` is -5: "),
        (b"\xff\xfe", "cannot be read: 'utf-8' codec"),
    ],
)
def test_a_bad_trace_is_one_line(tmp_path: Path, line: str | bytes, reason: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_bytes(json.dumps(ROWS[0]).encode() + b"\n" + (line.encode() if isinstance(line, str) else line))
    with pytest.raises(ScenarioError, match=reason) as caught:
        read_trace(path)
    assert "\n" not in str(caught.value)


def test_a_trace_needs_a_duration(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(ROWS[0]) + "\n")
    with pytest.raises(ScenarioError, match="its first and last request are at the same time"):
        _trace(path)
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    with pytest.raises(ScenarioError, match="`trace.ramp_up_s` is 9.*the replay takes"):
        _trace(path, ramp_up_s=9.0)


def test_recorded_conversations(tmp_path: Path) -> None:
    said = [
        {"from": "system", "value": "Be short."},
        {"from": "human", "value": "One?"},
        {"from": "gpt", "value": "The first answer."},
        {"from": "human", "value": "Two?"},
        {"from": "gpt", "value": "Second."},
        {"from": "human", "value": "Unanswered?"},
    ]
    (tmp_path / "c.json").write_text(json.dumps([{"conversations": said}, {"conversations": said[:1]}]))
    kind = {"name": "s", "format": "messages", "conversations": {"file": "c.json"}}
    data = {"phases": [{"duration_s": 1, "rate": 1}], "classes": [kind]}
    session = Workload(validate_scenario(data, tmp_path, "s.toml"), demo_writer()).session(0)
    assert session.system == "Be short."
    assert [turn.text for turn in session.turns] == ["One?", "Two?"]
    assert [turn.max_tokens for turn in session.turns] == [
        demo_writer().count(text) for text in ("The first answer.", "Second.")
    ]
    assert len(read_conversations(tmp_path / "c.json", 1)[0].turns) == 1
    lines = tmp_path / "c.jsonl"
    lines.write_text(json.dumps({"conversations": said}) + "\n")
    assert read_conversations(lines) == read_conversations(tmp_path / "c.json")
    lines.write_text('{"conversations": [{"from": "robot", "value": "?"}]}\n')
    with pytest.raises(ScenarioError, match="conversation 1 is not"):
        read_conversations(lines)
    lines.write_text('{"conversations": []}\n')
    with pytest.raises(ScenarioError, match="no conversation has"):
        read_conversations(lines)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (b"half \\ud83d of one", "conversation 1 has half a character"),
        ("\xe9".encode("latin-1"), "cannot be read: 'utf-8' codec"),
    ],
)
def test_text_that_is_none_is_one_line(tmp_path: Path, value: bytes, reason: str) -> None:
    path = tmp_path / "c.json"
    turn = b'{"from": "human", "value": "%s"}, {"from": "gpt", "value": "x"}' % value
    path.write_bytes(b'[{"conversations": [' + turn + b"]}]")
    with pytest.raises(ScenarioError, match=reason) as caught:
        read_conversations(path)
    assert "\n" not in str(caught.value)


def test_shared_texts_that_were_forgotten_are_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"timestamp": n, "input_length": 4, "output_length": 1, "hash_ids": [n]} for n in range(40)]
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole = [_trace(path).session(number) for number in range(40)]
    monkeypatch.setattr("inflight.load.workload._TEXTS", 8)
    made = _trace(path)
    assert [made.session(number) for number in range(40)] == whole
    assert made._shared.cache_info().currsize == 8
    assert [made.session(number) for number in range(40)] == whole
