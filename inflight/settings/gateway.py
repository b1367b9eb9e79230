"""GatewaySettings: OpenAI's API, served by a process beside Triton. docs/gateway.md describes it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, field_validator

from inflight.settings.gateway_quality import GatewayQualitySettings
from inflight.settings.section import Section

Seconds = Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class GatewaySettings(Section):
    """OpenAI's API."""

    enabled: bool = Field(True, description="serve OpenAI's API beside Triton's")
    host: str | None = Field(None, description="address to bind; null: server.host")
    port: int = Field(8080, ge=1, le=65535, description="HTTP port of OpenAI's API")
    model_name: Name | None = Field(
        None, description="the name of the model in OpenAI's API; null: the name of the checkpoint's directory or file"
    )
    model_aliases: tuple[Name, ...] = Field((), description="other names that requests may give in `model`")
    api_keys_file: Path | None = Field(
        None,
        description="file of API keys, one per line, relative to the deployment; every route but /health then needs "
        "one. It is read again when it changes. null: no keys are needed",
    )
    cors_origins: tuple[str, ...] = Field(
        (), description="origins, such as https://chat.example.org, whose web pages may send requests; `*`: all"
    )
    strict_fields: bool = Field(
        False,
        description="refuse a request with a field that would have no effect; otherwise x-ignored-fields names it",
    )
    max_body_bytes: int = Field(
        16 << 20,
        ge=1024,
        description="bytes of a request's body; those of all requests that run may have 16 times as many, "
        "beside 64 KiB of each",
    )
    max_concurrent_requests: int = Field(1024, ge=1, description="requests at once; one more is refused with 503")
    client_timeout_s: Seconds = Field(
        60,
        description="seconds that a client may take for its headers, between two parts of its body, and to take what "
        "waits for it of its answer; and for all of its body, with a second more for each 16 KiB",
    )
    max_pending_bytes: int = Field(
        1 << 20, ge=4096, description="bytes of a stream that wait for a slow client, which must make room for more"
    )
    stream_keep_alive_s: Seconds | None = Field(
        None, description="a stream that is silent for so long gets a comment, for proxies in between; null: none"
    )
    resume: bool = Field(
        True,
        description="a request whose engine breaks away goes on with the same tokens when the engine is back, after "
        "up to 2 crashes, or 3 if a token has come; false: it ends with the error",
    )
    engine_wait_s: float | None = Field(
        None,
        ge=0,
        le=86_400,
        allow_inf_nan=False,
        description="seconds that a request waits for an engine that starts or starts again, before it is refused with "
        "503; 0: it does not wait. null: until `inflight serve` gives the engine up, or as long as a start may take "
        "(`server.start_timeout_s`) where something else starts it",
    )
    tool_parser: str = Field(
        "auto", description="format of tool calls in the model's output; auto: as the checkpoint's template says; none"
    )
    reasoning_parser: Literal["auto", "none"] = Field(
        "auto", description="auto: reasoning is found as the checkpoint's template says; none: it is left in the text"
    )

    embedding_pooling: Literal["auto", "last", "mean"] = Field(
        "auto",
        description="/v1/embeddings is of the last token's hidden state, or of the mean of all; auto: as the "
        "checkpoint's modules.json says, or the last token's",
    )
    rerank_labels: tuple[Name, Name] = Field(
        ("yes", "no"), description="the answers whose probabilities are the score of a document"
    )
    rerank_instruction: str = Field(
        "Given a web search query, retrieve relevant passages that answer the query",
        description="what documents are judged by, where a request does not say",
    )
    rerank_template: str | None = Field(
        None,
        description="the whole prompt, special tokens included, with {query} and {document}, and where it wants them "
        "{instruction}, {yes} and {no}; null: Qwen3-Reranker's, in the checkpoint's chat template",
    )

    quality: GatewayQualitySettings = GatewayQualitySettings()

    @field_validator("rerank_template")
    @classmethod
    def _has_places(cls, value: str | None) -> str | None:
        if value is not None and not ("{query}" in value and "{document}" in value):
            raise ValueError("it must have the places {query} and {document}")
        return value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            parts = urlsplit(origin)
            whole = f"{parts.scheme}://{parts.netloc}"
            if origin != "*" and (parts.scheme not in ("http", "https") or not parts.hostname or whole != origin):
                raise ValueError(f"{origin!r} is not an origin, such as https://chat.example.org, or `*`")
        return value
