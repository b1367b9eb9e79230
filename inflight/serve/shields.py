"""What the embedded Triton (2.51) is given so that one request cannot end it. SECURITY.md says what it cannot be given.

- Every thread of the server gets a large stack. The HTTP front end keeps an entry on the stack for each chunk of a
  body, and its JSON parser a frame for each level of nesting: 8 MiB, the usual size, hold 25,000 levels.
- The server does not know the gRPC header ``triton_grpc_error``. Where a client sends it, each error on a stream uses
  memory that is freed already, and the server crashes after some of them (mended in 2.68).
- Where models stream, the server does not know ``infer`` over HTTP, which only the tokenizer would answer. It allocates
  memory for the shape that a request states, and the server aborts where there is not that much.
- APIs that only an operator uses are closed: whoever registers shared memory can have the server read and write it.
- The server keeps every batch that has run, to use it again. It keeps 1,000 at most otherwise, and then its dynamic
  batcher frees a batch while it holds the lock that lies in it, and writes to what is free (not mended in July 2026).
- Where models stream, the server writes every answer on a stream of gRPC as it writes those of a model that streams. It
  writes the others, and those for a model that it does not have, without a wait for the write before, otherwise; two
  writes at once abort it (not mended in July 2026). So answers of the tokenizer and the detokenizer to several requests
  on one stream come as they are ready, and no longer in the order of their requests.
- The Python backend hands requests without a row to their stage. It forgets them otherwise: they never end, so their
  clients wait, and a stop waits for them until its deadline (not mended in July 2026).
- The Python backend gives a stage ten seconds for a sign of life. It gives one second otherwise, by the wall clock,
  which a busy machine may take away. The server then aborts, or, while the stage loads, waits for it to end for ever.
- The Python backend's folders in /tmp bear the server's name. Nobody can tell whose they are otherwise, and a server
  whose folder is removed as that of another aborts where its start fails.

No option changes any of these. Inflight therefore runs copies of the server, its library and the backend in which three
texts, two numbers and a few instructions are changed.
"""

from __future__ import annotations

import logging
import mmap
import os
import resource
import secrets
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import get_args

from inflight.errors import DeploymentError
from inflight.settings.server import OperatorsApi

log = logging.getLogger(__name__)

