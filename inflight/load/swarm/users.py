"""What locust runs: users of two kinds, and a shape that follows a scenario's phases."""

from __future__ import annotations

from typing import ClassVar

from locust import LoadTestShape, User, constant, task
from locust.user.task import LOCUST_STATE_STOPPING

from inflight.load.arrivals import most_slots
from inflight.load.swarm.lane import GRPC, HTTP
from inflight.load.swarm.levels import level


class ScenarioUser(User):
    """One of the sessions that run at any time; in an open loop, one that hands over what arrives."""

    abstract = True
    wait_time = constant(0)
    kind: ClassVar[str]

    @task
    def drive(self) -> None:
        """Do the next thing that there is to do."""
        self.environment.inflight.drive(self.kind)

    def stop(self, force: bool = False) -> bool:
        """Stop the user, as locust's own; one that is stopping already is no error.

        On SIGTERM, a locust that started by itself (--autostart) stops its users twice.
        """
        stopping = self._state == LOCUST_STATE_STOPPING
        return False if stopping and not force else bool(super().stop(force))


class GrpcUser(ScenarioUser):
    """Streams over gRPC."""

    kind = GRPC


class HttpUser(ScenarioUser):
    """Streams over HTTP's generate_stream."""

    kind = HTTP


class ScenarioShape(LoadTestShape):
    """Users by the phases of the scenario; in an open loop, as many as there are processes to send."""

    def tick(self) -> tuple[int, float] | None:
        """Return users and users per second to come or go; None, when the load has ended and all answers are here."""
        swarm = self.runner.environment.inflight
        if swarm.over:
            swarm.finish()
            return None
        phases = swarm.workload.scenario.phases
        if swarm.workload.scenario.open:
            return swarm.stations, float(swarm.stations)
        return level(phases, swarm.clock()), float(most_slots(phases))
