"""The commands that measure a server from outside: its stages, what it shows, and how it stands faults and load."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from benchmarks import pipeline as measured
from benchmarks.checkpoints import LARGE, servable
from benchmarks.command import FOLDER, Output, OutputFile, Page, command_line, console, report_results, report_rows
from benchmarks.locust_beside_load import compare_tools
from benchmarks.observability import EngineLoad, measure_observability
from inflight.errors import EngineFailure
from inflight.report.failures import one_line_errors
from inflight.resources import DEMO, bundled

_SOAK_PAGE = Page(
    "The soak of a server",
    "A real server on this machine, asked by all its features at random for minutes, and then stopped. Written by "
    '`make bench ARGS="soak-server --output docs/results/soak"`, and with `soak-crashes` in its place; [the '
    "documentation](../../benchmarks.md) says what is asked, and what counts as a fault.",
    ("memory", "ends", "crashes", "crash-ends", "crash-memory", "no-crashes", "no-crash-ends", "no-crash-memory"),
)
_SERVING_PAGE = Page(
    "The server as a whole",
    '`inflight serve` from outside, with the demo. Written by `make bench ARGS="stop --output docs/results/serving"`.',
    ("stop",),
)
_RESUME_PAGE = Page(
    "Streams that go on",
    "Servers and replicas are killed under streams, which go on with the tokens that they would have had. Written by "
    '`make bench ARGS="resume --output docs/results/resume"`.',
    ("resume",),
)
_DRIFT_PAGE = Page(
    "Quality in production",
    "Answers of the gateway, scored again by a reference deployment. Written by "
    '`make bench ARGS="quality-drift --output docs/results/quality-in-production"`.',
    ("drift",),
)
_HOSTILE_PAGE = Page(
    "Hostile requests",
    "Every attack that we know by name, and random requests of every bad kind, over HTTP and gRPC and to the gateway, "
    "from a seed, to a server on the same machine, beside neighbours whose answers have to stay right. Written by "
    '`make bench ARGS="attacks --output docs/results/hostile"`, and with `hostile` in place of `attacks`. What is not '
    "defended is in SECURITY.md.",
    ("attacks", "beside", "hostile", "failures", "hostile-door", "failures-door"),
)


def pipeline(
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeat for several.")] = None,
    step_ms: Annotated[list[float] | None, typer.Option(help="Time of an engine step; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement.")] = 5,
    model: Annotated[Path, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO / "model",
    output: OutputFile = None,
) -> None:
    """Stream through the real ensemble with an engine that costs nothing: what the stages can do."""

    def results() -> Iterator[measured.PipelineResult]:
        for step in step_ms or [0.0, 2.0]:
            with measured.replay_server(model, step) as server:
                for count in streams or [1, 8, 32, 128]:
                    console.print(f"{count} streams, {step:g} ms per step")
                    yield measured.measure(server, count, step, seconds)

    title = "The pipeline, with an engine that costs nothing"
    report_rows(results, title, command_line("pipeline", f"--seconds {seconds:g}"), output)


def serving_cost(
    streams: Annotated[list[int] | None, typer.Option(help="Streams at once; repeat for several.")] = None,
    step_ms: Annotated[float, typer.Option(min=1, help="Time of a step of the replay engine.")] = 20,
    seconds: Annotated[float, typer.Option(min=0, help="Length of each measurement; each stream ends.")] = 5,
    setting: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure the portable engine too, with these settings: engine.threads=2,kv_cache.dtype=int8."
        ),
    ] = None,
    checkpoints: Annotated[Path, typer.Option(help="Where its checkpoint is, or is made.")] = FOLDER,
    output: OutputFile = None,
) -> None:
    """Count the CPU time that serving takes for a streamed token, process by process."""
    from benchmarks.serving_cost import ServingCost, measure_load, portable, replay

    counts = streams or [1, 8, 32]

    def results() -> Iterator[ServingCost]:
        model = servable(LARGE, checkpoints) if setting else DEMO / "model"
        computed = [portable(model, counts, one.split(",")) for one in setting or ()]
        for load in [replay(DEMO / "model", step_ms, counts), *computed]:
            console.print(load.name)
            yield from measure_load(load, seconds)

    chosen = [f"--setting {one}" for one in setting or ()]
    command = command_line("serving-cost", f"--seconds {seconds:g}", *chosen)
    report_rows(results, "What serving costs for a token", command, output)


def tokenizer(
    words: Annotated[list[int] | None, typer.Option(help="Words per prompt; repeat for several.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each measurement; there are ten per row.")] = 2,
    model: Annotated[Path, typer.Option(help="Checkpoint whose tokenizer is used.")] = DEMO / "model",
    output: OutputFile = None,
) -> None:
    """Compare the tokenizer stage with the upstream ensemble's, rebuilt (it needs transformers)."""
    from benchmarks.tokenizer import measure_tokenizers  # with gRPC, which no other command needs to start

    title = "The tokenizer stage and upstream's preprocessing, requests per second"
    report_rows(
        lambda: measure_tokenizers(model, words or [10, 100, 500], seconds),
        title,
        command_line("tokenizer", f"--seconds {seconds:g}"),
        output,
    )


