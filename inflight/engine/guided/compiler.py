"""The compiler of guides: it works on threads of its own, and keeps what it has compiled.

Nothing here is done by the engine's thread, which only asks whether a guide is ready. The first guide also waits for
the vocabulary, which is built on the first of these threads as the engine starts. A guide is checked in another process
first, which may hang or crash; only what it survives is compiled in this one.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from llguidance import LLMatcher

from inflight.engine.guided.check_process import STACK_BYTES
from inflight.engine.guided.check_process_handle import CheckProcess, GivenUp
from inflight.engine.guided.guide_check import compile_grammar, heap_bytes, parser_limits
from inflight.engine.guided.vocabulary import Vocabulary
from inflight.errors import EngineFailure, InflightError, InvalidRequest, QueueFull
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings

log = logging.getLogger(__name__)

_LONGEST_END_S = 10
_STATE_BYTES = 1 << 10
"""A state of a lexer takes less, with its transitions: 400 to 700 bytes were measured."""
_GROWN_BYTES_PER_S = 200_000_000
"""A lexer grows by less in a second of masks; this much was measured with the expressions that make it grow fastest."""
_GIVEN_UP_S = 60
"""So long a guide whose check was given up is refused at once. It would hold a process that checks guides again."""
_HEAP_LOOK_S = 10
"""Seconds between two looks at the heap."""
_Key = tuple[str, str]


@dataclass(eq=False, slots=True)
class CompiledGuide:
    """A guide that matchers can be copied from. Its copies share one lexer, which grows as they come to new places."""

    matcher: LLMatcher
    vocabulary: Vocabulary
    settings: GuidedDecodingSettings = field(default_factory=GuidedDecodingSettings)
    compiled_bytes: int = 0
    masks_s: float = 0.0
    """What the masks of its sequences have taken."""
    failed: bool = False
    """Whether a sequence could not follow it any further. Where the lexer is full, no other can either."""

    @property
    def bytes(self) -> int:
        """Most bytes of memory that it takes, as far as can be known: llguidance does not tell the size of a lexer."""
        grown = min(self.masks_s * _GROWN_BYTES_PER_S, self.settings.max_lexer_states * _STATE_BYTES)
        return self.compiled_bytes + int(grown)


@dataclass(eq=False, slots=True)
class Compilation:
    """A guide that is being compiled, or has been."""

    guide: Guide
    waiting: int = 0
    """How many requests wait for it; with none it is not begun any more."""
    client_id: str = ""
    """The client whose requests wait for it; "": it is not known, or there are several. The worker writes it."""
    kept_until_s: float = math.inf
    """Until when it is kept, by the monotonic clock."""
    result: CompiledGuide | InflightError | None = None
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def bytes(self) -> int:
        """Most bytes of memory that it takes."""
        return len(self.guide.text) + (self.result.bytes if isinstance(self.result, CompiledGuide) else 0)


class GuideCompiler:
    """Compiles guides. Its methods are called by the engine's thread alone."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], settings: GuidedDecodingSettings) -> None:
        """``make_vocabulary`` takes seconds for a large one; it is called once, on a thread of the compiler's."""
        self._settings = settings
        self._kept: OrderedDict[_Key, Compilation] = OrderedDict()
        """The compilations that have ended, and whose guides are kept; the latest used is the last."""
        self._running: dict[_Key, Compilation] = {}
        self._heap_bytes, self._least_heap_bytes, self._heap_read_s = 0, sys.maxsize, -math.inf
        """The size of the heap, the smallest one that was seen, and when it was looked at, by the monotonic clock."""
        self._worker = worker = _Worker(make_vocabulary, settings)
        # The threads know the worker and not the compiler, so that they end with it.
        threads = [
            threading.Thread(target=worker.work, name="guides", daemon=True) for _ in range(settings.compile_threads)
        ]
        _start_with_stack(threads)
        weakref.finalize(self, _end, worker, threads)

    def ask(self, guide: Guide, client_id: str = "") -> Compilation:
        """Return the compilation of a guide, which is begun unless it is kept or under way; ``give_up`` if not used.

        ``client_id``: of the client that asks for it; "": it is not known.
        """
        self._settle()
        key = (guide.kind, guide.text)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        if (running := self._running.get(key)) is not None:
            running.waiting += 1
            if running.client_id != client_id:
                self._worker.share(running)
            return running
        made = Compilation(guide, waiting=1, client_id=client_id)
        if self._worker.put(made):
            self._running[key] = made
        else:
            made.result = QueueFull(f"{self._settings.compile_queue} guides wait to be compiled; try again later")
            made.done.set()
        return made

    def result(self, compilation: Compilation) -> CompiledGuide | InflightError | None:
        """Return what has come of a compilation; None: it goes on."""
        if not compilation.done.is_set():
            return None
        self._settle()
        return compilation.result

    def give_up(self, compilation: Compilation) -> None:
        """Say that one request less waits for a compilation. One that nobody waits for leaves the queue."""
        compilation.waiting -= 1
        if compilation.waiting <= 0 and self._worker.take_back(compilation):
            del self._running[compilation.guide.kind, compilation.guide.text]

    def _settle(self) -> None:
        """Keep what has been compiled; drop what has failed in use, and what was kept longest without use."""
        now = time.monotonic()
        for key, one in [(key, one) for key, one in self._running.items() if one.done.is_set()]:
            del self._running[key]
            if isinstance(one.result, GivenUp):
                one.kept_until_s = now + _GIVEN_UP_S
            if isinstance(one.result, CompiledGuide | InvalidRequest):
                self._kept[key] = one
        for key, one in list(self._kept.items()):
            if one.kept_until_s <= now or (isinstance(one.result, CompiledGuide) and one.result.failed):
                del self._kept[key]
        while len(self._kept) > self._settings.cached_guides or self._kept_bytes() > self._settings.cached_bytes:
            self._kept.popitem(last=False)
            self._heap_read_s = -math.inf

    def _kept_bytes(self) -> int:
        """Return most bytes that the kept guides can take: no more than each might, nor than the heap has grown by.

        A look at the heap takes milliseconds where it is in many pieces, so there are few, and none without need.
        """
        might = sum(one.bytes for one in self._kept.values())
        if self._kept and might <= self._settings.cached_bytes:
            return might
        if (now := time.monotonic()) >= self._heap_read_s + _HEAP_LOOK_S:
            self._heap_bytes, self._heap_read_s = heap_bytes(), now
            self._least_heap_bytes = min(self._least_heap_bytes, self._heap_bytes)
        return min(might, self._heap_bytes - self._least_heap_bytes) if self._heap_bytes else might


