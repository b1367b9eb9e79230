"""How long something takes on a device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from benchmarks.contact.stage import Contact

_WARM_UP, _TIMES = 3, 10


def seconds_of(contact: Contact, call: Callable[[], object]) -> float:
    """Return the median seconds of ``call``, each by events of the device around it; on a CPU by the clock."""
    if contact.dry:
        begun = time.perf_counter()
        call()
        return time.perf_counter() - begun
    for _ in range(_WARM_UP):
        call()
    contact.wait()
    pairs = []
    for _ in range(_TIMES):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()
        end.record()
        pairs.append((begin, end))
    contact.wait()
    return statistics.median(begin.elapsed_time(end) for begin, end in pairs) / 1000


def graph_seconds_of(contact: Contact, call: Callable[[], object]) -> float:
    """Return the median seconds of ``call`` in a CUDA graph, in which nothing waits for the host."""
    if contact.dry:
        return seconds_of(contact, call)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what the call reads may still be on its way
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_TIMES):
            call()
    return seconds_of(contact, graph.replay) / _TIMES
