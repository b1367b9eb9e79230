"""Stands in for the Hugging Face Hub: repositories in memory, served by the Hub's own HTTP routes on the loopback.

As there, the bytes of files in LFS come from another host, to which the hub redirects, and which takes no token. What
goes wrong is set in ``faults``; ``log`` has every request.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

NONE: Mapping[str, str] = MappingProxyType({})
PATIENCE_S = 120.0
LFS_SUFFIXES = (".safetensors", ".gguf", ".bin", ".model")


@dataclass
class Faults:
    """What goes wrong; by default nothing."""

    cut_after: dict[str, list[int]] = field(default_factory=dict)
    """By path: after how many bytes the next answers break, one after the other."""
    wrong_bytes: set[str] = field(default_factory=set)
    """Paths whose first byte is another than listed."""
    extra_bytes: dict[str, int] = field(default_factory=dict)
    """By path: how many bytes more are sent than are listed."""
    unsized: bool = False
    """Send no Content-Length."""
    listed_size: dict[str, int] = field(default_factory=dict)
    """By path: the size that the tree lists, in place of the file's own."""
    no_ranges: bool = False
    """Send whole files, whatever range is asked for."""
    busy: list[tuple[int, int | None]] = field(default_factory=list)
    """Statuses that the next requests get, each with the seconds of its Retry-After."""
    gated: bool = False
    """Files are for those who have accepted the terms: they have the token ``accepted``."""
    private: bool = False
    """Without a token the repository does not exist."""
    hold_after: dict[str, int] = field(default_factory=dict)
    """By path: after how many bytes an answer stands still, until ``go_on`` is set."""
    go_on: threading.Event = field(default_factory=threading.Event)
    answers: dict[str, tuple[int, Mapping[str, str], bytes]] = field(default_factory=dict)
    """By a part of a route: status, headers and bytes of the answer in place of the hub's own."""
    page_size: int = 1000
    """Entries of one page of the tree."""


@dataclass
class FakeRepository:
    """One repository: its commits, and the branches and tags that name them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    card: dict[str, Any] = field(default_factory=lambda: {"license": "apache-2.0"})

    def commit(self, files: Mapping[str, bytes], name: str = "main") -> str:
        """Add a commit to which a branch moves; return it."""
        content = repr(sorted((path, hashlib.sha256(data).hexdigest()) for path, data in files.items()))
        sha = hashlib.sha1(f"{content}{len(self.commits)}".encode()).hexdigest()
        self.commits[sha] = dict(files)
        self.names[name] = sha
        return sha

    def find(self, revision: str) -> str | None:
        """Return the commit of a revision."""
        return self.names.get(revision) or (revision if revision in self.commits else None)


def git_sha1(data: bytes) -> str:
    """Return what git calls a blob of these bytes."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    """One thread for each connection."""

    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Say nothing of a client that has hung up."""
        if not isinstance(sys.exception(), OSError):
            raise


class FakeHub:
    """The server; ``address`` is what HF_ENDPOINT is to be."""

    def __init__(self) -> None:
        self.repositories: dict[str, FakeRepository] = {}
        self.faults = Faults()
        self.scheme = "http"
        self.listed_as = ""
        """The address that the list of files says that its next page is at; "": its own."""
        self.log: list[tuple[str, str, str | None]] = []
        """Method, path and Range of each request."""
        self.tokens: set[str] = set()
        """Those that came with requests; "": none."""
        self._blobs: dict[str, tuple[str, bytes]] = {}
        hub = self

        class Handler(_Handler):
            fake = hub

        self.server = _Server(("127.0.0.1", 0), Handler)

    @property
    def port(self) -> int:
        """Of the hub and of its storage."""
        return self.server.server_address[1]

    @property
    def address(self) -> str:
        """The hub's."""
        return f"{self.scheme}://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[FakeHub]:
        """Serve meanwhile."""
        thread = threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self.server.shutdown()
            self.server.server_close()

    def add(self, name: str, files: Mapping[str, bytes]) -> FakeRepository:
        """Add a repository with one commit on ``main``."""
        repository = self.repositories[name] = FakeRepository()
        repository.commit(files)
        return repository

    def sent(self, path: str) -> list[str | None]:
        """Return the ranges in which the bytes of a file were asked for; None: the whole."""
        return [asked for method, route, asked in self.log if method == "GET" and route.endswith(f"/{path}")]

    def store(self, path: str, data: bytes) -> str:
        """Keep the bytes of a file in LFS; return their SHA-256."""
        digest = hashlib.sha256(data).hexdigest()
        self._blobs[digest] = (path, data)
        return digest

    def stored(self, digest: str) -> tuple[str, bytes]:
        """Return path and bytes of a file in LFS."""
        return self._blobs[digest]


