"""What the embedded Triton (2.51) is given so that one request cannot end it. SECURITY.md says what it cannot be given.

- A large stack for every thread of the server. Its HTTP front end keeps one entry for each chunk of a body, and one
  frame of its JSON parser for each level of nesting, on the stack: 8 MiB, the usual size, hold 25,000 levels.
- No gRPC header ``triton_grpc_error``: with it, an error on a stream uses memory that is freed, and after some of them
  the server crashes (mended in 2.68). And no ``infer`` over HTTP where models stream, and only the tokenizer would take
  it: it makes room for whatever shape is told, and aborts where there is not as much memory. No option switches them
  off: the server runs as a copy in which they have other names.
- APIs that only an operator uses are closed: whoever registers shared memory can have the server read and write it.
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

from inflight.deployment import OperatorsApi
from inflight.errors import DeploymentError

log = logging.getLogger(__name__)

STACK_BYTES = 4 << 30
"""Most of each thread, and never more than a quarter of the machine's memory. A level of JSON takes about 310 bytes."""
KEY = "see-server.open_apis-in-deployment.yaml"
"""The header that opens a closed API: its name is all that a refusal tells."""
_HEADER = b"\0triton_grpc_error\0", b"\0TRITON_GRPC_ERROR\0"
_INFER = b"(?:/(infer|generate|generate_stream|ready|", b"(?:/(ready|generate|generate_stream|ready|"
"""Texts in the server's binary, and what takes their place, as long: a header's name, and part of a path's pattern."""
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER_OVERCOMMIT = "2"


def roomy_stack() -> list[str]:
    """Return the command before a command that gives each thread of it a large stack.

    The kernel hands out memory for the pages that a thread uses, so a stack that is not used costs address space alone.

    Raises:
        DeploymentError: the tool for it is not there.
    """
    tool = shutil.which("prlimit")
    if tool is None:
        raise DeploymentError("`prlimit` is not installed; it is part of util-linux")
    size, reason = _stack()
    if reason:
        log.warning("%s: a request with much nesting or many chunks may end the server", reason)
    return [tool, f"--stack={size}:", "--"] if size else []


def _stack() -> tuple[int, str]:
    """Return the bytes of a stack, 0 for those that there are now, and why they are fewer than they should be."""
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

    In the copy the header's name is in capitals, which no header has: HTTP/2 allows small letters alone (RFC 9113,
    8.2.1); and among the paths that it knows ``infer`` gives way to one that is there already. What ``binary`` does not
    have once is left as it is.

    Args:
        binary: the embedded server.
        directory: of this run.
        decoupled: whether models stream: ``infer`` over HTTP is for those that do not.
    """
    copy = Path(shutil.copyfile(binary, directory / binary.name))
    copy.chmod(0o755)
    with copy.open("r+b") as file, mmap.mmap(file.fileno(), 0) as code:
        for old, new in (_HEADER, _INFER) if decoupled else (_HEADER,):
            place = code.find(old)
            if place >= 0 and code.find(old, place + 1) < 0:
                code[place : place + len(old)] = new
    return copy
