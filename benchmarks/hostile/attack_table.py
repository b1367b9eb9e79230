"""Runs the table of attacks against `inflight serve` with the demo, without the door and with it in front."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

from benchmarks.hostile.attacks import ATTACKS, Attack
from benchmarks.hostile.pair import Serve, serving
from benchmarks.hostile.target import Holding, Target
from benchmarks.result import Result, Row
from inflight.errors import InvalidRequest

_LOOK_S = 1.0


def _attempt(serve: Serve, attack: Attack) -> Row:
    """Run one attack; return what was seen of it, whether the server has survived, and what it holds more."""
    target, restarts = Target(serve.front.places), serve.restarts
    held, answers = [target.holding()], Counter[str]()
    peak, looked = _mib(held[0]), time.monotonic()
    while len(held) <= attack.times and not target.gone():
        for answer in attack.run(serve.front):
            answers[answer] += 1
            if time.monotonic() > looked + _LOOK_S:
                peak, looked = max(peak, _mib(target.holding())), time.monotonic()
        serve.wait_until_served()
        if not target.gone():
            held.append(target.holding())
    growth = [_mib(after) - _mib(before) for before, after in pairwise(held)]
    return {
        "answers": ", ".join(f"{count} x {answer}" for answer, count in sorted(answers.items())),
        "ended": len(target.gone()),
        "restarts": serve.restarts - restarts,
        "cause": serve.last_cause if serve.restarts > restarts else "",
        "tracebacks": target.new_tracebacks(),
        "MiB_meanwhile": peak - _mib(held[0]),
        "MiB": growth[0] if growth else "-",
        "MiB_again": growth[1] if len(growth) > 1 else "-",
        "descriptors": held[-1].files - held[0].files,
    }


def _mib(held: Holding) -> int:
    return round((held.memory + held.shared) / 2**20)


def attack_table(doors: list[bool], chosen: str, say: Callable[[str], object]) -> Result:
    """Run every attack whose name has ``chosen`` in it, one after another, on each server.

    Raises:
        EngineFailure: a server does not serve after an attack.
        InvalidRequest: no attack is chosen.
    """
    attacks = [attack for attack in ATTACKS if chosen in attack.name]
    if not attacks:
        raise InvalidRequest(f"--only is {chosen!r}: no attack has this in its name")
    rows: list[Row] = []
    for door in doors:
        with serving(door) as serve:
            for attack in attacks:
                row = {"attack": attack.name, "door": "yes" if door else "no", **_attempt(serve, attack)}
                say(str(row))
                rows.append(row)
    rows.sort(key=lambda row: [attack.name for attack in ATTACKS].index(str(row["attack"])))
    return Result("attacks", "The attacks by name", _finding(rows), rows)


def _finding(rows: list[Row]) -> str:
    parts = []
    for door, words in (("no", "Without the door"), ("yes", "With the door")):
        of_one = [row for row in rows if row["door"] == door]
        if of_one:
            ended = [str(row["attack"]) for row in of_one if row["ended"]]
            told = sum(int(row["tracebacks"]) for row in of_one)
            parts.append(
                f"{words}, {len(of_one)} attacks: {', '.join(ended) if ended else 'none'} ended a process, and the "
                f"logs have {told} tracebacks."
            )
    return " ".join(parts) + (
        " MiB and descriptors are what all processes hold more than before the attack: while it lasts, after it, and "
        "once more after it is repeated. `inflight serve` has started again what had ended, and the next request was "
        "served."
    )


def flaws(rows: list[Row]) -> list[str]:
    """Return what should not have been: the end of a process, or a traceback."""
    found = [f"{row['attack']} ended a process" for row in rows if row["ended"]]
    return found + [f"{row['attack']}: {row['tracebacks']} tracebacks" for row in rows if row["tracebacks"]]
