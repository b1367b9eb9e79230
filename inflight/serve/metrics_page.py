"""One page of metrics for all that `inflight serve` runs: its own, and those of the parts that answer."""

from __future__ import annotations

import http.client
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait

from inflight.addresses import read_directly
from inflight.metrics import FAMILIES, PART_UP, READY, RESTARTS, MetricFamily
from inflight.serve.status import Status

SOURCE_S = 1.0
"""How long one part may take for its page; one that takes longer is left out."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Page = Callable[[], str | None]
"""Returns the page of one part; None: the part is away."""
_ABOUT = ("HELP", "TYPE")


def read_page(url: str, api_key: str | None = None) -> str | None:
    """Return the page of metrics of a part; None: the part is away."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        return read_directly(urllib.request.Request(url, headers=headers), SOURCE_S).decode(errors="replace")
    except (OSError, http.client.HTTPException):
        return None


class MetricsPage:
    """Collects the page. It is the same whichever parts are away, but for what these would say."""

    def __init__(self, status: Status, parts: Mapping[str, Page]) -> None:
        """``parts`` are the parts' own pages by their names."""
        self._status, self._parts = status, dict(parts)
        self._readers = ThreadPoolExecutor(max(1, len(self._parts)), thread_name_prefix="metrics-page")
        self._reads: dict[str, Future[str | None]] = {}

    def collect(self) -> bytes:
        """Return the page, after little more than ``SOURCE_S`` at the latest."""
        for name, read in self._parts.items():
            if name not in self._reads or self._reads[name].done():  # one that hangs is not asked again meanwhile
                self._reads[name] = self._readers.submit(read)
        wait(self._reads.values(), 2 * SOURCE_S)
        pages = {name: read.result() if read.done() else None for name, read in self._reads.items()}
        own = "\n".join(self._own({name: page is not None for name, page in pages.items()}))
        return merge([own, *filter(None, pages.values())]).encode()

    def close(self) -> None:
        """Take no more reads."""
        self._readers.shutdown(wait=False, cancel_futures=True)

    def _own(self, up: Mapping[str, bool]) -> Iterator[str]:
        yield from _lines(FAMILIES[RESTARTS], {f'{{cause="{one}"}}': n for one, n in self._status.restarts.items()})
        yield from _lines(READY, {"": int(self._status.ready)})
        yield from _lines(PART_UP, {f'{{part="{name}"}}': int(answers) for name, answers in up.items()})


def merge(pages: Iterable[str]) -> str:
    """Return one page of several, in Prometheus' text format; a family that more than one has is that of the first."""
    taken: set[str] = set()
    lines: list[str] = []
    for page in pages:
        here: set[str] = set()
        takes = True
        for line in page.splitlines():
            words = line.split(maxsplit=3)
            if len(words) > 2 and words[0] == "#" and words[1] in _ABOUT:
                here.add(words[2])
                takes = words[2] not in taken
            if takes and words:
                lines.append(line)
        taken |= here
    return "".join(f"{line}\n" for line in lines)


def _lines(family: MetricFamily, values: Mapping[str, int]) -> Iterator[str]:
    yield f"# HELP {family.name} {family.help}"
    yield f"# TYPE {family.name} {family.kind}"
    for labels, value in values.items():
        yield f"{family.name}{labels} {value}"
