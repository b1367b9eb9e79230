"""Gateway: what every endpoint needs, made once at the start and found at ``request.app.state.gateway``."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from starlette.requests import Request

from inflight.addresses import nearest_of
from inflight.client.grpc_transport import GrpcTransport
from inflight.contract import ENGINE, ENGINE_INPUT
from inflight.errors import DeploymentError
from inflight.gateway.engine_client import EngineClient
from inflight.gateway.errors import ApiError
from inflight.gateway.fields import Fields, Reader, Variables
from inflight.gateway.fork_server import ForkServer
from inflight.gateway.hints import TEMPLATE_HINTS, hint_variables
from inflight.gateway.keys import ApiKeys
from inflight.gateway.load import Load
from inflight.gateway.metrics import GatewayMetrics
from inflight.gateway.quality import QualityMonitor
from inflight.gateway.readiness import Readiness
from inflight.gateway.resuming import Engine, ResumingEngine, Resumption
from inflight.gateway.tools import shows_tools
from inflight.settings.deployment import Deployment, model_name
from inflight.settings.gateway import GatewaySettings
from inflight.text.chat import ChatTemplate, chat_template_of
from inflight.text.embedding import EmbeddingFormat, read_embedding_format
from inflight.text.output.find import find_chat_format
from inflight.text.output.format import ChatFormat
from inflight.text.output.harmony import HarmonyFormat
from inflight.text.tokenizer import Tokenizer

CONNECT_TIMEOUT_S = 2.0
"""Seconds that one try to reach the engine may take."""


@dataclass(frozen=True)
class Gateway:
    """The parts of one gateway. What changes has its own class, with one writer."""

    deployment: Deployment
    tokenizer: Tokenizer
    readiness: Readiness
    """Whether the engine can be called now."""
    metrics: GatewayMetrics
    load: Load
    """The requests that run."""
    keys: ApiKeys | None
    """None: requests need no API key."""
    chat_template: ChatTemplate | None
    """None: the checkpoint has none."""
    chat_format: ChatFormat
    """How the checkpoint writes calls of tools and reasoning."""
    engine: Engine
    quality: QualityMonitor | None
    """None: no answer is scored again."""
    embedding_format: EmbeddingFormat
    """How the checkpoint makes an embedding of its hidden states."""
    fork_server: ForkServer[Gateway] | None = None
    """Prepares the largest requests; None: threads do, since the gateway is not the only one in its process."""
    created: int = field(default_factory=lambda: int(time.time()))
    """When the gateway began, in seconds since the epoch; ``created`` of the models."""

    def with_fork_server(self) -> Gateway:
        """Return it with a process that forks, which must be started before threads that run Python are.

        Raises:
            DeploymentError: there can be no more processes.
        """
        shared = (self.deployment, self.tokenizer, self.chat_template, self.chat_format, self.embedding_format)
        try:
            return replace(self, fork_server=ForkServer(self, [one for one in shared if one is not None]))
        except OSError as error:
            raise DeploymentError(f"the gateway cannot fork a process: {error}") from None

    @property
    def end_ids(self) -> frozenset[int]:
        """The tokens that end an answer: the checkpoint's, and those of its chat format."""
        return self.tokenizer.config.end_ids | self.chat_format.stop_token_ids

    @property
    def settings(self) -> GatewaySettings:
        """The section ``gateway`` of the deployment."""
        return self.deployment.gateway

    @property
    def model_name(self) -> str:
        """The name under which the model is listed, and which answers have."""
        return self.settings.model_name or model_name(self.deployment.model)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that a request may give in ``model``."""
        return (self.model_name, *self.settings.model_aliases)

    @property
    def max_model_len(self) -> int | None:
        """Tokens of a prompt and its output together, at most; None: only the engine knows."""
        return self.deployment.max_sequence_length(self.tokenizer.config.max_length)

    def template_reads(self, name: str) -> bool:
        """Return whether the chat template reads fields of this name."""
        return self.chat_template is not None and self.chat_template.reads(name)

    def obeys(self, chat: Mapping[str, Any], hint: str, value: Any) -> Variables | None:
        """Return the template's variables that a hint of a ``chat`` sets; None: the checkpoint does not obey it."""
        template = self.template_of(chat) if hint in TEMPLATE_HINTS else None
        return None if template is None else hint_variables(hint, value, template, self.chat_format)

    def template_of(self, chat: Mapping[str, Any]) -> ChatTemplate | None:
        """Return the template that shows a chat, given its body, checked or not; None: there is none."""
        messages = chat.get("messages")
        listed = messages if isinstance(messages, list) else ()
        return self.chat_template and self.chat_template.chosen(listed, shows_tools(chat))

    def read(self, reader: Reader, body: Mapping[str, Any]) -> Fields:
        """Return the fields of a body; ``model`` is among them, left out or not.

        Raises:
            ApiError: 400, naming the field by its path, or 404: it names a model that is not served.
        """
        strict = self.settings.strict_fields
        fields = reader.read(body, strict=strict, spared=self.template_reads, obeys=partial(self.obeys, body))
        model = self.check_model(fields.get("model", self.model_name))
        return replace(fields, values={**fields.values, "model": model})

    def check_model(self, name: str) -> str:
        """Return the name of a model.

        Raises:
            ApiError: 404: the deployment has no such model.
        """
        if name not in self.model_names:
            known = ", ".join(self.model_names)
            message = f"the model {name[:256]!r} does not exist; this server has {known}"
            raise ApiError(404, message, param="model", code="model_not_found")
        return name


