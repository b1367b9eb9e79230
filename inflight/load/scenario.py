"""A scenario: what a load test sends, when, and what it must keep. One TOML file, validated, frozen.

It says what there is to say; the requests are made from it by ``workload``, and sent by ``runner``.
"""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from inflight.errors import InflightError, nearest
from inflight.load.arrivals import Phase, starts
from inflight.load.lengths import Lengths
from inflight.load.section import DIRECTORY, FileSection, Section, file_sections
from inflight.resources import SCENARIOS
from inflight.settings.section import explain


class ScenarioError(InflightError):
    """A scenario that cannot be run; the message is one line."""


class Slo(Section):
    """Limits that a request must keep to count as good; each is milliseconds, absent: no limit."""

    ttft_ms: float | None = Field(None, gt=0, description="until its first text")
    itl_ms: float | None = Field(None, gt=0, description="mean time between its tokens")
    e2e_ms: float | None = Field(None, gt=0, description="until its end")


class SystemPrompt(Section):
    """Tokens that prompts begin with, shared by the requests of a class."""

    tokens: int = Field(ge=1)
    variants: int = Field(1, ge=1, description="how many different ones there are; each session draws one")


class Documents(Section):
    """Retrieved documents that prompts contain: a fixed set, drawn with a skew."""

    count: int = Field(ge=1, description="documents in the set")
    tokens: Lengths = Field(description="length of each")
    per_request: int = Field(1, ge=1, description="different documents in one prompt")
    skew: float = Field(1.0, ge=0, description="the k-th document is drawn in proportion to k ** -skew; 0: all alike")

    @model_validator(mode="after")
    def _enough(self) -> Documents:
        if self.per_request > self.count:
            raise ValueError(f"`per_request` is {self.per_request}: there are only {self.count} documents (`count`)")
        return self


class Turns(Section):
    """A conversation: each turn sends all turns before it, with the server's own answers."""

    count: Lengths = Field(description="turns of a session")
    think_ms: Lengths | None = Field(
        None, description="milliseconds from an answer's end to the next turn; absent: none"
    )


class Conversations(FileSection):
    """Conversations of a ShareGPT-style file; answers get as many tokens as the recorded ones have."""

    max_turns: int | None = Field(None, ge=1, description="take no more turns of each; absent: all")


class Cancellations(Section):
    """A share of the requests is cancelled by the client, after so many tokens or so long."""

    share: float = Field(gt=0, le=1, description="of the requests")
    after_tokens: Lengths | None = Field(None, description="as soon as so many tokens have arrived")
    after_ms: Lengths | None = Field(None, description="so many milliseconds after sending")

    @model_validator(mode="after")
    def _one_kind(self) -> Cancellations:
        if (self.after_tokens is None) == (self.after_ms is None):
            raise ValueError("cancellations need `after_tokens` or `after_ms`, and not both")
        return self


class RequestClass(Section):
    """One kind of request."""

    name: str = Field(min_length=1)
    weight: float = Field(1.0, gt=0, description="share of the sessions, relative to the other classes")
    priority: int | None = Field(None, description="higher is served first; absent: not sent")
    client_id: str | None = Field(
        None, min_length=1, description="whose requests they are, where clients take turns; absent: not sent"
    )
    format: Literal["text", "messages"] = Field("text", description="a plain text, or a chat for the chat template")
    prompt_tokens: Lengths | None = Field(
        None, description="length of what each turn says anew; of a plain prompt, special tokens included"
    )
    output_tokens: Lengths | None = Field(None, description="max_tokens of each turn, at least 1")
    ignore_eos: bool = Field(True, description="answers are as long as drawn; false: they may end earlier")
    system_prompt: SystemPrompt | None = None
    documents: Documents | None = None
    turns: Turns | None = None
    conversations: Conversations | None = None
    cancellations: Cancellations | None = None
    slo: Slo | None = Field(None, description="in place of the scenario's")

    @model_validator(mode="after")
    def _has_prompts(self) -> RequestClass:
        if self.conversations is None and (self.prompt_tokens is None or self.output_tokens is None):
            raise ValueError("a class needs `prompt_tokens` and `output_tokens`, or `conversations`")
        for name in ("prompt_tokens", "turns", "documents"):
            if self.conversations is not None and getattr(self, name) is not None:
                raise ValueError(f"`{name}` and `conversations` exclude each other")
        return self


class Trace(FileSection):
    """A recorded trace in place of phases and classes: arrival times, lengths and shared prefixes."""

    time_scale: float = Field(1.0, gt=0, description="the trace's times are multiplied by it; below 1: faster")
    block_tokens: int = Field(512, ge=1, description="prompt tokens that one of `hash_ids` stands for")
    ramp_up_s: float = Field(0.0, ge=0, description="left out of the measured window, in seconds of the replay")


