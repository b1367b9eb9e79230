"""/v1/embeddings: texts or token ids to vectors, by the pooling that the checkpoint was trained for."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from inflight.gateway.context import Gateway, gateway_of
from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.gateway.errors import internal, invalid
from inflight.gateway.fields import Fields, Reader, hint, refused, served, table, unsupported
from inflight.gateway.preparing import prepared
from inflight.gateway.prompts import Prompt, read_prompts
from inflight.gateway.readings import Reading, read_all
from inflight.gateway.sampling import most_tokens, request_arguments, truncated
from inflight.gateway.scoring_fields import REQUEST, TRUNCATION, answer_head, usage_of
from inflight.gateway.sse import while_connected
from inflight.gateway.values import anything, boolean, integer, mapping, one_of
from inflight.gateway.workers import off_loop, written

MOST_INPUTS = 2048
"""Inputs of one request: OpenAI's limit."""
EMBEDDINGS = table(
    REQUEST,
    TRUNCATION,
    served("input", anything(), "a text, a list of texts, a list of token ids, or a list of such lists; 2,048 at most"),
    served("encoding_format", one_of("float", "base64"), "base64: of 32-bit floats, the lowest byte first"),
    served("dimensions", integer(1, 1 << 20), "shorter vectors, where the checkpoint was trained for it (Matryoshka)"),
    served("add_special_tokens", boolean(), "true without it: a text gets the checkpoint's special tokens"),
    hint("metadata", mapping(), "nothing is stored"),
    refused("normalize use_activation", "vectors have the length 1", True),
    refused("embd_normalize", "vectors have the length 1: the Euclidean norm, 2", 2),
    refused("messages", "send the text of `input`; chats are not rendered for embeddings"),
    refused("input_type prompt_name task", "put the instruction, as the model's makers give it, before the text"),
    refused("embed_dtype output_dtype", "vectors are of 32-bit floats", "float32", "float"),
    refused("endianness", "base64 holds little-endian floats", "native", "little"),
    refused("image images", "inputs are text"),
)
READER = Reader(EMBEDDINGS, required=("input",))


async def embeddings(request: Request) -> Response:
    """Answer with one vector for each input. Raises ApiError."""
    gateway = gateway_of(request)
    fields, readings, length = await prepared(request, _prepare)
    gateway.metrics.ignored_fields(fields.ignored)
    deltas = await while_connected(request, read_all(gateway, readings))
    head = {**answer_head(fields, "embd"), "object": "list"}
    head |= {"model": fields["model"], "usage": usage_of(readings, deltas)}
    as_base64 = fields.get("encoding_format", "float") == "base64"
    size = sum(delta.outputs["embedding"].size for delta in deltas if "embedding" in delta.outputs)
    body = await off_loop(lambda: _body(head, deltas, length, as_base64), size)
    return Response(body, media_type="application/json", headers=fields.headers())


def _prepare(request: Request, gateway: Gateway, body: dict[str, Any]) -> tuple[Fields, list[Reading], int | None]:
    """Return the fields, the inputs, and the length that vectors are cut to."""
    fields = gateway.read(READER, body)
    length = _check_format(gateway, fields)
    special = fields.get("add_special_tokens", True)
    prompts = read_prompts(
        fields["input"],
        gateway,
        add_special_tokens=special,
        param="input",
        most=MOST_INPUTS,
        tokens=most_tokens(gateway, fields),
    )
    readings = [Reading(_engine_request(request, gateway, fields, prompt), prompt.param) for prompt in prompts]
    return fields, readings, length


def _check_format(gateway: Gateway, fields: Fields) -> int | None:
    """Return the length that vectors are cut to; None: they are whole. Raises ApiError."""
    form, length = gateway.embedding_format, fields.get("dimensions")
    if form.why_not:
        raise unsupported("model", f"the checkpoint's embeddings cannot be made: {form.why_not}")
    if length is None or length == form.hidden_size:
        return None
    if form.shorter is None:
        raise unsupported("dimensions", "dimensions: this checkpoint was not trained to give shorter vectors")
    if form.shorter and length not in form.shorter:
        lengths = ", ".join(map(str, form.shorter))
        raise invalid(f"dimensions is {length}; this checkpoint was trained for {lengths}", "dimensions")
    if form.hidden_size is not None and length > form.hidden_size:
        raise invalid(f"dimensions is {length}; a vector has {form.hidden_size}", "dimensions")
    return int(length)


def _engine_request(request: Request, gateway: Gateway, fields: Fields, prompt: Prompt) -> GenerateRequest:
    return GenerateRequest(
        prompt=truncated(gateway, fields, prompt.ids, 0),
        max_tokens=1,
        stream=False,
        pooling=gateway.embedding_format.pooling,
        **request_arguments(request, fields, gateway),
    )


def _body(head: dict[str, Any], deltas: Sequence[EngineDelta], length: int | None, as_base64: bool) -> str:
    """Return the answer."""
    vectors = [_vector(delta, length) for delta in deltas]
    data = [
        {"object": "embedding", "index": index, "embedding": _base64(vector) if as_base64 else vector.tolist()}
        for index, vector in enumerate(vectors)
    ]
    return f'{json.dumps(head, separators=(",", ":"))[:-1]},"data":[{",".join(map(written, data))}]}}'


def _vector(delta: EngineDelta, length: int | None) -> np.ndarray:
    """Return the embedding, float32 ``[length]``, with the Euclidean norm 1."""
    given = delta.outputs.get("embedding")
    if given is None:
        raise internal()
    vector = given.reshape(-1)[:length].astype(np.float64)
    norm = float(np.linalg.norm(vector))
    return (vector / norm if norm else vector).astype(np.float32)


def _base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
