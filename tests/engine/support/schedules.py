"""Random schedules: which requests come when, to an engine with which settings; each one runs again as a script."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from inflight.engine.engine import Engine
from inflight.engine.request import FinishReason, Output, Request
from inflight.settings.speculation import SpeculationSettings
from tests.engine.support.checkpoints import checkpoint, greedy
from tests.engine.support.driving import ask, assert_idle, load
from tests.engine.support.searching import assert_found
from tests.engine.support.speculating import alike

MOST_TOKENS = 12
_BASES = tuple(tuple((7 * base + 3 * place * (base + 1)) % 50 + 1 for place in range(40)) for base in range(3))
"""Prompts begin with a part of one of these: many share a prefix, and some a part of a block."""


@dataclass(frozen=True)
class Arrival:
    """A request, and what becomes of it."""

    step: int
    """Before which it comes."""
    base: int
    length: int
    last: int
    """Token behind the shared part; 0: none."""
    max_tokens: int
    priority: int = 0
    client: str = ""
    beams: int = 1
    cancelled_at: int | None = None
    """Step before which it is cancelled, if it still runs."""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The token ids."""
        return (*_BASES[self.base][: self.length], *([self.last] if self.last else []))


@dataclass(frozen=True)
class Schedule:
    """A run of an engine from start to end."""

    model: str
    settings: dict[str, Any]
    """Of ``EngineConfig``; ``speculation`` is a method, the most drafts of a step, and guesses side by side."""
    arrivals: tuple[Arrival, ...]

    def script(self) -> str:
        """Return a Python program that does it all again."""
        return f"from tests.engine.support.schedules import Arrival, Schedule\n\n{self!r}.run()\n"

    def run(self) -> Engine:
        """Run it; every request gets what transformers gives it alone, and no block is lost at any step.

        Returns:
            The engine, idle; its statistics tell what has happened.

        Raises:
            AssertionError: something was not as it should be.
        """
        engine = load(checkpoint(self.model), **self.settings | {"speculation": self._speculation()})
        requests: dict[Arrival, Request] = {}
        outputs: dict[int, list[Output]] = {}
        step = 0
        while len(requests) < len(self.arrivals) or engine.busy:
            self._tell(engine, requests, step)
            for output in engine.step():
                outputs.setdefault(output.key, []).append(output)
            engine._cache.check()
            step += 1
        assert_idle(engine)
        for arrival, request in requests.items():
            _check(self.model, arrival, request, outputs[request.key])
        return engine

    def _speculation(self) -> SpeculationSettings:
        """The draft model is the served one with its weights shaken: it is right now and then."""
        method, most, candidates = self.settings.get("speculation") or (None, 1, 1)
        if method is None:
            return SpeculationSettings()
        drafts = {"draft_model": alike(self.model, 0.1)} if method == "draft_target" else {}
        return SpeculationSettings(
            method=method, max_draft_tokens=most, candidates=candidates, adaptive=False, **drafts
        )

    def _tell(self, engine: Engine, requests: dict[Arrival, Request], step: int) -> None:
        """Hand over what comes before this step, and cancel what is cancelled."""
        for arrival in self.arrivals:
            if arrival.step == step:
                more = {"beam_width": arrival.beams, "priority": arrival.priority}
                requests[arrival] = ask(arrival.prompt, arrival.max_tokens, **more)
                if self.settings.get("fairness") == "client":
                    requests[arrival].client_id = arrival.client
                engine.validate(requests[arrival])
                engine.submit(requests[arrival])
            if arrival.cancelled_at == step and arrival in requests:
                engine.cancel(requests[arrival].key)


def _check(model: str, arrival: Arrival, request: Request, outputs: list[Output]) -> None:
    last, tokens = outputs[-1], [token for output in outputs for token in output.tokens]
    expected = greedy(model, arrival.prompt, MOST_TOKENS)[: arrival.max_tokens]
    assert [output.finished for output in outputs].count(True) == 1, f"{arrival}: not one end"
    assert last.finished, f"{arrival}: an output came after the last one"
    if arrival.beams > 1:
        if last.finish_reason is not FinishReason.CANCELLED:
            assert_found(model, request, last)
        return
    if arrival.cancelled_at is not None and last.finish_reason is FinishReason.CANCELLED:
        expected = expected[: len(tokens)]
    else:
        assert last.finish_reason is FinishReason.LENGTH, f"{arrival}: {last.finish_reason}, {last.error}"
    assert tokens == expected, f"{arrival}: {tokens}; transformers: {expected}"


@st.composite
def _arrivals(draw: st.DrawFn) -> Arrival:
    step = draw(st.integers(0, 20))
    return Arrival(
        step=step,
        base=draw(st.integers(0, len(_BASES) - 1)),
        length=draw(st.integers(1, len(_BASES[0]))),
        last=draw(st.sampled_from((0, 0, 60, 61))),
        max_tokens=draw(st.integers(1, MOST_TOKENS)),
        priority=draw(st.integers(0, 2)),
        client=draw(st.sampled_from(("a", "b"))),
        beams=draw(st.sampled_from((1, 1, 1, 1, 1, 2, 3))),
        cancelled_at=draw(st.none() | st.none() | st.integers(step + 1, step + 15)),
    )


def schedules(
    models: tuple[str, ...], settings: dict[str | tuple[str, ...], st.SearchStrategy[Any]]
) -> st.SearchStrategy[Schedule]:
    """Return schedules of up to 12 requests, for each of ``models`` with any of ``settings``; a tuple's go together."""
    return st.builds(
        Schedule,
        st.sampled_from(models),
        st.fixed_dictionaries(settings).map(_apart),
        st.lists(_arrivals(), min_size=1, max_size=12, unique=True).map(tuple),
    )


def _apart(settings: dict[str | tuple[str, ...], Any]) -> dict[str, Any]:
    apart: dict[str, Any] = {}
    for name, value in settings.items():
        apart |= {name: value} if isinstance(name, str) else dict(zip(name, value, strict=True))
    return apart