class Scenario(Section):
    """A load test."""

    name: str = Field("", description="the file's name by default")
    description: str = ""
    seed: int = Field(0, ge=0, description="the same seed makes the same requests, byte for byte")
    drain_s: float = Field(60.0, ge=0, description="how long requests may run on after the load; then they are ended")
    slo: Slo = Slo()
    phases: tuple[Phase, ...] = ()
    classes: tuple[RequestClass, ...] = ()
    trace: Trace | None = None
    _source: bytes = PrivateAttr(b"")

    @field_validator("classes")
    @classmethod
    def _names_differ(cls, classes: tuple[RequestClass, ...]) -> tuple[RequestClass, ...]:
        names = [one.name for one in classes]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two classes are called {name!r}")
        return classes

    @model_validator(mode="after")
    def _whole(self) -> Scenario:
        for name in ("phases", "classes"):
            if self.trace is not None and getattr(self, name):
                raise ValueError(f"`{name}` and `trace` exclude each other")
            if self.trace is None and not getattr(self, name):
                raise ValueError(f"`{name}` is missing; a scenario has `phases` and `classes`, or a `trace`")
        if len({phase.open for phase in self.phases}) > 1:
            raise ValueError("all `phases` must have a `rate`, or all a `concurrency`")
        steady = "".join("s" if phase.steady else "-" for phase in self.phases)
        if self.phases and ("s" not in steady or "-" in steady.strip("-")):
            raise ValueError("the `phases` that are `steady` must be one or more in a row")
        return self

    @property
    def open(self) -> bool:
        """Whether it is an open loop: requests are sent at times that do not depend on the answers."""
        return self.trace is not None or self.phases[0].open

    @property
    def steady(self) -> tuple[float, float]:
        """Begin and end of the phases that are measured, in seconds; not of a trace, whose times are in its file."""
        steady = [number for number, phase in enumerate(self.phases) if phase.steady]
        times = starts(self.phases)
        return times[steady[0]], times[steady[-1] + 1]

    @property
    def source(self) -> bytes:
        """The scenario's file as it was read; empty: it was made without a file."""
        return self._source

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each file that it names."""
        return {str(one.file): one.sha256 for one in file_sections(self)}

    @property
    def has_limits(self) -> bool:
        """Whether there is any limit for a request to keep."""
        return any(one not in (None, Slo()) for one in (self.slo, *(one.slo for one in self.classes)))

    def slo_of(self, class_name: str) -> Slo:
        """Return the limits of a class."""
        own = next((one.slo for one in self.classes if one.name == class_name), None)
        return own or self.slo

    def with_limits(self, slo: Slo) -> Scenario:
        """Return the scenario with other limits, of all classes."""
        classes = tuple(one.model_copy(update={"slo": None}) for one in self.classes)
        return self.model_copy(update={"slo": slo, "classes": classes})

    def scaled(self, factor: float) -> Scenario:
        """Return the scenario with all durations (of a trace: all times) multiplied by ``factor``; rates stay.

        Raises:
            ScenarioError: the factor is no positive, finite number.
        """
        if not 0 < factor < math.inf:
            raise ScenarioError(f"the durations cannot be multiplied by {factor:g}; a positive, finite number can")
        if self.trace is not None:
            trace = self.trace
            update = {"time_scale": trace.time_scale * factor, "ramp_up_s": trace.ramp_up_s * factor}
            return self.model_copy(update={"trace": trace.model_copy(update=update)})
        phases = [phase.model_copy(update={"duration_s": phase.duration_s * factor}) for phase in self.phases]
        return self.model_copy(update={"phases": tuple(phases)})


def load_scenario(name: Path) -> Scenario:
    """Read and validate a scenario: a file, or the name of a committed one.

    Raises:
        ScenarioError: one line that names the file, the key, the value and what is allowed; or the nearest scenario.
    """
    path = next((path for path in (name, SCENARIOS / f"{name}.toml") if path.is_file()), None)
    if path is None:
        known = sorted(path.stem for path in SCENARIOS.glob("*.toml"))
        raise ScenarioError(f"there is no scenario {str(name)!r}{nearest(str(name), known)}; known: {', '.join(known)}")
    try:
        source = path.read_bytes()
        data = tomllib.loads(source.decode("utf-8"))
    except OSError as error:
        raise ScenarioError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ScenarioError(f"{path}: not valid TOML: {error}") from error
    scenario = validate_scenario({"name": path.stem} | data, path.parent, str(path))
    scenario._source = source
    return scenario


def validate_scenario(data: dict[str, Any], directory: Path, source: str) -> Scenario:
    """Validate the settings of a scenario; its files are relative to ``directory``, ``source`` is named in errors."""
    try:
        return Scenario.model_validate(data, context={DIRECTORY: directory})
    except ValidationError as error:
        raise ScenarioError(f"{source}: {explain(error, Scenario)}") from None


def parse_slo(text: str) -> Slo:
    """Return the limits that ``ttft=200,itl=30,e2e=5000`` means, in milliseconds.

    Raises:
        ScenarioError: naming what is wrong and what is allowed.
    """
    known = {name.removesuffix("_ms"): name for name in Slo.model_fields}
    limits: dict[str, float] = {}
    for part in text.split(","):
        name, _, value = (piece.strip() for piece in part.partition("="))
        if name not in known:
            raise ScenarioError(f"--slo: unknown limit {name!r}{nearest(name, known)}; known: {', '.join(known)}")
        if known[name] in limits:
            raise ScenarioError(f"--slo: `{name}` is given twice")
        try:
            limit = float(value)
        except ValueError:
            limit = 0.0
        if not 0 < limit < math.inf:
            raise ScenarioError(f"--slo: `{name}` is {value!r}: milliseconds above 0 are expected, e.g. {name}=200")
        limits[known[name]] = limit
    return Slo(**limits)
