"""`inflight chat` as its user sees it: the real program in a pseudo-terminal, its screen by a terminal emulator."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pyte
import pytest

from tests.support.fake_server import FakeServer, Faults

PROGRAM = Path(sys.executable).with_name("inflight")
ANSWER = "The engine decides after every single step which requests run in the next one, and nobody waits for long."
LINES = 60
LIMIT_S = 60
"""Of one wait; on a busy machine the program takes seconds to start."""


class Terminal:
    """A terminal of some size in which `inflight chat` runs."""

    def __init__(self, fake: FakeServer, columns: int, kind: str = "xterm-256color", shell: bool = False) -> None:
        self.written = b""
        self._screen = pyte.Screen(columns, LINES)
        self._stream = pyte.ByteStream(self._screen)
        self._ours, its = pty.openpty()
        fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, columns, 0, 0))
        # Not by a fork in Python, which gRPC's threads of this process do not survive.
        chat = [str(PROGRAM), "chat", "--url", f"127.0.0.1:{fake.grpc_port}"]
        command = ["setsid", "--ctty", *(["bash", "--norc", "--noprofile", "-i"] if shell else chat)]
        environment = os.environ | {
            "COLUMNS": "80",
            "TERM": kind,
            "PS1": "$ ",
            "PROMPT_TOOLKIT_NO_CPR": "1",
            "PYTHONUTF8": "1",
        }
        self._program = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
        os.close(its)
        if shell:
            self.type(" ".join(chat) + "\r")

    def type(self, keys: str) -> None:
        """Send what a keyboard would."""
        os.write(self._ours, keys.encode())

    @property
    def lines(self) -> list[str]:
        """What is on the screen."""
        return [line.rstrip() for line in self._screen.display]

    def wait_for(self, pattern: str, times: int = 1) -> None:
        """Wait until the screen has what ``pattern`` matches, so many times."""
        deadline = time.monotonic() + LIMIT_S
        while len(re.findall(pattern, "\n".join(self.lines), re.MULTILINE)) < times:
            assert time.monotonic() < deadline, "\n".join(self.lines)
            if not self._read():
                break
        assert len(re.findall(pattern, "\n".join(self.lines), re.MULTILINE)) >= times, "\n".join(self.lines)

    def _read(self) -> bool:
        """Show what the program has written, and return whether it may write more."""
        if not select.select([self._ours], [], [], 0.1)[0]:
            return True
        try:
            read = os.read(self._ours, 65536)
        except OSError:  # the program has ended
            return False
        self.written += read
        self._stream.feed(read)
        return True

    def wait_for_prompt(self, number: int) -> None:
        """Wait for the prompt that ``number - 1`` came before, and until it reads keys: Ctrl-D is lost before."""
        self.wait_for("^>", number)
        deadline = time.monotonic() + LIMIT_S
        while termios.tcgetattr(self._ours)[3] & termios.ICANON:
            assert time.monotonic() < deadline, "\n".join(self.lines)
            time.sleep(0.01)

    def end(self) -> int | None:
        """Wait for the program's end and return its exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read():
            assert time.monotonic() < deadline, "\n".join(self.lines)
        os.close(self._ours)
        return self._program.wait(LIMIT_S)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer(pieces=tuple(re.findall(r".{1,4}", ANSWER))) as server:
        yield server


def asked(fake: FakeServer) -> list[str]:
    return [json.loads(inputs["messages"])[-1]["content"] for inputs in fake.requests if "messages" in inputs]


@pytest.mark.proof
@pytest.mark.parametrize("columns", [20, 40, 80, 120])
def test_words_are_whole_at_any_width(fake: FakeServer, columns: int) -> None:
    terminal = Terminal(fake, columns)
    terminal.wait_for_prompt(1)
    terminal.type("Hi\r")
    terminal.wait_for_prompt(2)
    lines = terminal.lines
    start = lines.index("> Hi") + 1
    end = next(number for number, line in enumerate(lines) if line.startswith("first token"))
    assert " ".join(lines[start:end]) == ANSWER
    for line, below in itertools.pairwise(lines[start:end]):
        assert len(line) + 1 + len(below.split()[0]) > columns
    assert " ".join("".join(f" {line}" for line in lines[: start - 1]).split()).endswith("/exit or Ctrl-D leaves")
    terminal.type("/exit\r")
    assert terminal.end() == 0


