"""Settings of a deployment that exclude each other with the door."""

from __future__ import annotations

from inflight.errors import DeploymentError
from inflight.settings.deployment import Deployment


def check_settings(deployment: Deployment) -> None:
    """Check that the settings of a deployment with a door, and the command's overrides of them, can hold together.

    Raises:
        DeploymentError: two exclude each other; the message names both.
    """
    door, gateway = deployment.door, deployment.gateway
    if gateway.host is not None:
        raise DeploymentError("gateway.host has no effect with the door, which listens on server.host; leave it out")
    if door.jwt.jwks_file is not None and gateway.api_keys_file is not None:
        raise DeploymentError("gateway.api_keys_file and door.jwt.jwks_file exclude each other")
    if door.behind_a_door and door.tls.certificate is not None:
        raise DeploymentError("door.tls and door.behind_a_door exclude each other: doors speak without TLS")
    if door.behind_a_door and door.rate_limit.requests is not None and not door.asks:
        raise DeploymentError(
            "door.rate_limit and door.behind_a_door need api_keys_file or jwt: by its address, the door before is the "
            "only client"
        )
