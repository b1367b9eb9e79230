"""`inflight chat`, `inflight generate` and the programs of client/, against a fake server."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from inflight.client import Client, Completion, GenerateOptions, Usage
from inflight.client.aio import ServedModel
from inflight.client.chat import Chat, summary
from inflight.client.commands import Result, _write, chat, generate
from inflight.serve.server import free_ports
from tests.support.fake_server import PIECES, FakeServer, Faults

TEXT = "".join(PIECES)
PROGRAMS = Path(__file__).parents[2] / "client"

app = typer.Typer()
app.command()(chat)
app.command()(generate)


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with FakeServer() as server:
        yield server


@pytest.fixture(params=["grpc", "http"])
def url(request: pytest.FixtureRequest, fake: FakeServer) -> str:
    return f"127.0.0.1:{fake.grpc_port}" if request.param == "grpc" else f"http://127.0.0.1:{fake.http_port}"


def inflight(*arguments: str, given: str = "") -> tuple[int, str, str]:
    """Run a command; return its exit code, standard output and standard error."""
    result = CliRunner().invoke(app, arguments, input=given)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_generate_answers_one_prompt(url: str, fake: FakeServer) -> None:
    code, out, err = inflight("generate", "Hi", "--url", url, "--max-tokens", "5", "--stop", "a", "--stop", "b")
    assert (code, out, err) == (0, TEXT + "\n", "")
    assert fake.requests[0]["max_tokens"] == 5
    assert fake.requests[0]["stop_words"] == ["a", "b"]
    assert "temperature" not in fake.requests[0]


def test_generate_keeps_the_order_of_many(url: str, fake: FakeServer, tmp_path: Path) -> None:
    fake.faults = Faults(together=4)
    prompts = [f"prompt {number}\u2028é" for number in range(20)]
    file = tmp_path / "prompts.txt"
    file.write_text("\n\n".join(prompts) + "\n", encoding="utf-8")
    code, out, _ = inflight("generate", "--file", str(file), "--url", url, "--jsonl", "--concurrency", "4")
    rows = [json.loads(line) for line in out.strip("\n").split("\n")]
    assert code == 0
    assert [row["prompt"] for row in rows] == prompts
    assert [row["index"] for row in rows] == list(range(20))
    assert {(row["text"], row["finish_reason"], row["input_tokens"]) for row in rows} == {(TEXT, "stop", 7)}
    assert fake.most_running == 4


def test_generate_fails_by_prompt_and_by_exit_code(url: str, fake: FakeServer) -> None:
    fake.faults = Faults(error="INVALID_ARGUMENT: text_input is too long")
    code, out, err = inflight("generate", "--url", url, given="one\ntwo\n")
    assert (code, out) == (1, "\n\n")
    assert "prompt 2: INVALID_ARGUMENT: text_input is too long" in err
    code, out, _ = inflight("generate", "--url", url, "--jsonl", given="one\n")
    assert code == 1
    assert json.loads(out)["error"] == {"status": "INVALID_ARGUMENT", "message": "text_input is too long"}


def test_generate_refuses_two_sources_and_bad_text(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xff\n")
    assert inflight("generate", "Hi", "--file", str(file))[0] == 2
    code, _, err = inflight("generate", "--file", str(file))
    assert code == 2
    assert "UTF-8" in err


@pytest.mark.parametrize("raw", [False, True])
def test_generate_asks_as_a_user_unless_told_not_to(url: str, fake: FakeServer, raw: bool) -> None:
    code, out, _ = inflight("generate", "Hi", "--url", url, *(["--raw"] if raw else []))
    assert (code, out) == (0, TEXT + "\n")
    (inputs,) = fake.requests
    assert inputs.get("text_input") == ("Hi" if raw else None)
    assert inputs.get("messages") == (None if raw else '[{"role": "user", "content": "Hi"}]')


@pytest.mark.parametrize(
    "refusal",
    [
        "UNIMPLEMENTED: messages: this checkpoint has no chat template; send text_input",
        "INVALID_ARGUMENT: unexpected inference input 'messages' for model 'ensemble'",
    ],
)
def test_generate_continues_texts_where_there_is_no_template(url: str, fake: FakeServer, refusal: str) -> None:
    fake.faults = Faults(refuse_messages=refusal)
    code, out, err = inflight("generate", "--url", url, "--concurrency", "1", given="one\ntwo\n")
    assert (code, out, err) == (0, f"{TEXT}\n" * 2, "")
    assert [("messages" in inputs, inputs.get("text_input")) for inputs in fake.requests] == [
        (True, None),
        (False, "one"),
        (False, "two"),
    ]


def test_chat_takes_a_pipe_as_one_message_and_is_quiet(url: str, fake: FakeServer) -> None:
    code, out, err = inflight("chat", "--url", url, "--system", "Be brief.", given="Hi,\n/help\nyou!\n")
    assert (code, out, err) == (0, TEXT, "")
    (inputs,) = fake.requests
    assert json.loads(inputs["messages"]) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi,\n/help\nyou!"},
    ]


def test_chat_over_a_pipe_fails_with_its_answer(fake: FakeServer) -> None:
    fake.faults = Faults(error="INVALID_ARGUMENT: messages: [bold]no[/bold] room")
    code, out, err = inflight("chat", "--url", f"127.0.0.1:{fake.grpc_port}", given="Hi\n")
    assert (code, out, err) == (1, "", "messages: [bold]no[/bold] room\n")
    assert inflight("chat", "--url", f"127.0.0.1:{fake.grpc_port}")[0] == 2


@pytest.mark.parametrize("command", [["chat"], ["generate", "Hi"], ["generate", "Hi", "--jsonl"]])
@pytest.mark.parametrize("scheme", ["", "http://"])
def test_no_server_is_one_line(command: list[str], scheme: str) -> None:
    (port,) = free_ports(1)
    code, out, err = inflight(*command, "--url", f"{scheme}127.0.0.1:{port}", given="Hi\n")
    assert (code, out) == (1, "")
    assert err == (
        f"inflight: no server answers at 127.0.0.1:{port} (connection refused); start a server with `inflight serve`, "
        "or name another address with --url\n"
    )


class _Interrupted(io.StringIO):
    def write(self, text: str) -> int:
        if text == PIECES[1]:
            raise KeyboardInterrupt
        return super().write(text)


def test_ctrl_c_cancels_the_answer_and_keeps_what_was_seen(fake: FakeServer) -> None:
    fake.faults = Faults(delay=1)
    notes = io.StringIO()
    with Client(f"127.0.0.1:{fake.grpc_port}") as client:
        conversation = Chat(client, GenerateOptions(), "", _Interrupted(), Console(file=notes))
        conversation.handle("Hi")
    assert fake.cancelled.wait(30)
    assert "cancelled" in notes.getvalue()
    assert conversation.turns[1]["content"] == "".join(PIECES[:2])


def test_a_chat_samples_as_the_models_makers_do_unless_it_is_told_how(fake: FakeServer) -> None:
    served = ServedModel("x", None, 256, {"temperature": 0.6, "top_p": 0.9, "repetition_penalty": 1.1, "later": 1})
    with Client(f"127.0.0.1:{fake.grpc_port}") as client:
        for told in (GenerateOptions(max_tokens=4), GenerateOptions(seed=1), GenerateOptions(temperature=0)):
            conversation = Chat(client, told, "", io.StringIO(), Console(file=io.StringIO()))
            conversation.sample_as(served)
            made = GenerateOptions(max_tokens=4, temperature=0.6, top_p=0.9, repetition_penalty=1.1)
            assert conversation.options == (made if told.max_tokens else told)
            conversation.sample_as(None)


def test_slash_commands(fake: FakeServer) -> None:
    notes, out = io.StringIO(), io.StringIO()
    with Client(f"127.0.0.1:{fake.grpc_port}") as client:
        conversation = Chat(client, GenerateOptions(), "", out, Console(file=notes, width=200))
        said = [
            "Hi",
            "/sytem x",
            "/system Be kind.",
            "Yo",
            "Again",
            "/clear",
            "/etc/hosts?",
            "/exit\nis a command",
            "/help",
        ]
        for message in said:
            conversation.handle(message)
        for leave in ("/exit", "/quit"):
            with pytest.raises(EOFError):
                conversation.handle(leave)
    assert "no command /sytem (did you mean '/system'?)" in notes.getvalue()
    assert "leave; so do /quit and Ctrl-D" in notes.getvalue()
    assert notes.getvalue().count("first token") == 5
    kind, answer = {"role": "system", "content": "Be kind."}, {"role": "assistant", "content": TEXT}
    asked = [{"role": "user", "content": text} for text in ("Hi", "Yo", "Again", "/etc/hosts?", "/exit\nis a command")]
    assert [json.loads(inputs["messages"]) for inputs in fake.requests] == [
        [asked[0]],
        [kind, asked[1]],
        [kind, asked[1], answer, asked[2]],
        [kind, asked[3]],
        [kind, asked[3], answer, asked[4]],
    ]


def test_summary_counts_only_the_time_after_the_first_token() -> None:
    answer = Completion("x", "stop", Usage(None, 11), first_chunk_seconds=0.5, seconds=2.5)
    assert summary(answer) == "first token 500 ms · 11 tokens · 5.0 tokens/s · stop"
    assert summary(Completion()) == "cancelled"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("program", "arguments", "wanted"),
    [
        ("grpc_stream.py", ["Hi"], [TEXT, "[stop, 5 tokens"]),
        ("http_generate.py", ["Hi"], [TEXT]),
        ("asyncio_fanout.py", ["One", "Two"], [repr(TEXT)]),
        ("cancel.py", ["Hi", "--chunks", "2"], ["".join(PIECES[:2]), "[cancelled after"]),
    ],
)
def test_programs_run(fake: FakeServer, program: str, arguments: list[str], wanted: list[str]) -> None:
    fake.faults = Faults(delay=0.02)
    port = fake.http_port if program.startswith("http") else fake.grpc_port
    command = [sys.executable, str(PROGRAMS / program), *arguments, "--url", f"127.0.0.1:{port}", "--max-tokens", "9"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=60, check=True)
    assert all(piece in done.stdout for piece in wanted)
    assert done.stderr == ""
    assert fake.requests[0]["max_tokens"] == 9


@pytest.mark.parametrize(("terminal", "written"), [(True, "a␛]0;owned␇b\n"), (False, "a\x1b]0;owned\x07b\n")])
def test_generate_does_not_let_a_text_act_on_the_terminal(
    monkeypatch: pytest.MonkeyPatch, terminal: bool, written: str
) -> None:
    class Output(io.StringIO):
        def isatty(self) -> bool:
            return terminal

    output = Output()
    monkeypatch.setattr(sys, "stdout", output)
    _write(Result(0, "Hi", Completion("a\x1b]0;owned\x07b")), jsonl=False)
    assert output.getvalue() == written
