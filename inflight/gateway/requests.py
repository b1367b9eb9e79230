"""What the gateway knows of a request beside its body: its id, the client's key, its route and when it came."""

from __future__ import annotations

import re
import secrets
import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from inflight.gateway.errors import invalid

_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}", re.ASCII)
_STATE = "inflight"


@dataclass
class RequestState:
    """One request, from its first byte to its last."""

    request_id: str
    """The client's ``x-request-id``, or one of ours; in the response, the log and the engine's request id."""
    arrived: float = field(default_factory=time.perf_counter)
    """``time.perf_counter`` when its headers had been read."""
    route: str = "other"
    """The path of the routes table; a label of metrics."""
    client: str | None = None
    """Who asks: the name that the door gives, or one for the API key; None: nobody vouches for who it is."""

    @property
    def seconds(self) -> float:
        """Seconds since its arrival."""
        return time.perf_counter() - self.arrived

    def engine_id(self) -> str:
        """Return a new id for a request to the engine: this one's, and something that nobody can guess.

        Who knows a request's id at the engine can stop it there.
        """
        return f"{self.request_id}.{secrets.token_hex(8)}"


def set_state(scope: Scope, state: RequestState) -> None:
    """Attach the state to a request's scope."""
    scope.setdefault("state", {})[_STATE] = state


def state_of(request: Request | Scope) -> RequestState:
    """Return the state of a request."""
    scope = request.scope if isinstance(request, Request) else request
    state: RequestState = scope["state"][_STATE]
    return state


def new_id() -> str:
    """Return an id for a request that brought none."""
    return f"req_{secrets.token_hex(16)}"


def check_id(given: str) -> str:
    """Return an ``x-request-id`` that can stand in headers and logs.

    Raises:
        ApiError: 400.
    """
    if not _ID.fullmatch(given):
        raise invalid(
            "the header x-request-id must have 1 to 128 characters, of letters, digits and ._:/+=@-", "x-request-id"
        )
    return given
