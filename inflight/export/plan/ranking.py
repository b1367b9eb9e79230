"""All GPUs of the table for one load: who serves it at what price, and who cannot, with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError
from inflight.export.plan.gpus import Gpu
from inflight.export.plan.plan import Plan, PlanRequest, make_plan


@dataclass(frozen=True)
class Ranking:
    """Plans in the order of their price, and the GPUs without one."""

    plans: tuple[Plan, ...]
    refused: tuple[tuple[str, str], ...]
    """Name and reason."""


def rank(config: ModelConfig, gpus: Iterable[Gpu], request: PlanRequest, named: Sequence[Plan] = ()) -> Ranking:
    """Plan the model on every GPU, at the table's prices.

    With a rate, the order is that of the price per hour of as many GPUs as hold it; else of the price per million
    generated tokens of a fully used group.

    Args:
        config: of the checkpoint.
        gpus: to rank.
        request: what each is planned for; its price is that of the GPUs that were named.
        named: plans of GPUs that were named, with the request's price and their efficiencies: they are taken as they
            are.
    """
    planned = {plan.gpu.name: plan for plan in named}
    plans, refused = [], []
    for gpu in gpus:
        try:
            plan = planned.get(gpu.name) or make_plan(config, gpu, replace(request, price=None))
        except DeploymentError as error:
            refused.append((gpu.name, str(error).removeprefix(f"{gpu.name}: ")))
            continue
        if plan.fleet.saturated:
            refused.append((gpu.name, f"{plan.fleet.gpus} GPUs do not hold {request.rate:g} requests/s"))
        else:
            plans.append(plan)
    return Ranking(tuple(sorted(plans, key=lambda plan: (_price(plan), plan.gpu.name))), tuple(refused))


def _price(plan: Plan) -> float:
    return plan.fleet.usd_per_hour if plan.request.rate is not None else plan.fleet.usd_per_million_tokens or 0.0
