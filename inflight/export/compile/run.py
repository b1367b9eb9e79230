"""Commands of upstream's tools: what they are, and how they are run and watched."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.manifest import TENSORRT_LLM_IMAGE

_SAYS_WHY = re.compile(r"\b(\w*(?:Error|Exception)\b|error:|\[E\]|No space left|out of memory)", re.IGNORECASE)
_TERMINATE_S = 10


@dataclass(frozen=True)
class Command:
    """One command line, what it is for, and the files that are there when it has succeeded."""

    purpose: str
    argv: tuple[str, ...]
    produces: tuple[Path, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the caller's own."""

    def __str__(self) -> str:
        """Return the line that a shell would take."""
        return shlex.join([*(f"{name}={value}" for name, value in self.environment.items()), *self.argv])


def run_commands(commands: Sequence[Command], log_dir: Path, progress: Callable[[str], object]) -> None:
    """Run commands one after the other, each with its log in ``log_dir``, and tell ``progress`` each line they write.

    Raises:
        DeploymentError: a tool is missing, before anything has run; a command failed, or did not write what it
            should: one line, with the line of its log that says why.
    """
    for command in commands:
        require_tools(command)
    log_dir.mkdir(parents=True, exist_ok=True)
    for number, command in enumerate(commands, 1):
        log = log_dir / f"{number}-{Path(_tool(command)).stem}.log"
        for path in command.produces:  # else those of an earlier run would pass for this one's
            path.unlink(missing_ok=True)
        _run(command, log, f"{number}/{len(commands)} {command.purpose}", progress)


def _tool(command: Command) -> str:
    """Return the program, or the script that Python is to run."""
    return next(word for word in command.argv if not Path(word).name.startswith("python"))


def require_tools(command: Command) -> None:
    """Raise DeploymentError where the program, or the script that Python is to run, is not here."""
    program = command.argv[0]
    for needed in (program, _tool(command)):
        if shutil.which(needed) is None and (needed == program or not Path(needed).is_file()):
            raise DeploymentError(f"{needed} is not here, to {command.purpose}; the image {TENSORRT_LLM_IMAGE} has it")


def _run(command: Command, log: Path, step: str, progress: Callable[[str], object]) -> None:
    with log.open("w") as file:
        file.write(f"{command}\n")
        process = subprocess.Popen(
            command.argv,
            env=_environment(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            for line in process.stdout:
                file.write(line)
                if line.strip():
                    progress(f"{step}: {line.strip()}")
            code = process.wait()
        finally:
            _end(process)
    if code:
        raise DeploymentError(f"could not {command.purpose}: {_cause(log, code)}; its log is {log}")
    missing = [path for path in command.produces if not path.is_file()]
    if missing:
        raise DeploymentError(f"could not {command.purpose}: {missing[0]} was not written; its log is {log}")


def _environment(command: Command) -> dict[str, str]:
    """Return the tool's environment: programs beside it come first, and nothing leads it to our packages."""
    ours = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    if directory := os.path.dirname(command.argv[0]):  # else it is found on the PATH as it is
        environment["PATH"] = f"{os.path.abspath(directory)}{os.pathsep}{environment.get('PATH', os.defpath)}"
    return environment | dict(command.environment)


def _end(process: subprocess.Popen[str]) -> None:
    """End a tool, with the workers that it has started, if it still runs: the caller was interrupted."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(_TERMINATE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _cause(log: Path, code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}" + (", most likely for want of memory" if name == "SIGKILL" else "")
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()[1:] if line.strip()]
    telling = [line for line in lines if _SAYS_WHY.search(line)]
    return (telling or lines or ["it said nothing"])[-1]
