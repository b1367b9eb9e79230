"""ApiKeys: the keys of a file, one per line, compared in constant time and read again when the file changes."""

from __future__ import annotations

import hmac
import logging
import time
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.settings.api_keys import Stamp, client_of, hash_of, read_keys, stamp_of

log = logging.getLogger(__name__)

LOOK_S = 1.0
"""Seconds between two looks at the file, at least."""


class ApiKeys:
    """The keys that requests may bring. The keys themselves are not kept, only their hashes."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            DeploymentError: the file cannot be read, or has no key.
        """
        self._path = path
        self._stamp, self._hashes = _read(path)
        self._looked = time.monotonic()
        self._told = ""
        """What was last said of a file that cannot be read: it is said once."""

    def client_of(self, key: str) -> str | None:
        """Return a name for the client whose key this is, made from the key's hash; None: it is no key of the file."""
        self._look()
        given = hash_of(key)
        # Each is compared to its end, whether or not one before it was equal.
        known = [hmac.compare_digest(given, one) for one in self._hashes]
        return client_of(key) if any(known) else None

    def _look(self) -> None:
        """Read the file again if it has changed. What cannot be read leaves the keys as they are."""
        now = time.monotonic()
        if now - self._looked < LOOK_S:
            return
        self._looked = now
        try:
            if stamp_of(self._path) != self._stamp:
                self._stamp, self._hashes = _read(self._path)
                self._told = ""
                log.info("%s: read again; %d keys", self._path, len(self._hashes))
        except (DeploymentError, OSError) as error:
            if str(error) != self._told:
                self._told = str(error)
                log.error("%s; the keys stay as they were", error)


def _read(path: Path) -> tuple[Stamp, tuple[bytes, ...]]:
    stamp, keys = read_keys(path, "gateway.api_keys_file")
    return stamp, tuple(hash_of(key) for key in keys)
