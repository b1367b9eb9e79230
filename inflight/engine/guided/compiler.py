"""The compiler of guides: it works on threads of its own, and keeps what it has compiled.

Nothing here is done by the engine's thread, which only asks whether a guide is ready. The first guide also waits for
the vocabulary, which is built on the first of these threads as the engine starts.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import SimpleQueue

from llguidance import LLMatcher, LLParserLimits

from inflight.engine.guided.grammar import Grammars
from inflight.engine.guided.vocabulary import Vocabulary, clear_bit
from inflight.errors import EngineFailure, InflightError, InvalidRequest
from inflight.sampling import Guide
from inflight.settings.guided import GuidedDecodingSettings

log = logging.getLogger(__name__)

_STACK_BYTES = 256 << 20
"""Of a compiling thread: llguidance follows references and names by recursion, and no error stops it at the end of the
stack. It is reserved, and takes memory only where it is used. ``max_guide_bytes`` bounds how deep a guide can go."""
_LONGEST_END_S = 10
_Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class CompiledGuide:
    """A guide that matchers can be copied from."""

    matcher: LLMatcher
    vocabulary: Vocabulary


@dataclass(eq=False, slots=True)
class Compilation:
    """A guide that is being compiled, or has been."""

    guide: Guide
    waiting: int = 0
    """How many requests wait for it; with none it is not begun any more."""
    started: float | None = None
    """When a thread began with it, by ``time.monotonic``."""
    result: CompiledGuide | InflightError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class GuideCompiler:
    """Compiles guides. Its methods are called by the engine's thread alone."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], settings: GuidedDecodingSettings) -> None:
        """``make_vocabulary`` takes seconds for a large one; it is called once, on a thread of the compiler's."""
        self._settings = settings
        self._kept: OrderedDict[_Key, Compilation] = OrderedDict()
        """The compilations that have ended, and whose guides are kept; the latest used is the last."""
        self._kept_bytes = 0
        self._running: dict[_Key, Compilation] = {}
        self._worker = worker = _Worker(make_vocabulary, settings)
        self._lock, self._jobs = worker.lock, worker.jobs
        # The threads know the worker and not the compiler, so that they end with it.
        threads = [threading.Thread(target=worker.work, name="guides", daemon=True) for _ in worker.numbers]
        _start_with_stack(threads)
        weakref.finalize(self, _end, worker.jobs, threads)

    def ask(self, guide: Guide) -> Compilation:
        """Return the compilation of a guide, which is begun unless it is kept or under way; ``give_up`` if not used."""
        key = (guide.kind, guide.text)
        if (kept := self._kept.get(key)) is not None:
            self._kept.move_to_end(key)
            return kept
        with self._lock:
            running = self._running.get(key)
            if running is not None and not running.done.is_set():
                running.waiting += 1
                return running
        self._settle()
        if key in self._kept:
            return self._kept[key]
        made = self._running[key] = Compilation(guide, waiting=1)
        self._jobs.put(made)
        return made

    def result(self, compilation: Compilation) -> CompiledGuide | InflightError | None:
        """Return what has come of a compilation; None: it goes on."""
        if compilation.done.is_set():
            self._settle()
            return compilation.result
        limit = self._settings.compile_timeout_s
        if compilation.started is not None and time.monotonic() - compilation.started > limit:
            return InvalidRequest(f"guided_decoding_guide takes more than {limit:g} s to compile; it must be simpler")
        return None

    def give_up(self, compilation: Compilation) -> None:
        """Say that one request less waits for a compilation."""
        with self._lock:
            compilation.waiting -= 1

    def _settle(self) -> None:
        """Keep what has been compiled, and drop what was kept longest without use."""
        for key, one in [(key, one) for key, one in self._running.items() if one.done.is_set()]:
            del self._running[key]
            if isinstance(one.result, CompiledGuide | InvalidRequest) and key not in self._kept:
                self._kept[key] = one
                self._kept_bytes += len(key[1])
        while len(self._kept) > self._settings.cached_guides or self._kept_bytes > self._settings.cached_bytes:
            (_, text), _ = self._kept.popitem(last=False)
            self._kept_bytes -= len(text)


class _Worker:
    """What the compiler's threads do."""

    def __init__(self, make_vocabulary: Callable[[], Vocabulary], settings: GuidedDecodingSettings) -> None:
        self.jobs: SimpleQueue[Compilation | None] = SimpleQueue()
        self.numbers = range(settings.compile_threads)
        self.lock = threading.Lock()
        """Held where it is decided whether a job is begun, or has another request that waits for it."""
        self._make_vocabulary = make_vocabulary
        self._making_vocabulary = threading.Lock()
        self._vocabulary: Vocabulary | None = None
        self._limits = LLParserLimits(
            max_grammar_size=settings.max_grammar_size, max_lexer_states=settings.max_lexer_states, verbose_errors=False
        )

    def work(self) -> None:
        """Compile what comes, until it is None."""
        try:
            self._shared_vocabulary()  # before the first guide comes
        except Exception:
            log.exception("the vocabulary of guides could not be made; each guide will try again")
        while (job := self.jobs.get()) is not None:
            with self.lock:
                if job.waiting <= 0:
                    job.done.set()
                    continue
                job.started = time.monotonic()
            job.result = self._compile(job.guide)
            job.done.set()

    def _compile(self, guide: Guide) -> CompiledGuide | InflightError:
        try:
            vocabulary = self._shared_vocabulary()
            grammar = Grammars(vocabulary.tokens, self._limits).of(guide)
            matcher = LLMatcher(vocabulary.tokens, grammar, log_level=0, limits=self._limits)
            if matcher.is_error():
                raise InvalidRequest(f"guided_decoding_guide is refused: {matcher.get_error().splitlines()[0][:300]}")
            if not _can_begin(matcher.deep_copy(), vocabulary):
                raise InvalidRequest("guided_decoding_guide allows no text that this model's tokens can spell")
            return CompiledGuide(matcher, vocabulary)
        except InflightError as error:
            return error
        except Exception:
            log.exception("a guide could not be compiled")
            return EngineFailure("the guide could not be compiled; the server's log says why")

    def _shared_vocabulary(self) -> Vocabulary:
        with self._making_vocabulary:
            if self._vocabulary is None:
                started = time.monotonic()
                self._vocabulary = self._make_vocabulary()
                log.info("guides: %d tokens in %.1f s", self._vocabulary.size, time.monotonic() - started)
            return self._vocabulary


def _can_begin(matcher: LLMatcher, vocabulary: Vocabulary) -> bool:
    """Return whether a token may come first, or the text may be empty."""
    if matcher.is_accepting():
        return True
    mask = vocabulary.masks([matcher])[0]
    clear_bit(mask, vocabulary.end)
    return bool(mask.any()) and not matcher.is_error()


def _end(jobs: SimpleQueue[Compilation | None], threads: list[threading.Thread]) -> None:
    """Let the threads end. One that is left in native code as the process ends would make it crash."""
    for _ in threads:
        jobs.put(None)
    for thread in threads:
        thread.join(_LONGEST_END_S)


def _start_with_stack(threads: list[threading.Thread]) -> None:
    usual = threading.stack_size(_STACK_BYTES)
    try:
        for thread in threads:
            thread.start()
    finally:
        threading.stack_size(usual)