class _Handler(BaseHTTPRequestHandler):
    """One connection."""

    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Say nothing."""

    def do_HEAD(self) -> None:
        """Answer without a body."""
        self._answer()

    def do_GET(self) -> None:
        """Answer."""
        self._answer()

    def _answer(self) -> None:
        route = unquote(urlsplit(self.path).path)
        self.fake.log.append((self.command, route, self.headers.get("Range")))
        self.fake.tokens.add(self._token)
        forged = next((answer for part, answer in self.fake.faults.answers.items() if part in route), None)
        if forged is not None:
            self._send(forged[0], forged[2], forged[1])
        elif self.fake.faults.busy:
            status, after = self.fake.faults.busy.pop(0)
            self._send(status, b"busy", {"Retry-After": str(after)} if after is not None else {})
        elif found := re.fullmatch(r"/storage/([0-9a-f]{64})/.*", route):
            self._send_stored(found[1])
        elif found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", route):
            self._describe(found[1], found[2], found[3] or "main")
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", route):
            self._resolve(found[1], found[2], found[3])
        else:
            self._refuse(404, "")

    def _find(self, name: str, revision: str) -> tuple[FakeRepository, str] | None:
        """Return the repository and the commit; None: a refusal has been sent."""
        repository = self.fake.repositories.get(name)
        if repository is None or (self.fake.faults.private and not self._token):
            self._refuse(404 if self._token else 401, "RepoNotFound")
            return None
        commit = repository.find(revision)
        if commit is None:
            self._refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return None
        return repository, commit

    @property
    def _token(self) -> str:
        return self.headers.get("Authorization", "").removeprefix("Bearer ")

    def _describe(self, name: str, part: str | None, revision: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        if part == "tree":
            self._send_tree(name, repository.commits[commit], commit)
            return
        siblings = [{"rfilename": path} for path in repository.commits[commit]]
        tags = [f"license:{repository.card['license']}"] if "license" in repository.card else []
        self._send_json(
            {"_id": "0", "id": name, "modelId": name, "sha": commit, "private": False, "cardData": repository.card}
            | {"gated": "auto" if self.fake.faults.gated else False, "tags": tags, "siblings": siblings}
        )

    def _send_tree(self, name: str, files: Mapping[str, bytes], commit: str) -> None:
        entries = [self._entry(path, data) for path, data in sorted(files.items())]
        query = re.search(r"cursor=(\d+)", self.path)
        start = int(query[1]) if query else 0
        end = start + self.fake.faults.page_size
        following = (
            f"{self.fake.listed_as or self.fake.address}/api/models/{name}/tree/{commit}?recursive=true&cursor={end}"
        )
        headers = {"Link": f'<{following}>; rel="next"'} if end < len(entries) else {}
        self._send_json(entries[start:end], headers)

    def _entry(self, path: str, data: bytes) -> dict[str, Any]:
        size = self.fake.faults.listed_size.get(path, len(data))
        entry: dict[str, Any] = {"type": "file", "path": path, "size": size, "oid": git_sha1(data)}
        if path.endswith(LFS_SUFFIXES):
            entry["lfs"] = {"oid": hashlib.sha256(data).hexdigest(), "size": size, "pointerSize": 134}
        return entry

    def _resolve(self, name: str, revision: str, path: str) -> None:
        found = self._find(name, revision)
        if found is None:
            return
        repository, commit = found
        if self.fake.faults.gated and self._token != "accepted":
            self._refuse(403 if self._token else 401, "GatedRepo", f"Access to model {name} is restricted.")
            return
        data = repository.commits[commit].get(path)
        if data is None:
            self._refuse(404, "EntryNotFound", "Entry not found")
            return
        headers = {"X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if not path.endswith(LFS_SUFFIXES):
            self._send_bytes(path, data, headers | {"ETag": f'"{git_sha1(data)}"'})
            return
        digest = self.fake.store(path, data)
        location = f"{self.fake.scheme}://localhost:{self.fake.port}/storage/{digest}/{path}"
        linked = {"X-Linked-Etag": f'"{digest}"', "X-Linked-Size": str(len(data)), "Location": location}
        self._send(302, b"", headers | linked)

    def _send_stored(self, digest: str) -> None:
        if "Authorization" in self.headers:  # a signed address and a token together are refused there too
            self._send(400, b"only one way to sign in is allowed")
            return
        path, data = self.fake.stored(digest)
        self._send_bytes(path, data, {"Accept-Ranges": "bytes", "ETag": f'"{digest}"'})

    def _send_bytes(self, path: str, data: bytes, headers: Mapping[str, str]) -> None:
        faults = self.fake.faults
        if path in faults.wrong_bytes:
            data = bytes([data[0] ^ 1]) + data[1:]
        data += b"x" * faults.extra_bytes.get(path, 0)
        asked = None if faults.no_ranges else re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start, stop = (int(asked[1]), int(asked[2] or len(data) - 1) + 1) if asked else (0, len(data))
        if start >= len(data) > 0:
            self._send(416, b"", {"Content-Range": f"bytes */{len(data)}"})
            return
        if asked:
            headers = {**headers, "Content-Range": f"bytes {start}-{min(stop, len(data)) - 1}/{len(data)}"}
        status = 206 if "Content-Range" in headers else 200
        self._send(status, data[start:stop], headers, path)

    def _send_json(self, value: Any, headers: Mapping[str, str] = NONE) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json", **headers})

    def _refuse(self, status: int, code: str, message: str = "") -> None:
        headers = {"X-Error-Code": code} if code else {}
        self._send(status, b"", headers | ({"X-Error-Message": message} if message else {}))

    def _send(self, status: int, body: bytes, headers: Mapping[str, str] = NONE, path: str = "") -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.fake.faults.unsized and status in (200, 206):
            self.send_header("Connection", "close")
            self.close_connection = True
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        faults = self.fake.faults
        cuts, hold = faults.cut_after.get(path), faults.hold_after.get(path)
        try:
            if cuts:
                self.wfile.write(body[: cuts.pop(0)])
                self.close_connection = True
                return
            self.wfile.write(body[:hold])
            if hold is not None and faults.go_on.wait(PATIENCE_S):
                self.wfile.write(body[hold:])
        except OSError:  # whoever asked has hung up
            self.close_connection = True
