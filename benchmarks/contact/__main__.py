"""The first contact with a GPU: ``make gpu-contact ARGS=A``, then B, then C; docs/first-contact.md is its page.

Nothing beyond the standard library is needed here, and no network: what a stage lacks, it says.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path

from benchmarks.contact.plan import CALL_S, CALLS
from benchmarks.contact.record import lines
from benchmarks.contact.run import WITHOUT_KERNELS, Interrupted, Run
from benchmarks.contact.table import predictions, table

_DRY_CALL_S = 1800
_DRY_PATIENCE = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Run calls and print a table of each; return the exit status."""
    asked = _parser().parse_args(arguments)
    calls = asked.calls or (list(CALLS) if asked.dry_run else [])
    if not calls:
        _parser().error("name a call: A, B or C (or all of them, with --dry-run, on a CPU)")
    known = {stage.name for call in calls for stage in CALLS[call]}
    for name in asked.stage or ():
        if name not in known:
            _parser().error(f"there is no stage {name!r} in {', '.join(calls)}; there are {', '.join(sorted(known))}")
    with _signals() as came:
        try:
            asked.output.mkdir(parents=True, exist_ok=True)
            environment = _environment(asked)
            return max(_call(name, asked, environment, lambda: bool(came)) for name in calls)
        except OSError as error:
            _say(
                f"{error.filename or asked.output}: {error.strerror}; results cannot be kept there, and no more is run"
            )
            return 1
        except Interrupted:
            _say("interrupted; the results so far are kept")
            return 128 + came[0]


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Note what asks the program to end, instead of ending wherever it is: a process that just starts would be lost."""
    came: list[int] = []
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup: the call outlives the line to the machine
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, _: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _call(name: str, asked: argparse.Namespace, environment: dict[str, str], interrupted: Callable[[], bool]) -> int:
    stages = [stage for stage in CALLS[name] if not asked.stage or stage.name in asked.stage]
    if not stages:
        return 0
    if asked.dry_run:  # the interpreter is slow, and time-outs are a GPU's
        stages = [replace(stage, seconds=_DRY_PATIENCE * stage.seconds) for stage in stages]
    seconds = asked.seconds or (_DRY_CALL_S if asked.dry_run else CALL_S)
    run = Run(name, asked.output, environment, seconds, interrupted)
    known = len(lines(run.results))
    _say(f"call {name}: {', '.join(stage.name for stage in stages)}; results go to {run.results}")
    try:
        run.stages(stages)
    finally:
        found = lines(run.results)[known:]
        told = "a dry run: its figures say nothing" if asked.dry_run else "predictions are for an H200"
        _say(table(found, {} if asked.dry_run else predictions(), f"First contact, call {name} ({told})"))
    return int(any(line.get("outcome", "done") not in ("done", "skipped") for line in found))


def _environment(asked: argparse.Namespace) -> dict[str, str]:
    """Return what the stages have in their environment."""
    folders = [str(Path.cwd()), *_wheels(asked.wheels), *filter(None, [os.environ.get("PYTHONPATH")])]
    found = {
        "PYTHONPATH": os.pathsep.join(folders),
        "PYTHONUNBUFFERED": "1",
        "TRITON_CACHE_DIR": os.environ.get("TRITON_CACHE_DIR", str(Path(tempfile.gettempdir()) / "inflight-triton")),
        "TRITON_INTERPRET": "1" if asked.dry_run else "0",
        "CONTACT_DRY": "1" if asked.dry_run else "",
    }
    return found | (WITHOUT_KERNELS if asked.without_kernels else {})


def _wheels(folder: Path) -> list[str]:
    """Install the wheels that were brought along, where Python lacks one of them; return where they are then."""
    packages = sorted({wheel.name.partition("-")[0] for wheel in folder.glob("*.whl")})
    if all(any(metadata.distributions(name=package)) for package in packages):
        return []
    site = str(Path(tempfile.gettempdir()) / "inflight-wheels")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--upgrade"]
    # By name, for there may be wheels for several Pythons.
    done = subprocess.run([*pip, "--find-links", str(folder), "--target", site, *packages], check=False)
    if done.returncode:
        _say(f"the wheels in {folder} could not be installed; the stage imports says what is missing")
    return [site]


def _call_name(text: str) -> str:
    if text not in CALLS:
        raise argparse.ArgumentTypeError(f"there is no call {text!r}; there are {', '.join(CALLS)}")
    return text


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < math.inf:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r} is no positive number")


def _say(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    output = os.environ.get("OUT") or "artifacts/gpu-contact"
    parser = argparse.ArgumentParser("gpu-contact", description="The first contact of Inflight's engine with a GPU.")
    add = parser.add_argument
    add("calls", nargs="*", type=_call_name, metavar="A|B|C", help="each takes at most ten minutes")
    add("--dry-run", action="store_true", help="on a CPU, with Triton's interpreter, small; all calls unless named")
    add("--output", type=Path, default=Path(output), help=f"folder of contact.jsonl and the log ({output})")
    add("--wheels", type=Path, default=Path("artifacts/gpu-wheels"), help="folder of `make gpu-wheels`")
    add("--stage", action="append", help="only this stage; may be given several times")
    add("--seconds", type=_seconds, help=f"of each call ({CALL_S})")
    add("--without-kernels", action="store_true", help="PyTorch alone runs the engine's steps")
    return parser


if __name__ == "__main__":
    sys.exit(main())
