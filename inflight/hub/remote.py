"""A hub: what it says of a repository, and the bytes of its files. It speaks the Hugging Face Hub's HTTP interface.

Three routes are enough, and mirrors have them: ``/api/models/NAME/revision/REVISION`` gives the commit and the licence,
``/api/models/NAME/tree/COMMIT`` the files with their sizes and hashes, ``/NAME/resolve/COMMIT/PATH`` the bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Self
from urllib.parse import quote, urlsplit

import httpx

from inflight.errors import DeploymentError
from inflight.hub.model_manifest import LARGEST_MANIFEST, decode_object, plain
from inflight.hub.names import ModelName, is_commit
from inflight.hub.settings import HubSettings, make_ssl_context
from inflight.resources import VERSION

_BUSY = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which the same request may succeed later."""
_TRIES = 5
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
_DIGITS = re.compile("[0-9]{1,18}")
_TIMEOUT = httpx.Timeout(30.0, connect=10.0)
_CHUNK = 1 << 18
_MOST_PAGES, _MOST_ENTRIES = 1000, 100_000


class TryLater(Exception):
    """The hub is busy, or the connection broke: the same request may succeed after ``wait`` seconds."""

    def __init__(self, reason: str, wait: float | None = None) -> None:
        super().__init__(reason)
        self.wait = wait


class Unreachable(DeploymentError):
    """No answer came from the hub, or none but that it is busy."""


@dataclass(frozen=True)
class RemoteFile:
    """One file of a repository at a commit; ``sha256`` of files in LFS, of others what git calls them."""

    path: str
    bytes: int
    sha256: str | None
    git_sha1: str | None


@dataclass(frozen=True)
class Repository:
    """What a hub says of a repository at one commit."""

    repo: str
    commit: str
    license: str | None
    files: Mapping[str, RemoteFile]


