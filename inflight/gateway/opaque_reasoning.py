"""Reasoning as text that only this server reads: what clients that show no reasoning carry from turn to turn.

The gateway keeps nothing, so what the next turn needs travels with the client. The text is encoded and not encrypted:
it is the client's own, and nothing rests on its being secret or unchanged.
"""

from __future__ import annotations

import base64
import binascii

_PREFIX = "inflight.1."


def seal_reasoning(text: str) -> str:
    """Return the opaque form of a reasoning text."""
    return _PREFIX + base64.urlsafe_b64encode(text.encode("utf-8", "surrogatepass")).decode()


def open_reasoning(sealed: str) -> str | None:
    """Return the reasoning text of its opaque form; None: this server did not make it."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        return base64.b64decode(sealed[len(_PREFIX) :].encode(), b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return None
