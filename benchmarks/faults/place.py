"""A place that has its own /dev/shm, /tmp and limit of memory, so that these can be filled, and searched afterwards.

It is a mount namespace and a cgroup; both need root.
"""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from inflight.errors import DeploymentError

FOLDERS = ("/tmp", "/dev/shm", "/mnt")
"""What the place has for itself. /mnt is the benchmark's, which the server leaves alone."""
KEPT = "/mnt"
CLOCK = f"{KEPT}/clock"
"""Has by how many nanoseconds, in eight bytes, the wall clock of a server goes before the kernel's."""
_GIB = "1g"
_MOUNT = f"""
exec 3< "$0"
for one in {" ".join(FOLDERS)}; do mount -t tmpfs -o size={_GIB} tmpfs $one; done
test -d "$0" || {{ mkdir -p "$0"; mount --no-canonicalize --bind /proc/self/fd/3 "$0"; }}
echo
exec sleep infinity"""
"""Makes the place, in which the folder that the benchmark runs in stays where it is, also below /tmp."""
_MEMORY = Path("/sys/fs/cgroup/memory")
_ENTER = 'echo $$ > "$0/cgroup.procs" && exec "$@"'
"""A shell command before a program: join a cgroup."""
_HOG = """
import os, sys
held, told = os.memfd_create("hog"), open(sys.argv[1]).read()
while open(sys.argv[1]).read() == told:
    os.write(held, bytes(1 << 22))
"""
"""A program that takes memory until the kernel has killed a process of its cgroup. A file that it does not map counts
for the cgroup and not for the program, so that it is not the largest one, which is killed."""
_MARGIN = 32 << 20
_HOG_S, _END_S, _LOOK_S = 30.0, 5.0, 0.1


@dataclass
class Place:
    """A running place; see ``make_place``."""

    anchor: int
    """The process that keeps the namespace."""
    group: Path
    """The folder of the cgroup; it is there where the machine has a memory controller of version 1."""
    _own: frozenset[str] = field(init=False)
    """What lies in the folders before anything runs."""

    def __post_init__(self) -> None:
        self._own = frozenset(self._files())

    @property
    def limits_memory(self) -> bool:
        """Whether this machine lets a benchmark limit memory."""
        return self.group.is_dir()

    def command(self, *words: str) -> list[str]:
        """Return the command that runs a program in the place; it has the process id of the program."""
        entered = ["sh", "-c", _ENTER, str(self.group)] if self.limits_memory else []
        return [*entered, "nsenter", f"--target={self.anchor}", "--mount", "env", f"--chdir={Path.cwd()}", *words]

    def path(self, inside: str) -> Path:
        """Return where this process finds a path of the place."""
        return Path(f"/proc/{self.anchor}/root{inside}")

    def files(self) -> list[str]:
        """Return the files and folders that the server has made and left."""
        return sorted(self._files() - self._own)

    def _files(self) -> set[str]:
        roots = [self.path(folder) for folder in FOLDERS if folder != KEPT]
        return {f"/{found.relative_to(self.path('/'))}" for root in roots for found in root.iterdir()}

    def processes(self) -> dict[int, str]:
        """Return the command lines of the processes that run in the place, but the anchor's, by process id."""
        namespace, found = os.readlink(f"/proc/{self.anchor}/ns/mnt"), dict[int, str]()
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended
                if os.readlink(process / "ns/mnt") == namespace and int(process.name) != self.anchor:
                    words = (process / "cmdline").read_bytes().split(b"\0")
                    found[int(process.name)] = b" ".join(words).decode(errors="replace").strip()
        return {process: line for process, line in found.items() if line}  # one that has ended has no words

    def wait_until_empty(self) -> dict[int, str]:
        """Return what still runs some seconds after everything was to end; it is killed."""
        deadline = time.monotonic() + _END_S
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        for process in left:
            with suppress(ProcessLookupError):
                os.kill(process, 9)
        return left

    @contextmanager
    def full(self, folder: str) -> Iterator[None]:
        """Fill a folder's file system to the last page, and free it at the end."""
        ballast = self.path(folder) / "ballast"
        with ballast.open("wb") as file, suppress(OSError):
            while True:
                file.write(bytes(1 << 20))
        with ballast.open("ab", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(512))
        try:
            yield
        finally:
            ballast.unlink()

    @contextmanager
    def short_of_memory(self) -> Iterator[None]:
        """Have the kernel kill the process of the place that uses most memory, and lift the limit at the end."""
        limit = self.group / "memory.limit_in_bytes"
        used = int((self.group / "memory.usage_in_bytes").read_text())
        limit.write_text(str(used + _MARGIN))
        try:
            hog = [sys.executable, "-c", _HOG, str(self.group / "memory.oom_control")]
            entered = ["sh", "-c", _ENTER, str(self.group)]
            subprocess.run([*entered, *hog], check=True, timeout=_HOG_S)
            limit.write_text("-1")
            yield
        finally:
            limit.write_text("-1")


@contextmanager
def make_place() -> Iterator[Place]:
    """Make a place; at its end nothing runs in it any more.

    Raises:
        DeploymentError: this user may make none.
    """
    name = f"inflight-faults-{secrets.token_hex(4)}"
    command = ["unshare", "--mount", "sh", "-ec", _MOUNT, str(Path.cwd())]
    anchor = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        assert anchor.stdout is not None
        assert anchor.stderr is not None
        if not anchor.stdout.readline():
            raise DeploymentError(f"faults need a mount namespace: {anchor.stderr.read().decode().strip()}")
        place = Place(anchor.pid, _MEMORY / name)
        with suppress(OSError):  # then that fault is left out
            place.group.mkdir()
        try:
            yield place
        finally:
            place.wait_until_empty()
            with suppress(OSError):
                place.group.rmdir()
    finally:
        anchor.kill()
        anchor.communicate()
