"""The files of keys and certificates that a deployment names, as Envoy takes them, and again when they change.

Envoy does not read them itself: a key file has to be translated, and a certificate that does not fit its key is found
here, where it changes nothing but a line of the log.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

from inflight.errors import DeploymentError
from inflight.serve.envoy.bootstrap import bootstrap, discovered, routes
from inflight.serve.envoy.conflicts import check_settings
from inflight.serve.envoy.filters import api_keys, tokens
from inflight.serve.envoy.values import AUTH, CERTIFICATE, CLIENT_CA, KEYS, ROUTES, Config, Upstreams, typed
from inflight.settings.api_keys import LARGEST_FILE, read_keys
from inflight.settings.deployment import Deployment

CONFIGURATION = "envoy.json"
"""The file that Envoy starts with."""
ADMIN_SOCKET = "admin.sock"
"""The socket of Envoy's administration, in the folder of its files."""
_ADMIN_ELSEWHERE = Path("/tmp/admin.sock")
"""The same, where the folder is seen elsewhere: it may be mounted read-only."""
_SECRET = "extensions.transport_sockets.tls.v3.Secret"
_EXTENSION = "config.core.v3.TypedExtensionConfig"


def write_configuration(
    folder: Path,
    deployment: Deployment,
    replicas: Sequence[Upstreams],
    addresses: Sequence[str],
    seen: Path | None = None,
) -> None:
    """Write all that Envoy reads into a folder: what it starts with, its routes, and the keys and certificates.

    Args:
        folder: where the files are written; only this user can read those with keys and certificates.
        deployment: whose ``door`` it is.
        replicas: the servers that take the requests.
        addresses: where clients are served, ``host:port`` each.
        seen: where Envoy will find the folder, as in a container, and may not be able to write; None: where it is.

    Raises:
        DeploymentError: a file of keys or certificates cannot be used, or settings exclude each other.
    """
    check_settings(deployment)
    socket = Path(ADMIN_SOCKET) if seen is None else _ADMIN_ELSEWHERE  # Envoy runs in the folder; see ``admin.ask``
    write(folder / CONFIGURATION, bootstrap(deployment, replicas, addresses, seen or folder, socket))
    write_routes(folder, deployment, replicas)
    for name in named_files(deployment):
        write_secret(folder, deployment, name)


def write_routes(folder: Path, deployment: Deployment, replicas: Sequence[Upstreams], draining: bool = False) -> None:
    """Write the table of routes, for anybody to read; ``draining``: nothing but the status is served."""
    write(folder / f"{ROUTES}.json", discovered(routes(deployment, replicas, draining)))


def write_secret(folder: Path, deployment: Deployment, name: str) -> None:
    """Write one of the resources of ``named_files``, for this user alone to read.

    Raises:
        DeploymentError: as ``resource``.
    """
    write(folder / f"{name}.json", discovered(resource(deployment, name)), 0o600)


def write(path: Path, content: Config, mode: int = 0o644) -> None:
    """Write a file as a whole: Envoy reads it when it is moved into its place."""
    new = path.with_name(f".{path.name}.new")
    new.unlink(missing_ok=True)  # it may be for others to read, or lead elsewhere
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w") as file:
        file.write(json.dumps(content, indent=1) + "\n")
    new.replace(path)


def named_files(deployment: Deployment) -> dict[str, tuple[Path, ...]]:
    """Return the files that each of Envoy's resources is made of, by the resource's name."""
    door = deployment.door
    found = {
        KEYS: (door.api_keys_file or door.jwt.jwks_file,),
        CERTIFICATE: (door.tls.certificate, door.tls.private_key),
        CLIENT_CA: (door.tls.client_ca,),
    }
    return {name: files for name, some in found.items() if (files := tuple(filter(None, some)))}


def resource(deployment: Deployment, name: str) -> Config:
    """Return one of the resources of ``named_files``, made of its files as they are now.

    Raises:
        DeploymentError: a file cannot be read or is not what it should be; the message names the setting.
    """
    makers: dict[str, Callable[[Deployment], Config]] = {
        KEYS: _keys,
        CERTIFICATE: _certificate,
        CLIENT_CA: _client_ca,
    }
    return makers[name](deployment)


def _keys(deployment: Deployment) -> Config:
    door = deployment.door
    if door.api_keys_file is not None:
        _, keys = read_keys(door.api_keys_file, "door.api_keys_file")
        asked = api_keys(keys)
    else:
        assert door.jwt.jwks_file is not None, "the caller looks"
        asked = tokens(door, _jwks(door.jwt.jwks_file))
    return typed(_EXTENSION, name=AUTH, typed_config=asked)


def _jwks(path: Path) -> str:
    text = _read(path, "door.jwt.jwks_file")
    try:
        keys = json.loads(text)["keys"]
        if not keys or not all(isinstance(key, dict) and "kty" in key for key in keys):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):  # the last: it is nested too deep
        raise DeploymentError(f"door.jwt.jwks_file: {path} is not a set of keys (JWKS)") from None
    return text


def _certificate(deployment: Deployment) -> Config:
    tls = deployment.door.tls
    assert tls.certificate is not None, "the caller looks"
    assert tls.private_key is not None, "the settings ask for both"
    texts = _read(tls.certificate, "door.tls.certificate"), _read(tls.private_key, "door.tls.private_key")
    try:
        # The empty password keeps OpenSSL from asking for one.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(tls.certificate, tls.private_key, password="")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise DeploymentError(
            f"door.tls: {tls.certificate} and {tls.private_key} are not a certificate and its key: {reason}"
        ) from None
    certificate, key = ({"inline_string": text} for text in texts)
    return typed(_SECRET, name=CERTIFICATE, tls_certificate={"certificate_chain": certificate, "private_key": key})


def _client_ca(deployment: Deployment) -> Config:
    path = deployment.door.tls.client_ca
    assert path is not None, "the caller looks"
    text = _read(path, "door.tls.client_ca")
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_verify_locations(path)  # a text it takes in ASCII alone
        if not context.get_ca_certs():
            raise ValueError("no certificate of an authority is in it")
    except (ssl.SSLError, ValueError) as error:
        reason = getattr(error, "reason", None) or str(error)
        raise DeploymentError(f"door.tls.client_ca: {path} has no certificates: {reason}") from None
    return typed(_SECRET, name=CLIENT_CA, validation_context={"trusted_ca": {"inline_string": text}})


def _read(path: Path, setting: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise DeploymentError(f"{setting}: {path} has more than {LARGEST_FILE} bytes")
        return content.decode()
    except OSError as error:
        raise DeploymentError(f"{setting}: {path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DeploymentError(f"{setting}: {path} is not text") from None
