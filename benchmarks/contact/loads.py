"""What users do: a temperature, a deployment's defaults, requests that come one after the other."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.contact.engines import batches, best, launched_ahead, started
from benchmarks.contact.sizes import Batch
from benchmarks.contact.stage import Contact
from benchmarks.drive import Driver, Stream, ask, prompts
from benchmarks.random_weights import write_config
from benchmarks.transformers_peers import Rates
from inflight.engine.config import EngineConfig
from inflight.engine.engine import Engine
from inflight.engine.request import Request
from inflight.sampling import SamplingParams

_SETTINGS = ({"temperature": 0.8}, {"temperature": 0.8, "top_p": 0.95}, {"temperature": 0.8, "top_k": 50})
_LOAD = 0.6
"""Of the rate that the engine can keep up with, at which requests arrive."""


def sampling(contact: Contact, _case: str) -> None:
    """Measure a batch greedily, and with settings that draw."""
    batch = contact.sizes.sampled
    with started(contact, max_batch_size=batch.streams) as engine:
        batches(contact, engine, [batch], "greedy")
        for settings in _SETTINGS:
            name = ", ".join(f"{key} {value}" for key, value in settings.items())
            with contact.recorder.attempt(f"decode {batch.name}, {name}"):
                rate = [_drawn(engine, batch, settings) for _ in range(2)][-1].decode
                note = f"{1000 * batch.streams / rate:.2f} ms per step"
                contact.recorder.add(f"decode {batch.name}, {name}", round(rate, 1), "tok/s", note=note)


def _drawn(engine: Engine, batch: Batch, settings: dict[str, float]) -> Rates:
    asked = SamplingParams(batch.output, ignore_eos=True, seed=1, **settings)  # type: ignore[arg-type]
    given = prompts(np.random.default_rng(0), batch.streams, batch.prompt)
    begun = time.perf_counter()
    streams = Driver(engine).run(Request(one, asked) for one in given)
    return Rates.of(given, begun, [one.arrivals_s for one in streams])


def deployment(contact: Contact, _case: str) -> None:
    """Measure throughput with the settings that a deployment has if it says nothing."""
    from inflight.settings.deployment import Deployment

    sizes = contact.sizes
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig.of(Deployment(model=write_config(sizes.shape, Path(folder), fp8=False)), not contact.dry)
    names = ("max_batch_size", "max_tokens_per_step", "num_blocks", "kv_cache_fraction", "prefix_reuse", "automatic")
    chosen = {name: getattr(config, name) for name in names}
    settings = chosen if not contact.dry else {"max_batch_size": 3, "max_tokens_per_step": 24}
    with started(contact, **settings) as engine:
        told = engine._config
        contact.recorder.add("sequences at once", told.max_batch_size, note=f"{told.max_tokens_per_step} tokens a step")
        contact.recorder.add("KV cache", told.num_blocks * told.block_size, "tokens")
        batch = replace(sizes.sampled, streams=2 * told.max_batch_size if not contact.dry else 3)
        with contact.recorder.attempt("throughput, defaults"):
            begun = time.perf_counter()
            streams = Driver(engine).run(_asked(batch))
            seconds = time.perf_counter() - begun
            rate = sum(len(one.tokens) for one in streams) / seconds
            note = f"{batch.streams} requests of {batch.prompt} + {batch.output} tokens at once"
            contact.recorder.add("throughput, defaults", round(rate, 1), "tok/s", note=note)


def _asked(batch: Batch) -> Iterator[Request]:
    generator = np.random.default_rng(0)
    return (ask(prompt, batch.output) for prompt in prompts(generator, batch.streams, batch.prompt))


def arrivals(contact: Contact, _case: str) -> None:
    """Let requests arrive at random while others decode, and measure the times between tokens."""
    batch = contact.sizes.sampled
    with started(contact, max_batch_size=batch.streams) as engine:
        rates = best(engine, batch, 1)
        each_s = batch.prompt / rates.prefill + batch.output / rates.decode
        generator = np.random.default_rng(0)
        moments = np.cumsum(generator.exponential(each_s / _LOAD, contact.sizes.arrivals)).tolist()
        parts, steps = dict(engine.stats.step_part), engine.stats.steps
        ahead = launched_ahead(engine)
        streams = _arriving(Driver(engine), list(_asked(replace(batch, streams=len(moments)))), moments)
        steps = engine.stats.steps - steps
        gaps = sorted(gap for one in streams for gap in one.itl_s)
        first = statistics.median(one.ttft_s for one in streams)
        add = contact.recorder.add
        add("time between tokens, median", round(1000 * gaps[len(gaps) // 2], 2), "ms")
        add("time between tokens, p99", round(1000 * gaps[int(0.99 * (len(gaps) - 1))], 2), "ms")
        add("time to first token, median", round(1000 * first, 1), "ms", note=f"a request each {1000 * each_s:.0f} ms")
        add("steps launched ahead", round((launched_ahead(engine) - ahead) / steps, 3), "of steps")
        for name, spent in engine.stats.step_part.items():
            add(f"a step's {name}", round(1000 * (spent - parts[name]) / steps, 3), "ms", note="time of the host")


def _arriving(driver: Driver, requests: list[Request], moments: list[float]) -> list[Stream]:
    streams: list[Stream] = []
    begun = time.perf_counter()
    while len(streams) < len(requests) or driver.engine.busy:
        while len(streams) < len(requests) and time.perf_counter() - begun >= moments[len(streams)]:
            streams.append(driver.submit(requests[len(streams)]))
        if driver.engine.busy:
            driver.step()
        else:
            time.sleep(max(0.0, moments[len(streams)] + begun - time.perf_counter()))
    return streams