@pytest.mark.proof
def test_a_pasted_text_is_one_message(fake: FakeServer) -> None:
    terminal = Terminal(fake, 80)
    terminal.wait_for_prompt(1)
    terminal.type("\x1b[200~one\rtwo\r/exit\x1b[201~")
    terminal.wait_for("^  /exit")
    assert not fake.requests
    terminal.type("\r")
    terminal.wait_for_prompt(2)
    terminal.type('"""\r/help\ris what I ask\r"""\r')
    terminal.wait_for_prompt(3)
    assert asked(fake) == ["one\ntwo\n/exit", "/help\nis what I ask"]
    terminal.type("\x04")
    assert terminal.end() == 0


@pytest.mark.proof
def test_ctrl_c_ends_the_answer_and_what_is_pasted_meanwhile_is_kept(fake: FakeServer) -> None:
    fake.faults = Faults(delay=0.5)
    terminal = Terminal(fake, 80)
    terminal.wait_for_prompt(1)
    terminal.type("Hi\r")
    terminal.wait_for("^The engine")
    terminal.type("\x1b[200~one\rtwo\x1b[201~")
    terminal.type("\x03")
    terminal.wait_for("cancelled$")
    assert fake.cancelled.wait(LIMIT_S)
    terminal.wait_for("^  two")
    fake.faults = Faults()
    terminal.type("\r")
    terminal.wait_for("stop$")
    assert asked(fake) == ["Hi", "one\ntwo"]
    assert not [line for line in terminal.lines if "^C" in line or "200~" in line]
    terminal.wait_for_prompt(3)
    terminal.type("abc\x03")
    terminal.wait_for("^Ctrl-D or /exit leaves")
    terminal.type("/quit\r")
    assert terminal.end() == 0


@pytest.mark.proof
def test_a_server_that_goes_away_is_one_line_and_the_chat_goes_on(fake: FakeServer) -> None:
    terminal = Terminal(fake, 200)
    terminal.wait_for_prompt(1)
    fake.faults = Faults(hangup=True, after=2)
    terminal.type("Hi\r")
    terminal.wait_for(f"^the connection to 127.0.0.1:{fake.grpc_port} broke; ask again$")
    fake.__exit__()
    terminal.wait_for_prompt(2)
    terminal.type("Hi\r")
    terminal.wait_for(rf"^no server answers at 127.0.0.1:{fake.grpc_port} \(connection refused\); start a server")
    terminal.wait_for_prompt(3)
    fake.__enter__()
    terminal.type("/exit\r")
    assert terminal.end() == 0


def test_no_server_is_told_before_the_first_question(fake: FakeServer) -> None:
    fake.__exit__()
    terminal = Terminal(fake, 80)
    terminal.wait_for("inflight serve")
    assert " ".join(" ".join(terminal.lines).split()) == (
        f"inflight: no server answers at 127.0.0.1:{fake.grpc_port} (connection refused); start a server with "
        "`inflight serve`, or name another address with --url"
    )
    assert terminal.end() == 1
    fake.__enter__()


@pytest.mark.proof
def test_ctrl_z_suspends(fake: FakeServer) -> None:
    terminal = Terminal(fake, 200, shell=True)
    terminal.wait_for_prompt(1)
    terminal.type("Hi\x1a")
    terminal.wait_for(r"^\[1\]\+ +Stopped")
    terminal.type("fg\r")
    terminal.wait_for("^> Hi")
    terminal.type("!\r")
    terminal.wait_for("stop$")
    assert asked(fake) == ["Hi!"]
    terminal.type("/exit\r")
    terminal.wait_for(r"^\$$")
    terminal.type("exit\r")
    assert terminal.end() == 0


@pytest.mark.proof
def test_a_dumb_terminal_gets_no_sequences(fake: FakeServer) -> None:
    terminal = Terminal(fake, 80, kind="dumb")
    terminal.wait_for_prompt(1)
    terminal.type("Hi\r")
    terminal.wait_for_prompt(2)
    terminal.type("\x04")
    assert terminal.end() == 0
    assert asked(fake) == ["Hi"]
    assert ANSWER in " ".join(terminal.written.decode().split())
    assert b"\x1b" not in terminal.written