class Hub:
    """A hub that can be asked. Any number of threads may use it at once."""

    def __init__(self, settings: HubSettings, wait: Callable[[float], object]) -> None:
        """``wait`` passes seconds between two tries.

        Raises:
            DeploymentError: the environment's certificates cannot be read, or its proxies not be used.
        """
        self.endpoint = settings.endpoint
        self._token_of, self._wait = settings.token and settings.token_of, wait
        headers = {"User-Agent": f"inflight/{VERSION}", "Accept-Encoding": "identity"}
        headers |= {"Authorization": f"Bearer {settings.token}"} if settings.token else {}
        context = make_ssl_context()
        try:
            self._client = httpx.Client(
                headers=headers,
                follow_redirects=True,
                timeout=_TIMEOUT,
                verify=True if context is None else context,
            )
        except (ImportError, ValueError, httpx.InvalidURL) as error:
            raise DeploymentError(f"the environment's variables for proxies cannot be used: {error}") from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_error: object) -> None:
        self._client.close()

    def repository(self, name: ModelName) -> Repository:
        """Return what the hub has under a name; a branch becomes the commit that it is at now.

        Raises:
            DeploymentError: there is no such repository or revision, or it may not be read.
            Unreachable: the hub does not answer.
        """
        base = f"/api/models/{name.repo}"
        route = f"{base}/revision/{quote(name.revision or 'main', safe='')}"
        info = decode_object(self._get(route, name)[0], self.endpoint + route)
        commit = info.get("sha")
        if not isinstance(commit, str) or not is_commit(commit):
            raise DeploymentError(f"{self.endpoint}{base}: `sha` is {commit!r}, which is no commit")
        if name.is_pinned and commit != name.revision:
            raise DeploymentError(f"{self.endpoint}{base}: asked for commit {name.revision}, the hub answers {commit}")
        tree = list(self._tree(f"{base}/tree/{commit}?recursive=true", name))
        return Repository(name.repo, commit, _license(info), {file.path: file for file in tree})

    def read(self, repository: Repository, path: str) -> bytes:
        """Return the bytes of a small file, such as config.json.

        Raises:
            DeploymentError: it cannot be had, or has more bytes than such a file may have.
        """
        if repository.files[path].bytes > LARGEST_MANIFEST:
            raise DeploymentError(f"{repository.repo}: {path} has {repository.files[path].bytes} bytes, too many")
        return self._get(_resolve(repository, path), ModelName(repository.repo, repository.commit))[0]

    def read_part(self, repository: Repository, path: str, start: int, count: int) -> bytes:
        """Return ``count`` bytes of a file from ``start`` on; of a hub that knows no ranges all before are read, too.

        Raises:
            DeploymentError: they cannot be had.
            Unreachable: the hub does not answer.
        """
        name = ModelName(repository.repo, repository.commit)
        headers = {"Range": f"bytes={start}-{start + count - 1}"}
        return self._get(_resolve(repository, path), name, lambda response: _part(response, start, count), headers)[0]

    @contextmanager
    def stream(self, repository: Repository, file: RemoteFile, start: int) -> Iterator[tuple[int, Iterator[bytes]]]:
        """Yield where the bytes begin, ``start`` or 0, and the bytes from there to the file's end.

        Raises:
            TryLater: the connection broke, or the hub is busy; also while the bytes are read.
            DeploymentError: the file cannot be had, or the hub sends another size than it has said.
        """
        headers = {"Range": f"bytes={start}-"} if start else {}
        url = self.endpoint + _resolve(repository, file.path)
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                self._require_ok(response, ModelName(repository.repo, repository.commit))
                begin, total = _extent(response, start)
                if total is not None and total != file.bytes:
                    raise DeploymentError(
                        f"{repository.repo}: {file.path} has {file.bytes} bytes by the hub's list, and it sends {total}"
                    )
                yield begin, response.iter_raw(_CHUNK)
        except httpx.HTTPError as error:
            raise TryLater(_reason(error)) from None

    def _tree(self, route: str, name: ModelName) -> Iterator[RemoteFile]:
        page, count = route, 0
        for _number in range(_MOST_PAGES):
            data, following = self._get(page, name)
            try:
                entries = json.loads(data)
                found = [_file(entry) for entry in entries if entry["type"] == "file"]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise DeploymentError(f"{self.endpoint}{route}: not a list of files: {error!r}") from None
            yield from found
            count += len(entries)
            if count > _MOST_ENTRIES:
                raise DeploymentError(f"{name.repo} has more than {_MOST_ENTRIES} files and folders")
            if following is None:
                return
            page = self._next_page(route, following)
        raise DeploymentError(f"{self.endpoint}{route}: the list of files has no end")

    def _next_page(self, route: str, following: str) -> str:
        """Return the route of a list's next page, which is at the address ``following``.

        Only what comes behind the question mark is new; in front of it a mirror may repeat what it mirrors.
        """
        try:
            query = urlsplit(following).query
        except ValueError:
            query = ""
        if not query:
            raise DeploymentError(f"{self.endpoint}{route}: {following!r} is no address of the list's next page")
        return f"{route.partition('?')[0]}?{query}"

    def _get(
        self,
        route: str,
        name: ModelName,
        read: Callable[[httpx.Response], bytes] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> tuple[bytes, str | None]:
        """Return the bytes of an answer, after as many tries as it takes, and the address of its next page, if any.

        ``read`` takes them from the answer, by default all.
        """
        for attempt in range(_TRIES):
            try:
                with self._client.stream("GET", self.endpoint + route, headers=headers) as response:
                    self._require_ok(response, name)
                    return (read or _whole)(response), response.links.get("next", {}).get("url")
            except httpx.InvalidURL as error:
                raise DeploymentError(f"{self.endpoint}{route}: {error}") from None
            except httpx.ConnectError as error:  # no route, no such host, no server: waiting rarely cures it
                raise Unreachable(f"cannot reach {self.endpoint}: {_reason(error)}") from None
            except httpx.HTTPError as error:
                problem = TryLater(_reason(error))
            except TryLater as error:
                problem = error
            if attempt + 1 < _TRIES:
                self._wait(waiting(attempt, problem.wait))
        raise Unreachable(f"{self.endpoint} does not answer after {_TRIES} tries: {problem}")

    def _require_ok(self, response: httpx.Response, name: ModelName) -> None:
        """Raise what a refusal means."""
        status = response.status_code
        if status in (200, 206):
            return
        if status in _BUSY:
            raise TryLater(f"status {status} {response.reason_phrase}".rstrip(), _retry_after(response))
        code = response.headers.get("X-Error-Code", "")
        raise DeploymentError(self._refusal(status, code, response, name))

    def _refusal(self, status: int, code: str, response: httpx.Response, name: ModelName) -> str:
        page = f"{self.endpoint}/{name.repo}"
        if code == "GatedRepo" or (status == 403 and not code):
            if not self._token_of:
                return f"{name.repo} is gated: accept its terms at {page}, then set HF_TOKEN to a token of your account"
            return f"{name.repo} is gated, and the token's account has no access: ask for it at {page}"
        if code == "RevisionNotFound":
            return f"{name.repo} has no revision {name.revision or 'main'!r} at {self.endpoint}"
        if code == "EntryNotFound":
            return f"{response.url}: the hub's list has this file, and the hub does not"
        if code == "RepoNotFound" or status == 404:
            more = "" if self._token_of else "; if it is private, set HF_TOKEN"
            return f"there is no model {name.repo} at {self.endpoint}{more}"
        if status == 401:
            needed = f"refuses the token of {self._token_of}" if self._token_of else "wants a token: set HF_TOKEN"
            return f"{self.endpoint} {needed} ({name.repo})"
        said = response.headers.get("X-Error-Message") or response.reason_phrase
        return f"{response.url} answers {status} {said}".rstrip()


def waiting(attempt: int, asked: float | None) -> float:
    """Return the seconds to wait after a try, the first being 0: what the hub asked for, within reason, or doubling."""
    return min(_FIRST_WAIT_S * 2**attempt if asked is None else asked, _LONGEST_WAIT_S)


def _resolve(repository: Repository, path: str) -> str:
    return f"/{repository.repo}/resolve/{repository.commit}/{quote(path, safe='/')}"


def _file(entry: Mapping[str, Any]) -> RemoteFile:
    """Return an entry of a tree; of files in LFS the hub gives the SHA-256, of others the name of git's blob."""
    lfs, path, size = entry.get("lfs"), entry["path"], entry["size"]
    size = lfs.get("size", size) if lfs else size
    if not isinstance(path, str) or type(size) is not int or size < 0:
        raise ValueError(f"entry {path!r} of {size!r} bytes")
    sha256 = lfs["oid"].removeprefix("sha256:") if lfs else None
    kind, found = (r"[0-9a-f]{64}", sha256) if lfs else (r"[0-9a-f]{40}", entry.get("oid"))
    if not isinstance(found, str) or not re.fullmatch(kind, found):
        raise ValueError(f"the hash of {path!r} is {found!r}")
    return RemoteFile(path, size, sha256, None if lfs else found)


def _license(info: Mapping[str, Any]) -> str | None:
    """Return the licence's name by the model's card; ``other`` is a licence of its own, whose name comes with it."""
    card = info.get("cardData")
    card = card if isinstance(card, dict) else {}
    found = card.get("license")
    if found is None:
        tags = info.get("tags")
        tags = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
        found = next((tag.removeprefix("license:") for tag in tags if tag.startswith("license:")), None)
    own = card.get("license_name")
    text = ", ".join(map(str, found)) if isinstance(found, list) else found and str(found)
    return plain(f"{text} ({own})" if own else text) if text else None


def _extent(response: httpx.Response, start: int) -> tuple[int, int | None]:
    """Return where the bytes of an answer begin, and how many the whole file has; None: it does not say.

    Raises:
        TryLater: the hub begins elsewhere than asked.
    """
    if response.status_code == 200:  # the whole file, whatever was asked for
        length = response.headers.get("Content-Length", "")
        return 0, int(length) if _DIGITS.fullmatch(length) else None
    found = re.fullmatch(r"bytes ([0-9]{1,18})-[0-9]{1,18}/([0-9]{1,18}|\*)", response.headers.get("Content-Range", ""))
    if found is None or int(found[1]) != start:
        raise TryLater(f"asked for bytes from {start}, got {response.headers.get('Content-Range')!r}")
    return start, None if found[2] == "*" else int(found[2])


def _part(response: httpx.Response, start: int, count: int) -> bytes:
    """Return ``count`` bytes of a file from ``start`` on. Raises TryLater: the answer ends before."""
    begin, _total = _extent(response, start)
    data, stop = bytearray(), start - begin + count
    for chunk in response.iter_raw(_CHUNK):
        data += chunk
        if len(data) >= stop:
            return bytes(data[start - begin : stop])
    raise TryLater(f"asked for {count} bytes from {start}, got {max(0, len(data) - start + begin)}")


def _whole(response: httpx.Response) -> bytes:
    """Return the bytes of an answer, which are no more than a document has."""
    data = bytearray()
    for chunk in response.iter_raw(_CHUNK):  # no compression was asked for; what is sent so may be of any size
        data += chunk
        if len(data) > LARGEST_MANIFEST:
            raise DeploymentError(f"{response.url}: the answer has no end: more than {LARGEST_MANIFEST} bytes")
    return bytes(data)


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds that the hub asks to wait; a date is not looked at."""
    value = response.headers.get("Retry-After", "")
    return float(value) if _DIGITS.fullmatch(value) else None


def _reason(error: httpx.HTTPError) -> str:
    return str(error) or type(error).__name__