def locust(
    users: Annotated[list[int] | None, typer.Option(min=1, help="Users at once; repeat for several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each tool measures.")] = 3,
    seconds: Annotated[float, typer.Option(min=6, help="Length of each measurement, of which 5 s are left out.")] = 12,
    output: OutputFile = None,
) -> None:
    """Measure one server by `inflight load` and by locust in turn: how far their figures are apart."""
    report_rows(
        lambda: compare_tools(users or [1, 8, 32], rounds, seconds, console.print),
        "One server, measured by inflight load and by locust",
        command_line("locust", f"--rounds {rounds} --seconds {seconds:g}"),
        output,
    )


def observability(
    engine: Annotated[list[str] | None, typer.Option(help="engine.kind; repeat for several.")] = None,
    step_ms: Annotated[
        list[float] | None, typer.Option(min=0, help="Time of a step of the replay engine; repeat for several.")
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Streams at once.")] = 16,
    rounds: Annotated[int, typer.Option(min=1, help="How often each server is measured.")] = 7,
    seconds: Annotated[
        float, typer.Option(min=0.5, help="Length of each measurement; there are three per round.")
    ] = 1.5,
    model: Annotated[Path, typer.Option(help="Checkpoint to serve.")] = DEMO / "model",
    output: OutputFile = None,
) -> None:
    """Compare a server that shows nothing with one that has metrics, and one that has metrics and traces."""
    if step_ms and engine and "replay" not in engine:
        raise typer.BadParameter("only the replay engine's steps can be set", param_hint="--step-ms")
    chosen = [*(f"--engine {one}" for one in engine or ()), *(f"--step-ms {one:g}" for one in step_ms or ())]
    loads = [
        EngineLoad(kind, step)
        for kind in engine or ["replay", "pytorch"]
        for step in (step_ms or [0.0, 10.0] if kind == "replay" else [None])
    ]
    report_rows(
        lambda: measure_observability(model, loads, streams, rounds, seconds, console.print),
        "What metrics and traces cost",
        command_line("observability", *chosen, f"--streams {streams} --rounds {rounds} --seconds {seconds:g}"),
        output,
    )


def quality_drift(
    requests: Annotated[int, typer.Option(min=4, help="Chats of each served model, half of them greedy.")] = 64,
    tokens: Annotated[int, typer.Option(min=1, max=512, help="Tokens of each answer.")] = 64,
    output: Output = None,
) -> None:
    """Serve the demo whole and damaged, and see what a whole reference says of the answers."""
    with one_line_errors(console):
        from benchmarks.quality_drift import measure_drift

    command = command_line("quality-drift", f"--requests {requests} --tokens {tokens}")
    report_results(lambda: [measure_drift(requests, tokens, console.print)], command, output, _DRIFT_PAGE)


def resume(
    streams: Annotated[int, typer.Option(min=1, max=200, help="Streams in all; the batch has room for so many.")] = 200,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests and of what is killed when.")] = 0,
    output: Output = None,
) -> None:
    """Kill servers and replicas under streams, and compare each answer with the one of an unbroken run."""
    with one_line_errors(console):
        from benchmarks.resume import measure_resume

    command = command_line("resume", f"--streams {streams} --seed {seed}")
    report_results(lambda: [measure_resume(streams, seed, console.print)], command, output, _RESUME_PAGE)


def stop(
    rounds: Annotated[int, typer.Option(min=1, max=100, help="Stops beside each kind of client.")] = 5,
    output: Output = None,
) -> None:
    """Stop a server beside no client, an idle connection, a Prometheus and a stream; measure how long that takes."""
    with one_line_errors(console):
        from benchmarks.stop import measure_stop

    command = command_line("stop", f"--rounds {rounds}")
    report_results(lambda: [measure_stop(rounds, console.print)], command, output, _SERVING_PAGE)


def soak_server(
    directory: Annotated[Path, typer.Argument(help="Deployment directory.")] = DEMO,
    minutes: Annotated[float, typer.Option(min=0.1, help="Minutes of load.")] = 20,
    clients: Annotated[int, typer.Option(min=1, max=200, help="Requests at once.")] = 8,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    raw: Annotated[Path, typer.Option(help="Where every sample and every wrong end is written.")] = FOLDER
    / "soak-server.json",
    output: Output = None,
) -> None:
    """Serve a deployment under random load for some minutes and stop it; fail if it grows, loses a stream or hangs."""
    with one_line_errors(console):
        from benchmarks.server_soak.report import faults, results
        from benchmarks.server_soak.run import serve_and_soak, write_raw

        soaked = serve_and_soak(bundled(directory), minutes, clients, seed, console.print)
        write_raw(soaked, raw)
    command = command_line("soak-server", f"--minutes {minutes:g} --clients {clients} --seed {seed}")
    report_results(lambda: results(soaked), command, output, _SOAK_PAGE)
    with one_line_errors(console):
        if found := faults(soaked):
            raise EngineFailure(f"{'; '.join(found)}; {raw} has the whole of it")


def soak_crashes(
    minutes: Annotated[float, typer.Option(min=0.5, help="Minutes of load.")] = 30,
    crash_every: Annotated[float, typer.Option(min=15, help="Seconds from crash to crash.")] = 300,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the requests.")] = 0,
    door: Annotated[bool, typer.Option(help="Put the door in front.")] = True,
    raw: Annotated[Path, typer.Option(help="Where every sample and every wrong end is written.")] = FOLDER
    / "soak-crashes.json",
    output: Output = None,
) -> None:
    """Load the demo to 80 % of its knee and kill a process now and then; fail if a request is lost or a thing grows."""
    with one_line_errors(console):
        from benchmarks.server_soak.crash_report import faults, results
        from benchmarks.server_soak.crashes import soak_with_crashes
        from benchmarks.server_soak.run import write_raw

        soaked = soak_with_crashes(minutes, crash_every, seed, door, console.print)
        write_raw(soaked, raw)
    options = f"--minutes {minutes:g} --crash-every {crash_every:g} --seed {seed}{'' if door else ' --no-door'}"
    report_results(lambda: results(soaked), command_line("soak-crashes", options), output, _SOAK_PAGE)
    with one_line_errors(console):
        if found := faults(soaked):
            raise EngineFailure(f"{'; '.join(found)}; {raw} has the whole of it")


def hostile(
    http: Annotated[str, typer.Option(help="HTTP address of a server on this machine.")] = "127.0.0.1:8000",
    grpc: Annotated[str, typer.Option(help="Its gRPC address.")] = "127.0.0.1:8001",
    metrics: Annotated[str, typer.Option(help="The address of its metrics.")] = "127.0.0.1:8002",
    gateway: Annotated[
        str | None, typer.Option(help="The address of its gateway: a third of the requests are sent to it.")
    ] = None,
    requests: Annotated[int, typer.Option(min=20, help="How many requests.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Seed of the requests.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first request, to repeat a part of a run.")] = 0,
    output: Output = None,
) -> None:
    """Send hostile requests to a server on this machine; fail if it ends, leaks or answers its neighbours wrongly."""
    with one_line_errors(console):
        from benchmarks.hostile.siege import besiege, siege_results
        from benchmarks.hostile.target import Places, own_address

        places = Places(
            own_address(http, "--http", "http"),
            own_address(grpc, "--grpc", "grpc"),
            own_address(metrics, "--metrics", "http"),
            own_address(gateway, "--gateway", "http") if gateway else None,
        )
        siege = besiege(places, requests, seed, first, console.print)
    command = command_line("hostile", *(["--gateway ..."] if gateway else []), f"--requests {requests} --seed {seed}")
    report_results(lambda: siege_results(siege), command, output, _HOSTILE_PAGE)
    with one_line_errors(console):
        flaws = siege.flaws()
        for flaw in flaws:
            console.print(flaw, style="red", markup=False, soft_wrap=True)
        if flaws:
            raise EngineFailure(f"{len(flaws)} things are not as they should be")


def attacks(
    door: Annotated[
        list[bool] | None, typer.Option("--door/--no-door", help="The servers to attack; both without it.")
    ] = None,
    only: Annotated[str, typer.Option(help="Run the attacks whose name has this in it.")] = "",
    output: Output = None,
) -> None:
    """Run each known attack against the demo, without the door and with it; fail if one ends a server unexpectedly."""
    with one_line_errors(console):
        from benchmarks.hostile.attack_table import attack_table, flaws

        result = attack_table(door or [False, True], only, console.print)
    words = [("--door" if one else "--no-door") for one in door or ()] + ([f"--only '{only}'"] if only else [])
    report_results(lambda: [result], command_line("attacks", *words), output, _HOSTILE_PAGE)
    with one_line_errors(console):
        if found := flaws(list(result.rows)):
            raise EngineFailure("; ".join(found))


def beside(
    seconds: Annotated[float, typer.Option(min=1, help="Time beside each kind of clients, in each round.")] = 3,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds.")] = 7,
    output: Output = None,
) -> None:
    """Measure what a neighbour's stream feels of clients who send what is much work."""
    with one_line_errors(console):
        from benchmarks.hostile.beside import beside as measure

        result = measure(seconds, rounds, console.print)
    command = command_line("beside", f"--seconds {seconds:g} --rounds {rounds}")
    report_results(lambda: [result], command, output, _HOSTILE_PAGE)