STACK_BYTES = 4 << 30
"""Most of each thread, and never more than a quarter of the machine's memory. A level of JSON takes about 310 bytes."""
KEY = "see-server.open_apis-in-deployment.yaml"
"""The name of the header that opens a closed API. Triton's refusal quotes it, so it says what to do."""
_HEADER = b"\0triton_grpc_error\0", b"\0TRITON_GRPC_ERROR\0"
_INFER = b"(?:/(infer|generate|generate_stream|ready|", b"(?:/(ready|generate|generate_stream|ready|"
"""Texts in the server's binary, and what takes their place, as long: a header's name, and part of a path's pattern."""
_WRITES = (
    bytes.fromhex("80b8c000000000488985d8fcffff0f84d1060000"),
    bytes.fromhex("c680c000000001488985d8fcffff660f1f440000"),
)
"""In the server's ``ModelStreamInferHandler::Process``, where it has read a request: ``cmpb $0, 0xc0(%rax)`` for
``is_decoupled_``, ``mov %rax, -0x328(%rbp); je``, and with ``movb $1, 0xc0(%rax)`` and a ``nop`` for the jump."""
_BATCHES_KEPT = bytes.fromhex("48c78780010000e8030000"), bytes.fromhex("48c78780010000ffffff7f")
"""In the server's library, where its ``RateLimiter`` is made: ``movq $1000, 0x180(%rdi)``, and with 2^31 - 1."""
_ROWS_ASKED = bytes.fromhex("4883bd48fdffff0074ca"), bytes.fromhex("4883bd48fdffff009090")
"""In the Python backend's ``ProcessRequests``: ``cmpq $0, -0x2b8(%rbp); je``, and with two ``nop`` for the jump."""
_SIGN_OF_LIFE = (
    bytes.fromhex("48b940c2667cc2d912fd4801d94881c340420f000f1f4000"),
    bytes.fromhex("48b98016f07cc2d912fd4801d94881c3809698000f1f4000"),
)
"""In the Python backend's ``ReceiveMessageFromStub``, where it waits for a message: ``movabs $(1000000 - E), %rcx; add
%rbx, %rcx; add $1000000, %rbx; nop``, E being 1970 by the Julian day number, in microseconds, and with 10000000."""
_FOLDERS = b"/tmp/python_env_"
"""The paths of the Python backend's folders begin with this; six letters of ``mkdtemp`` follow."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER_OVERCOMMIT = "2"


def util_linux(tool: str) -> str:
    """Return the path of one of the tools of util-linux.

    Raises:
        DeploymentError: it is not installed.
    """
    if (path := shutil.which(tool)) is None:
        raise DeploymentError(f"`{tool}` is not installed; it is part of util-linux")
    return path


def roomy_stack() -> list[str]:
    """Return the command before a command that gives each thread of it a large stack.

    The kernel hands out memory for the pages that a thread uses, so a stack that is not used costs address space alone.

    Raises:
        DeploymentError: the tool for it is not there.
    """
    tool = util_linux("prlimit")
    size, reason = _stack()
    if reason:
        log.warning("%s: a request with much nesting or many chunks may end the server", reason)
    return [tool, f"--stack={size}:", "--"] if size else []


def _stack() -> tuple[int, str]:
    """Return the bytes that a stack is to have, and why they are fewer than wanted, if so; 0: it stays as it is."""
    wanted = min(STACK_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    hard = resource.getrlimit(resource.RLIMIT_STACK)[1]
    if resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY:
        return 0, "the stack of the server's threads stays small, as the address space is limited (`ulimit -v`)"
    if _OVERCOMMIT.read_text().strip() == _NEVER_OVERCOMMIT:
        return 0, "the stack of the server's threads stays small, as this machine's vm.overcommit_memory is 2"
    if hard != resource.RLIM_INFINITY and hard < wanted:
        return hard, f"the stack of the server's threads is {hard >> 10} KiB, its hard limit (`ulimit -Hs`)"
    return wanted, ""


def closed_apis(opened: Collection[str]) -> list[str]:
    """Return the server's options that close the operators' APIs over HTTP and gRPC, but those in ``opened``.

    The value that would open them is made anew at each start, and nobody is told.
    """
    closed = ",".join(api for api in get_args(OperatorsApi) if api not in opened)
    restriction = f"{closed}:{KEY}={secrets.token_hex(32)}"
    return [f"--http-restricted-api={restriction}", f"--grpc-restricted-protocol={restriction}"] if closed else []


def shielded(binary: Path, directory: Path, decoupled: bool) -> Path:
    """Return the server to run in place of ``binary``: a copy in ``directory`` without what would end it.

    In the copy the header's name is in capitals, which no client can send: HTTP/2 allows small letters alone (RFC 9113,
    8.2.1). Among the paths of HTTP, ``infer`` is replaced by one that is there already. What ``binary`` does not
    have, or has more than once, is left as it is.

    Args:
        binary: the embedded server.
        directory: where the copy is made; programs can run from there.
        decoupled: whether models stream; where they do not, ``infer`` over HTTP stays, and so do the writes.
    """
    copy = Path(shutil.copyfile(binary, directory / binary.name))
    _patch(copy, (_HEADER, _INFER, _WRITES) if decoupled else (_HEADER,))
    copy.chmod(0o755)
    return copy


def shield_library(loader_path: Collection[Path], directory: Path) -> None:
    """Put a copy of the embedded server's library into ``directory``, in which it keeps every batch that has run.

    Args:
        loader_path: where the loader looks for libraries.
        directory: where it looks before.
    """
    for place in loader_path:
        for library in place.glob("libtritonserver*.so"):
            _patch(Path(shutil.copyfile(library, directory / library.name)), (_BATCHES_KEPT,))


def shield_backend(library: Path, folders: str) -> None:
    """Have the Python backend hand each request to its stage, be patient with it, and name its folders as it is told.

    Args:
        library: the server's own copy of the embedded Python backend, which is changed.
        folders: what their paths begin with, of 16 characters.
    """
    _patch(library, (_ROWS_ASKED, _SIGN_OF_LIFE, (_FOLDERS, folders.encode("ascii"))))


def _patch(file: Path, patches: Collection[tuple[bytes, bytes]]) -> None:
    """Put into ``file``, in the place of what is there once, something as long."""
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as code:
        for old, new in patches:
            place = code.find(old)
            if place >= 0 and code.find(old, place + 1) < 0:
                code[place : place + len(old)] = new
            else:
                log.warning("%s is another one than Inflight knows: a request may end the server, or never end", file)
