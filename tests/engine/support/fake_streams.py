"""CUDA's rules of order, as a device that computes on the CPU and fails where a program breaks them.

Tensors of the device ``cuda`` are wrapped ones. Every operation on them is given to the current stream, and each stream
knows what surely has happened before: its own operations, those of events that it waited for, and what the host had
waited for when it launched. What touches memory that another stream or the host may still write, or writes what they
may still read, fails at once, however the hardware would have timed it. So a test that passes has not just been lucky.
"""

from __future__ import annotations

import gc
import random
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from tests.engine.support.fake_operations import PRODUCTS, READ_BY_HOST, arguments_of, is_view, real

Clock = dict[int, int]
"""By stream: up to which of its operations all have happened."""
CPU, CUDA = torch.device("cpu"), torch.device("cuda:0")


class Misuse(AssertionError):
    """A rule of CUDA's was broken."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        Cuda.now().found.append(what)  # who raises it may be caught


class Memory:
    """What some tensors are views of."""

    def __init__(self) -> None:
        self.written: tuple[int, int] | None = None
        """By which operation of which stream, last."""
        self.read: Clock = {}
        self.graph: Graph | None = None
        """The graph whose pool it is of."""


class Stream:
    """As ``torch.cuda.Stream``."""

    numbers = 0

    def __init__(self, device: Any = None) -> None:
        self.number = Stream.numbers
        Stream.numbers += 1
        self.cuda_stream = self.number
        self.clock: Clock = {}
        self.workspaces = 0
        """How often its workspace was given up."""

    def wait_event(self, event: Event) -> None:
        """Run what comes later behind the event."""
        _merge(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        """Run what comes later behind all that the other stream has."""
        _merge(self.clock, other.clock)

    def synchronize(self) -> None:
        """Have the host wait."""
        Cuda.now().wait_for(self.clock)


class Event:
    """As ``torch.cuda.Event``."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.clock: Clock = {}
        self._timing = enable_timing

    def record(self, stream: Stream | None = None) -> None:
        """Stand for all that a stream has so far."""
        self.clock = dict((stream or Cuda.now().stream).clock)

    def synchronize(self) -> None:
        """Have the host wait."""
        Cuda.now().wait_for(self.clock)

    def query(self) -> bool:
        """Return whether it has happened, which nobody knows before."""
        cuda = Cuda.now()
        happened = cuda.rng.random() < 0.5 or all(cuda.host.get(one, 0) >= at for one, at in self.clock.items())
        if happened:
            _merge(cuda.host, self.clock)
        return happened

    def elapsed_time(self, end: Event) -> float:
        """Return some time."""
        if not (self._timing and end._timing):
            raise Misuse("an event that takes no times was asked for one")
        return 1.0


class Graph:
    """As ``torch.cuda.CUDAGraph``."""

    def __init__(self) -> None:
        self.steps: list[Callable[[], None]] = []
        self.outside: list[tuple[weakref.ref[Memory], bool]] = []
        """Memory that it found and did not make, and whether it writes it."""
        self.stream: Stream | None = None
        self.workspaces = 0

    def replay(self) -> None:
        """Compute again."""
        cuda = Cuda.now()
        assert self.stream is not None
        touched = [(memory(), writes) for memory, writes in self.outside]
        if any(memory is None for memory, _ in touched):
            raise Misuse("a graph is replayed that reads memory which was freed")
        if self.stream.workspaces != self.workspaces:
            raise Misuse("a graph is replayed whose stream's workspace went with another graph")
        reads, writes = ([memory for memory, own in touched if memory and own == which] for which in (False, True))
        cuda.order(reads, writes)
        for step in self.steps:
            step()

    def __del__(self) -> None:
        if self.stream is not None:
            self.stream.workspaces += 1


class Capture:
    """As ``torch.cuda.graph``."""

    shared = None

    def __init__(
        self, graph: Graph, pool: object = None, stream: Stream | None = None, capture_error_mode: str = "global"
    ) -> None:
        if stream is None:
            Capture.shared = stream = Capture.shared or Stream()  # one for the whole process, as PyTorch has it
        self._graph, self._stream = graph, stream

    def __enter__(self) -> None:
        cuda = Cuda.now()
        cuda.synchronize()
        gc.collect()
        if self._stream is cuda.default:
            raise Misuse("a capture on the default stream")
        self._before, cuda.stream = cuda.stream, self._stream
        cuda.capturing, self._graph.stream = self._graph, self._stream

    def __exit__(self, *_: object) -> None:
        cuda = Cuda.now()
        cuda.capturing, cuda.stream = None, self._before
        self._graph.workspaces = self._stream.workspaces


