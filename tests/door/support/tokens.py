"""Tokens (JWT) of an issuer of the tests' own."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Mapping
from typing import Any


def encoded(data: bytes) -> str:
    """Return base64url without padding."""
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def token(secret: bytes, head: Mapping[str, Any] | None = None, **claims: Any) -> str:
    """Return a token signed by HS256; ``head`` has more parameters of its header."""
    parts = {"alg": "HS256", "kid": "1"} | dict(head or {}), claims
    signed = ".".join(encoded(json.dumps(part).encode()) for part in parts)
    return f"{signed}.{encoded(hmac.digest(secret, signed.encode(), 'sha256'))}"


def jwks(secret: bytes) -> str:
    """Return the set of keys that an issuer publishes for its secret."""
    return json.dumps({"keys": [{"kty": "oct", "alg": "HS256", "kid": "1", "k": encoded(secret)}]})
