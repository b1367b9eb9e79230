"""The table of attacks and the soak with crashes: they tell what must not be, and what they send is what they say."""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from typing import Any

import pytest

from benchmarks.hostile import http2
from benchmarks.hostile.attack_table import flaws
from benchmarks.hostile.attacks import ATTACKS
from benchmarks.hostile.beside import WORKS, finding
from benchmarks.server_soak.crash_report import faults, results
from benchmarks.server_soak.crashes import Crash, Crashed
from benchmarks.server_soak.processes import GATEWAY, SERVER, Held, Sample
from benchmarks.server_soak.resuming import _end_of
from benchmarks.server_soak.session import WRONG
from inflight.client.transport import Address

MIB = 2**20


def test_an_ended_process_and_a_traceback_are_flaws() -> None:
    row = {"attack": "bodies", "door": "no", "ended": 0, "tracebacks": 0}
    assert flaws([row]) == []
    assert flaws([row | {"ended": 5}]) == ["bodies ended a process"]
    assert flaws([row | {"tracebacks": 2}]) == ["bodies: 2 tracebacks"]


def test_attacks_have_names_of_their_own() -> None:
    assert max(Counter(attack.name for attack in ATTACKS).values()) == 1


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"\0\0\0\4\0\0\0\0\0" + b"\0\0\x08\7\0\0\0\0\0" + b"\0\0\0\0" + b"\0\0\0\x0b", "PING: refused by GOAWAY"),
        (b"\0\0\x08\7\0\0\0\0\0" + b"\0\0\0\0" + b"\0\0\0\0", "PING: all frames are taken, then closed"),
    ],
)
def test_a_flood_tells_whether_the_server_has_refused_it(answer: bytes, said: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                while connection.recv(1 << 20):
                    pass
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert http2.flood(Address("http", *server.getsockname()), "PING") == said
        thread.join()


def test_the_frames_of_a_flood_have_their_lengths() -> None:
    for frames in http2.FLOODS.values():
        for frame in (one for place, one in enumerate(frames()) if place < 3):
            rest = frame
            while rest:
                length = int.from_bytes(rest[:3], "big")
                assert len(rest) >= 9 + length
                rest = rest[9 + length :]


def _event(index: int, reason: str | None) -> str:
    return json.dumps({"choices": [{"index": index, "finish_reason": reason}]})


@pytest.mark.parametrize(
    ("events", "how"),
    [
        ([_event(0, None), _event(1, "stop"), _event(0, "length"), "[DONE]"], "length"),
        ([_event(0, "stop"), "[DONE]"], WRONG),
        ([_event(0, "stop"), _event(1, "stop"), _event(1, "stop"), "[DONE]"], WRONG),
        ([_event(0, "stop"), _event(1, "stop")], WRONG),
        ([], WRONG),
    ],
)
def test_each_choice_of_a_stream_ends_once(events: list[str], how: str) -> None:
    assert _end_of(events, 2).how == how


def _soaked(growth: float = 0.0, shared_growth: float = 0.0, **more: Any) -> Crashed:
    """Two lives of Triton of 50 samples each, the second larger by so many MiB; the gateway lives all the time.

    Within each life Triton grows by 1 MiB with each sample.
    """
    samples = []
    for place in range(100):
        life, age = divmod(place, 50)
        triton = int((400 + age + life * growth) * MIB)
        held = {
            SERVER: Held(triton, triton, 20, 10, 7 + life, 5.0 * age),
            GATEWAY: Held(60 * MIB, 60 * MIB, 20, 10, 3, 5.0 * place),
        }
        samples.append(Sample(5.0 * place, held, int((4 + life * shared_growth) * MIB), place))
    soaked = Crashed(500.0, Counter({("plain", "stop"): 90}), [], samples, "", 3.0, 0, "", 20.0)
    soaked.crashes = [Crash(250.0, SERVER, 9, 8.0, 5.5)]
    for name, value in more.items():
        setattr(soaked, name, value)
    return soaked


def test_processes_are_compared_at_equal_ages() -> None:
    assert faults(_soaked()) == []
    assert faults(_soaked(growth=100)) == ["Triton has grown by 100 MiB"]
    assert faults(_soaked(shared_growth=100)) == ["the processes have 100 MiB more in /dev/shm"]
    [crashes, ends, memory] = results(_soaked(shared_growth=20))
    [row] = crashes.rows
    assert list(row.values()) == [4.2, "Triton", 9, 5.5, 8.0]
    assert ends.rows[0]["stop"] == 90
    assert [row["long_lives"] for row in memory.rows] == [2, 1, 2]
    assert [row["growth"] for row in memory.rows] == [0, 0, 20]
    assert [row["growth_within_a_life"] for row in memory.rows] == [25, 0, 0]  # behind a warm-up of 20 samples


def test_a_soak_without_a_crash_has_a_table_of_its_own() -> None:
    calm = results(_soaked(crashes=[]))[0]
    assert (calm.name, calm.rows) == ("no-crashes", [{"process": "none"}])


def test_what_is_lost_or_left_is_a_fault() -> None:
    wrong = _soaked(wrong=[{}], books="5 blocks are free", stop_s=40.0, exit_code=1, left_behind=["tokenizer"])
    assert faults(wrong) == [
        "1 requests ended wrong",
        "5 blocks are free",
        "`inflight serve` took 40.0 s to stop, with code 1",
        "tokenizer was left behind",
    ]


def test_what_neighbours_feel_is_compared_with_the_quiet_run() -> None:
    quiet = {"beside": "nobody", "p50_ms": 1.0, "longest_ms": 20.0}
    calm, loud = quiet | {"beside": "prompts", "longest_ms": 29.0}, quiet | {"beside": "grammars", "p50_ms": 90.0}
    assert "without them nowhere" in finding([quiet, calm])
    assert "without them: grammars (median: 90.0 times)." in finding([quiet, calm, loud])


def test_the_bodies_of_neighbours_are_json_of_their_sizes() -> None:
    for work in WORKS:
        body = work.body("demo", 7)
        assert json.loads(body)["model"] == "demo"
        assert ("MB" in work.name) == (len(body) > 4_000_000)
        assert ("15 MB" in work.name) == (len(body) > 14_000_000)
