"""Conversations with tools: definitions, questions that a tool answers or none does, calls, results and answers.

The families of tools are written by hand in `corpus/_tools.yaml`. Each goes by a few names, so that the model has to
read the definitions. It does not know token ids or the model.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from demo.conversation import Message, Segment, Tool, segments_of, to_json
from demo.corpus import Corpus, fill_slots
from demo.values import Value, Values, listed

TOOLS_FILE = Path(__file__).parent / "corpus" / "_tools.yaml"
Call = tuple[str, dict[str, Value]]


@dataclass(frozen=True)
class Parameter:
    """One argument: the names that it may have, its kind of value, and whether a question may leave it out."""

    names: Sequence[str]
    value: str
    sometimes: bool = False


@dataclass(frozen=True)
class Family:
    """One thing that a tool does, with every way to define it and to ask for it."""

    names: Sequence[str]
    says: Sequence[str]
    parameters: Mapping[str, Parameter]
    asks: Sequence[str]
    gives: Sequence[Any]
    more: Mapping[str, Sequence[str]] = field(default_factory=dict)
    subject: str = ""
    group: str = ""


@dataclass(frozen=True)
class Defined:
    """A family's tool in one conversation: its name and what each of its arguments is called there."""

    family: Family
    name: str
    arguments: Mapping[str, str]
    definition: Tool


@dataclass(frozen=True)
class Asked:
    """What a turn asks for: the question, the calls that are right, and what answers it without a call."""

    question: str
    calls: Sequence[tuple[Defined, Mapping[str, Value]]] = ()
    answer: str = ""

    def messages(self) -> list[dict[str, Any]]:
        """Return the calls as a message has them."""
        return [{"function": {"name": tool.name, "arguments": named(tool, known)}} for tool, known in self.calls]


def named(tool: Defined, known: Mapping[str, Value]) -> dict[str, Value]:
    """Return the arguments under the names that the tool gives them, in the order of its definition."""
    return {name: known[role] for role, name in tool.arguments.items() if role in known}


