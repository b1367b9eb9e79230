"""Load for a running server by locust, from a scenario; docs/locust.md is about it.

    locust -f loadtest/locustfile.py --scenario fixed --host http://127.0.0.1:8000 --grpc-url 127.0.0.1:8001

Naming a user class, GrpcUser or HttpUser, takes it alone; else there are as many of either.
"""

from inflight.load.swarm.swarm import install
from inflight.load.swarm.users import GrpcUser, HttpUser, ScenarioShape

__all__ = ["GrpcUser", "HttpUser", "ScenarioShape"]

install()