class Device(torch.Tensor):
    """A tensor on the device."""

    held: torch.Tensor
    memory: Memory
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, real: torch.Tensor, memory: Memory) -> Device:
        wrapped = torch.Tensor._make_wrapper_subclass(
            cls, real.size(), strides=real.stride(), storage_offset=real.storage_offset(), dtype=real.dtype
        )  # fmt: skip
        wrapped.held, wrapped.memory = real, memory
        return wrapped  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Cuda.now().dispatch(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:
        """Where it says that it is: PyTorch for CPUs has no guards for the other one."""
        return CUDA

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert, or copy to the host."""
        device, dtype, queued, _ = torch._C._nn._parse_to(*args, **kwargs)  # type: ignore[attr-defined]
        converted = self if dtype in (None, self.dtype) else torch.Tensor.to(self, dtype)
        return Cuda.now().to_host(converted, queued) if device is not None and device.type == "cpu" else converted

    def cpu(self, *_: Any) -> Any:
        """Copy to the host, and wait."""
        return self.to("cpu")

    def tolist(self) -> Any:
        """Copy to the host, and wait."""
        return self.cpu().tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Device({list(self.shape)}, {self.dtype})"


class Mode(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Cuda.now().dispatch(func, args, kwargs or {})


class Cuda:
    """The device, its host, and what each knows of the other."""

    _now: Cuda | None = None

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.default = self.stream = Stream()
        self.host: Clock = {}
        self.capturing: Graph | None = None
        self.found: list[str] = []
        """Rules that were broken so far."""
        self.waits = 0
        """How often the host has waited for the device."""
        self.forbidden = False
        """Whether it must not."""
        self._lock = threading.RLock()
        self._pinned: dict[int, tuple[torch.Tensor, Memory]] = {}
        """By address; they are kept, so that nothing else gets it."""

    @classmethod
    def now(cls) -> Cuda:
        """Return the one that is in place."""
        assert cls._now is not None
        return cls._now

    def wait_for(self, clock: Clock) -> None:
        """Have the host wait."""
        if self.capturing is not None:
            raise Misuse("the host waits while a graph is captured")
        if self.forbidden:
            raise Misuse("the host waits where it must not")
        self.waits += 1
        _merge(self.host, clock)

    def synchronize(self, *_: object) -> None:
        """Have the host wait for all; streams that are not known any more have no work that matters."""
        self.wait_for(self.stream.clock | {})

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a tensor of the host one that copies of the device may touch while the host goes on."""
        self._pinned[tensor.untyped_storage().data_ptr()] = tensor, Memory()
        return tensor

    def dispatch(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Compute, and check what is touched."""
        with self._lock:
            flat = tree_flatten((args, kwargs))[0]
            device = kwargs.get("device")
            on_device = any(isinstance(one, Device) for one in flat)
            if not on_device and (device is None or torch.device(device).type != "cuda"):
                return self._on_host(func, args, kwargs)
            return self._on_device(func, args, kwargs)

    def _on_host(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        pinned = kwargs.pop("pin_memory", False)
        result = func(*args, **kwargs)
        if not is_view(func):
            for value, writes in arguments_of(func, args, kwargs):
                self.touch(value, writes)
        return self.pin(result) if pinned else result

    def touch(self, tensor: torch.Tensor, writes: bool) -> None:
        """Check that the host may touch a tensor of its own now."""
        memory = self._memory(tensor)
        if memory is None:
            return
        if memory.written is not None and self.host.get(memory.written[0], 0) < memory.written[1]:
            raise Misuse("the host touches memory that the device may still write")
        if writes and any(self.host.get(one, 0) < at for one, at in memory.read.items()):
            raise Misuse("the host writes memory that the device may still read")

    def _memory(self, tensor: torch.Tensor) -> Memory | None:
        if isinstance(tensor, Device):
            return tensor.memory
        found = self._pinned.get(tensor.untyped_storage().data_ptr()) if tensor.numel() else None
        return found[1] if found else None

    def _on_device(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        kwargs = {key: CPU if key == "device" else value for key, value in kwargs.items() if key != "pin_memory"}
        if is_view(func):
            return tree_map(lambda one: self._wrap(one, args[0].memory), func(*real(args), **real(kwargs)))
        touched = arguments_of(func, args, kwargs)
        host = [one for one, _ in touched if not isinstance(one, Device) and one.dim()]
        target = args[0] if args else None
        waits = name in READ_BY_HOST or any(
            isinstance(one, torch.Tensor) and one.dtype == torch.bool and name.startswith("index")
            for one in tree_flatten(args[1:2])[0]
        )
        if host and not (name == "copy_" and self._is_queued(target, args[1], args[2:], kwargs)):
            waits = True
        reads = [memory for one, writes in touched if not writes and (memory := self._memory(one))]
        writes = [memory for one, writes in touched if writes and (memory := self._memory(one))]
        if waits and self.capturing is not None:
            raise Misuse("the host waits while a graph is captured")
        self.order(reads, writes)
        if name in PRODUCTS and self.capturing is not None:
            self.capturing.workspaces = self.stream.workspaces
        result = self._compute(func, args, kwargs, touched)
        if waits:
            self.wait_for(self.stream.clock)
        return result

    def _compute(self, func: Any, args: Any, kwargs: dict[str, Any], touched: list[tuple[torch.Tensor, bool]]) -> Any:
        arguments, named = real(args), real(kwargs)
        kept = [(one.held, one.held.clone()) for one, writes in touched if writes and isinstance(one, Device)]
        made = func(*arguments, **named)
        written = [one for one, writes in touched if writes]
        if written and len(func._schema.returns) <= 1:
            result, fresh = written[0], []
        else:
            memory: list[Memory] = []

            def wrapped(one: Any) -> Any:
                if not isinstance(one, torch.Tensor) or func._schema.name == "aten::_local_scalar_dense":
                    return one
                memory.append(Memory())
                self.order([], memory[-1:])
                return self._wrap(one, memory[-1])

            result = tree_map(wrapped, made)
            fresh = [one for one in tree_flatten(made)[0] if isinstance(one, torch.Tensor)]
        graph = self.capturing
        if graph is not None:  # what is captured is not computed
            for own, before in kept:
                own.copy_(before)
            for one in fresh:
                if one.is_floating_point():
                    one.fill_(torch.nan)

            def again() -> None:
                values = tree_flatten(func(*arguments, **named))[0]
                for one, value in zip(
                    fresh, (value for value in values if isinstance(value, torch.Tensor)), strict=False
                ):
                    one.copy_(value)

            graph.steps.append(again)
        return result

    def to_host(self, source: Device, queued: bool) -> torch.Tensor:
        """Copy to the host: into pinned memory where that is left to the stream."""
        made = source.held.clone()
        if queued:
            memory = self._memory(self.pin(made))
            self.order([source.memory], [memory] if memory else [])
        else:
            self.order([source.memory], [])
            self.wait_for(self.stream.clock)
        return made

    def to_device(self, source: torch.Tensor, queued: bool) -> Device:
        """Copy from the host; what is not pinned is waited for."""
        memory, result = self._memory(source), Device(source.clone(), Memory())
        self.order([memory] if memory else [], [result.memory])
        if not (queued and memory):
            self.wait_for(self.stream.clock)
        return result

    def _is_queued(self, target: Any, source: Any, rest: Any, kwargs: dict[str, Any]) -> bool:
        """Whether a copy between host and device is left to the stream."""
        of_host = source if isinstance(target, Device) else target
        asked = (rest[0] if rest else kwargs.get("non_blocking", False)) or not of_host.dim()
        return bool(asked) and self._memory(of_host) is not None

    def _wrap(self, real: Any, memory: Memory) -> Any:
        return Device(real, memory) if isinstance(real, torch.Tensor) else real

    def order(self, reads: list[Memory], writes: list[Memory]) -> None:
        """Give an operation to the current stream, and check that what it touches is its own by then."""
        stream = self.stream
        _merge(stream.clock, self.host)  # what the host has seen is over before it launches
        at = stream.clock[stream.number] = stream.clock.get(stream.number, 0) + 1
        for memory in (*reads, *writes):
            if memory.written is not None and stream.clock.get(memory.written[0], 0) < memory.written[1]:
                raise Misuse("a stream touches what another one may still write")
        if self.capturing is not None:
            found = [(one, False) for one in reads] + [(one, True) for one in writes if one.written is not None]
            new = [(weakref.ref(one), own) for one, own in found if one.graph is not self.capturing]
            self.capturing.outside += new
        for memory in reads:
            memory.read[stream.number] = at
        for memory in writes:
            if any(stream.clock.get(one, 0) < then for one, then in memory.read.items()):
                raise Misuse("a stream writes what another one may still read")
            if memory.written is None:
                memory.graph = self.capturing
            memory.written, memory.read = (stream.number, at), {}


def _merge(clock: Clock, other: Clock) -> None:
    for stream, at in other.items():
        clock[stream] = max(clock.get(stream, 0), at)