class ToolTalk:
    """Writes conversations with tools."""

    def __init__(self, corpus: Corpus, words: Mapping[str, Any], values: Values) -> None:
        self._corpus = corpus
        self._words = words
        self._values = values
        self._families = [family_of(entry) for entry in words["families"]]

    def define(self, rng: random.Random, count: int) -> list[Defined]:
        """Return `count` tools of different groups in random order."""
        chosen: list[Family] = []
        while len(chosen) < count:
            family = rng.choice(self._families)
            if all(not fits_both(family, other) for other in chosen):
                chosen.append(family)
        return [self._defined(family, rng) for family in chosen]

    def _defined(self, family: Family, rng: random.Random) -> Defined:
        arguments: dict[str, str] = {}
        for role, parameter in family.parameters.items():
            if not parameter.sometimes or rng.random() < 0.4:
                arguments[role] = rng.choice(parameter.names)
        schema = {name: self._schema(name, family.parameters[role].value, rng) for role, name in arguments.items()}
        name = rng.choice(family.names)
        function: dict[str, Any] = {"name": name, "parameters": {"properties": schema}}
        if rng.random() < 0.9:
            function["description"] = rng.choice(family.says)
        return Defined(family, name, arguments, {"function": function})

    def _schema(self, name: str, kind: str, rng: random.Random) -> dict[str, Any]:
        schema: dict[str, Any] = {"type": "string"}
        if kind.startswith("#"):
            schema = rng.choice([{"type": "integer"}, {"type": "number"}, {"maximum": int(kind[1:]), "minimum": 1}])
        elif kind in ("degrees", "state"):
            schema["enum"] = list(self._values.lists[kind])
        elif kind == "city" and rng.random() < 0.15:
            schema["enum"] = rng.sample(self._values.lists[kind], rng.randint(2, 3))
        style, words = rng.random(), name.replace("_", " ")
        if style < 0.2:
            return {"title": words.title(), **schema}
        if style < 0.35:
            return {**schema, "description": rng.choice([f"The {words}.", f"the {words}"])}
        return schema

    def ask(self, tool: Defined, rng: random.Random) -> tuple[str, dict[str, Value]]:
        """Return a question that `tool` answers, and its arguments by role."""
        family = tool.family
        known = {role: self._value(tool, role, rng) for role in tool.arguments}
        left_out = {role for role in known if family.parameters[role].sometimes and rng.random() < 0.5}
        known = {role: value for role, value in known.items() if role not in left_out}
        question = self._values.fill(rng.choice(family.asks), known, rng)
        for role, phrases in family.more.items():
            if role in known:
                question += " " + self._values.fill(rng.choice(phrases), known, rng)
        return question, known

    def _value(self, tool: Defined, role: str, rng: random.Random) -> Value:
        """Return a value of an argument, one of its definition's if that says which there are."""
        schema = tool.definition["function"]["parameters"]["properties"][tool.arguments[role]]
        if "enum" in schema:
            return rng.choice(schema["enum"])
        return self._values.pick(tool.family.parameters[role].value, rng)

    def one(self, tools: Sequence[Defined], rng: random.Random) -> Asked:
        """Return a turn that needs one call."""
        tool = rng.choice(tools)
        question, known = self.ask(tool, rng)
        return Asked(self._typed(question, rng), [(tool, known)])

    def two(self, tools: Sequence[Defined], rng: random.Random) -> Asked:
        """Return a turn that needs two calls at once, of one tool or of two."""
        first, then = rng.choice(tools), rng.choice(tools)
        (question, known), (other, others) = self.ask(first, rng), self.ask(then, rng)
        subject = first.family.subject
        if subject and rng.random() < 0.5:
            others = known | {subject: self._value(first, subject, rng)}
            both = f"{known[subject]} and {rng.choice(['', 'in '] if subject == 'city' else [''])}{others[subject]}"
            question = self._values.fill(rng.choice(first.family.asks), known | {subject: both}, rng)
            return self._plain(Asked(question, [(first, known), (first, others)]), first.family, rng)
        joined = rng.choice(self._words["joins"]).format(first=question, then=other[0].lower() + other[1:])
        return Asked(joined, [(first, known), (then, others)])

    def _plain(self, asked: Asked, family: Family, rng: random.Random) -> Asked:
        """Return the turn without arguments that its question does not say."""
        left_out = {role for role, one in family.parameters.items() if one.sometimes}
        calls = [(tool, {r: v for r, v in known.items() if r not in left_out}) for tool, known in asked.calls]
        return Asked(self._typed(asked.question, rng), calls)

    def none(self, tools: Sequence[Defined], rng: random.Random) -> Asked:
        """Return a turn that no tool answers: what the model knows, or what it says that it does not know."""
        choice = rng.random()
        if choice < 0.55 or any(tool.family.group == "search" for tool in tools):
            fact = rng.choice(self._corpus.facts)
            return Asked(self._typed(rng.choice(fact.asks), rng), answer=fact.answer)
        unknown = self._corpus.unrelated[0]
        absent = [one for one in self._families if all(not fits_both(one, tool.family) for tool in tools)]
        if choice < 0.8 and absent:
            question, _ = self.ask(self._defined(rng.choice(absent), rng), rng)
        else:
            asks = [one for one in unknown.asks if any(f"{{{s}}}" in one for s in ("person", "food", "animal", "job"))]
            question = fill_slots(rng.choice(asks), rng, self._corpus.phrases)
        return Asked(self._typed(question, rng), answer=unknown.answer)

    def _typed(self, question: str, rng: random.Random) -> str:
        """Return the question as a hurried or polite person types it; what is copied into arguments stays as it is."""
        if rng.random() < 0.12:
            question = rng.choice(self._corpus.phrases["before"]) + question
        return question.rstrip("?.!") if rng.random() < 0.2 else question

    def result(self, tool: Defined, known: Mapping[str, Value], rng: random.Random) -> tuple[str, str]:
        """Return what a tool gives back, and how the model reports it."""
        subject = known.get(tool.family.subject)
        begin = f"{subject}:" if subject is not None else "The result is"
        if rng.random() < 0.05:
            error = rng.choice(self._words["errors"])
            return to_json({"error": error}), f"That failed: {error}."
        gives = rng.choice(tool.family.gives)
        if isinstance(gives, str):
            text = self._values.fill(gives, known, rng)
            return (text if rng.random() < 0.8 else to_json({"result": text})), f"{begin} {text.rstrip('.')}."
        data = {key: known[kind] if kind in known else self._values.pick(kind, rng) for key, kind in gives.items()}
        return to_json(data), f"{begin} {flat(data)}."

    def conversation(self, rng: random.Random) -> list[Segment]:
        """Return one conversation of one to four turns about the same tools."""
        tools = self.define(rng, rng.choices([1, 2, 3], [40, 35, 25])[0])
        messages: list[Message] = []
        if rng.random() < 0.25:
            messages.append({"role": "system", "content": rng.choice(self._corpus.phrases["system"])})
        thought, turns = "", rng.randint(1, 3)
        for turn in range(turns):
            kind = rng.choices([self.one, self.two, self.none], [58, 17, 25])[0]
            asked = kind(tools, rng)
            thought = self.add_turn(messages, asked, rng, stop_at_call=turn == turns - 1)
        return segments_of(messages, [tool.definition for tool in tools], thought if rng.random() < 0.2 else "")

    def add_turn(self, messages: list[Message], asked: Asked, rng: random.Random, stop_at_call: bool) -> str:
        """Append a question and all that follows it; return what the model may think before the last answer."""
        messages.append({"role": "user", "content": asked.question})
        if not asked.calls:
            messages.append({"role": "assistant", "content": asked.answer})
            return "No tool fits this."
        messages.append({"role": "assistant", "content": "", "tool_calls": asked.messages()})
        if stop_at_call and rng.random() < 0.6:
            return f"I call {listed(list(dict.fromkeys(tool.name for tool, _ in asked.calls)))}."
        results = [self.result(tool, known, rng) for tool, known in asked.calls]
        messages += [{"role": "tool", "content": text} for text, _ in results]
        messages.append({"role": "assistant", "content": " ".join(said for _, said in results)})
        return "The tool has answered."


def flat(data: Mapping[str, Value]) -> str:
    """Return `temperature 18, condition sunny`, or the value alone if there is one under `result`."""
    if list(data) == ["result"]:
        return str(data["result"])
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in data.items())


def fits_both(one: Family, other: Family) -> bool:
    """Return whether a question could be meant for either."""
    return one is other or (bool(one.group) and one.group == other.group)


def family_of(entry: Mapping[str, Any]) -> Family:
    """Return a family as the file has it."""
    return Family(**{**entry, "parameters": {role: Parameter(**one) for role, one in entry["parameters"].items()}})


def read_words(path: Path = TOOLS_FILE) -> dict[str, Any]:
    """Return what the file says."""
    words: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return words