def make_gateway(deployment: Deployment, *, kept: bool = False) -> Gateway:
    """Return the gateway of a deployment; it asks for the engine at ``server.grpc_port``.

    Args:
        deployment: the deployment.
        kept: whether what starts the engine stops this process when it gives the engine up.

    Raises:
        DeploymentError: the checkpoint's tokenizer or the file of API keys cannot be read.
    """
    settings, server = deployment.gateway, deployment.server
    tokenizer, metrics = Tokenizer.from_checkpoint(deployment.model), GatewayMetrics()
    address = f"{nearest_of(server.host)}:{server.grpc_port}"
    readiness = Readiness(GrpcTransport(address, ENGINE, CONNECT_TIMEOUT_S), metrics)
    return Gateway(
        deployment,
        tokenizer,
        readiness,
        metrics,
        Load(settings.max_concurrent_requests),
        ApiKeys(settings.api_keys_file) if settings.api_keys_file else None,
        chat_template_of(tokenizer.config),
        _chat_format(tokenizer, settings),
        ResumingEngine(EngineClient(address), readiness, metrics, _resumption(deployment, kept)),
        _quality(deployment, metrics, tokenizer),
        read_embedding_format(deployment.model, settings.embedding_pooling),
    )


def _resumption(deployment: Deployment, kept: bool) -> Resumption:
    settings, wait_s = deployment.gateway, deployment.gateway.engine_wait_s
    behind_tokens = ENGINE_INPUT["resumed_ids"].served(deployment.engine.kind)
    if wait_s is None:
        return Resumption(settings.resume, behind_tokens, deployment.start_timeout_s, kept)
    return Resumption(settings.resume, behind_tokens, wait_s, kept=False)


def _quality(deployment: Deployment, metrics: GatewayMetrics, tokenizer: Tokenizer) -> QualityMonitor | None:
    settings = deployment.gateway.quality
    if settings.reference is None or not settings.sample_ratio:
        return None
    longest = deployment.max_sequence_length(tokenizer.config.max_length)
    return QualityMonitor(settings, EngineClient(settings.reference), metrics, longest)


def _chat_format(tokenizer: Tokenizer, settings: GatewaySettings) -> ChatFormat:
    form = find_chat_format(tokenizer, settings.tool_parser)
    if settings.reasoning_parser == "none":
        if isinstance(form, HarmonyFormat):
            raise DeploymentError(f"gateway.reasoning_parser is none: the chat format {form.name} has its own messages")
        form.has_reasoning = False
    return form


def gateway_of(request: Request) -> Gateway:
    """Return the gateway that serves a request."""
    gateway: Gateway = request.app.state.gateway
    return gateway