class _Worker:
    """What the compiler's threads do."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], settings: GuidedDecodingSettings) -> None:
        self._settings = settings
        self._changed = threading.Condition()
        """Guards the queue, what is under way, and the processes."""
        self._queue: dict[Compilation, None] = {}
        self._under_way: dict[Compilation, str] = {}
        """Those that are being compiled, and their clients."""
        self._processes: list[CheckProcess] = []
        self._idle: list[CheckProcess] = []
        self._closed = False
        self._make_vocabulary = make_vocabulary
        self._making_vocabulary = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._limits = parser_limits(settings.max_grammar_size, settings.max_lexer_states)

    def put(self, job: Compilation) -> bool:
        """Put a job into the queue; return whether it had room."""
        with self._changed:
            if len(self._queue) >= self._settings.compile_queue:
                return False
            self._queue[job] = None
            self._changed.notify()
            return True

    def share(self, job: Compilation) -> None:
        """Say that another client waits for a job too."""
        with self._changed:
            job.client_id = ""
            self._changed.notify()

    def take_back(self, job: Compilation) -> bool:
        """Take a job out of the queue; return whether it was still there."""
        with self._changed:
            return job in self._queue and self._queue.pop(job) is None

    def close(self) -> None:
        """Let the threads end: what they do is given up."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            for process in self._processes:
                process.close()
            self._changed.notify_all()

    def work(self) -> None:
        """Compile what comes, until the worker is closed."""
        try:
            self._shared_vocabulary()  # before the first guide comes
        except Exception:
            log.exception("the vocabulary of guides could not be made; each guide will try again")
        while (job := self._next()) is not None:
            job.result = self._compile(job.guide)
            with self._changed:
                del self._under_way[job]
            job.done.set()

    def _next(self) -> Compilation | None:
        with self._changed:
            self._changed.wait_for(lambda: self._first() is not None or self._closed)
            job = self._first()
            if self._closed or job is None:
                return None
            del self._queue[job]
            self._under_way[job] = job.client_id
            return job

    def _first(self) -> Compilation | None:
        """Return the first job whose client has no other under way: guides of one client do not hold all threads."""
        clients = set(self._under_way.values()) - {""}
        return next((job for job in self._queue if job.client_id not in clients), None)

    def _compile(self, guide: Guide) -> CompiledGuide | InflightError:
        try:
            vocabulary = self._shared_vocabulary()
            process = self._take_process(vocabulary)
            try:
                checked = process.check(guide)
            finally:
                with self._changed:
                    self._idle.append(process)
            if isinstance(checked, InflightError):
                return checked
            matcher = compile_grammar(checked.grammar, vocabulary.tokens, self._limits)
            matcher.deep_copy().compute_bitmask()  # makes the first states of the lexer, which the copies share
            return CompiledGuide(matcher, vocabulary, self._settings, checked.heap_bytes)
        except InflightError as error:
            return error
        except BaseException:  # what Rust panics with is no Exception
            log.exception("a guide could not be compiled")
            return EngineFailure("the guide could not be compiled; the server's log says why")

    def _take_process(self, vocabulary: Vocabulary) -> CheckProcess:
        """Return a process that no other thread uses, if there is one that has been used before."""
        with self._changed:
            if self._idle:
                return self._idle.pop()
            process = CheckProcess(vocabulary.table, self._settings)
            self._processes.append(process)
            if self._closed:
                process.close()
            return process

    def _shared_vocabulary(self) -> Vocabulary:
        with self._making_vocabulary:
            if self._vocabulary is None:
                started = time.monotonic()
                self._vocabulary = self._make_vocabulary()
                log.info("guides: %d tokens in %.1f s", self._vocabulary.size, time.monotonic() - started)
            return self._vocabulary


def _end(worker: _Worker, threads: list[threading.Thread]) -> None:
    """Let the threads end. One that is left in native code as the process ends would make it crash."""
    worker.close()
    for thread in threads:
        thread.join(_LONGEST_END_S)


def _start_with_stack(threads: list[threading.Thread]) -> None:
    usual = threading.stack_size(STACK_BYTES)
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(usual)
