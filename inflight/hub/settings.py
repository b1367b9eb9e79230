"""How a hub is reached: the environment variables of huggingface_hub, with their meanings there.

``HF_ENDPOINT``; ``HF_TOKEN``, or the file that ``hf auth login`` writes below ``HF_HOME``; ``HF_HUB_OFFLINE``; the
certificates of ``SSL_CERT_FILE``, ``REQUESTS_CA_BUNDLE`` or ``CURL_CA_BUNDLE``; the proxies of ``HTTPS_PROXY``. All are
in docs/models.md.
"""

from __future__ import annotations

import os
import re
import ssl
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from inflight.errors import DeploymentError

_ENDPOINT = "https://huggingface.co"
_TRUE = {"1", "ON", "YES", "TRUE"}
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
_TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
_BUNDLES = ("SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")


@dataclass(frozen=True)
class HubSettings:
    """Where the hub is, and who asks it."""

    endpoint: str
    token: str | None
    token_of: str
    """Where the token is from: a variable, or the file of a login."""
    offline: str | None
    """The variable by which nothing may be dialled; None: the hub may be."""

    @classmethod
    def from_environment(cls) -> HubSettings:
        """Read the environment.

        Raises:
            DeploymentError: a variable has a value that cannot be meant.
        """
        endpoint = (os.environ.get("HF_ENDPOINT") or _ENDPOINT).rstrip("/")
        if "@" in endpoint:  # and the value is not told: manifests, archives and messages would hold the password
            raise DeploymentError(
                "HF_ENDPOINT has a user's name or password before an @, which is not taken; "
                "set the address alone, and HF_TOKEN to a token that the mirror takes"
            )
        try:
            parts = urlsplit(endpoint)
            known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
        except ValueError:
            known = False
        if not known:
            raise DeploymentError(f"HF_ENDPOINT is {endpoint!r}; it must be an address such as {_ENDPOINT}")
        offline = _first_set(_OFFLINE)
        if os.environ.get(offline or "", "").upper() not in _TRUE:
            offline = None
        return cls(endpoint, *_token(), offline)


def _first_set(names: Iterable[str]) -> str | None:
    """Return the first of some variables that has a value: the others are not looked at, as in huggingface_hub."""
    return next((name for name in names if os.environ.get(name)), None)


def _token() -> tuple[str | None, str]:
    """Return the token to send, the variable's, else the one that ``hf auth login`` stored; and where it is from."""
    if variable := _first_set(_TOKENS):
        given, where = os.environ[variable], variable
    else:
        path = Path(os.path.expandvars(os.environ.get("HF_TOKEN_PATH") or _hf_home() / "token"))
        stored = expand_home(path)
        where = str(stored or path)
        try:
            given = stored.read_text(encoding="utf-8") if stored else ""
        except (OSError, UnicodeDecodeError):  # nobody has logged in
            given = ""
    token = given.strip()
    if not re.fullmatch(r"[\x21-\x7e]*", token):
        raise DeploymentError(f"{where} holds characters that no token has")
    return token or None, where


def expand_home(path: Path) -> Path | None:
    """Return a path with a home directory in place of ``~``; None: the user has none, as in some containers."""
    try:
        return path.expanduser()
    except RuntimeError:
        return None


def _hf_home() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{cache}/huggingface")


def make_ssl_context() -> ssl.SSLContext | None:
    """Return what checks the hub's certificate; None: nothing in the environment says, and the usual roots do.

    Raises:
        DeploymentError: the certificates that a variable names cannot be read.
    """
    for name in _BUNDLES:
        if value := os.environ.get(name):
            try:
                if Path(value).is_dir():
                    return ssl.create_default_context(capath=value)
                return ssl.create_default_context(cafile=value)
            except (OSError, ssl.SSLError) as error:
                raise DeploymentError(f"{name}: {value}: no certificates can be read: {error}") from None
    return None
