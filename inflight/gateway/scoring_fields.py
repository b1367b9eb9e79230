"""What the requests for embeddings, scores and rankings have in common: fields, and the counts of tokens."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import Any

from inflight.gateway.engine_client import EngineDelta
from inflight.gateway.errors import internal
from inflight.gateway.field_tables import TRUNCATION_SIDE
from inflight.gateway.fields import Fields, hint, refused, served
from inflight.gateway.readings import Reading
from inflight.gateway.values import anything, integer, string

_INT32 = 2**31 - 1
REQUEST = (
    served("model", string(empty=False), "one of the names that `/v1/models` lists; without it the first"),
    served("priority", integer(-_INT32 - 1, _INT32), "higher is served first"),
    served("deadline_ms", integer(1, _INT32), "milliseconds after which the request ends with 504"),
    served(
        "client_id",
        string(256),
        "whose turn it uses, with `batching.fairness: client`; where the door or an API key says who asks, that counts",
    ),
    served("user", string(), "as `client_id`, where that is not given"),
    served("request_id", string(128, empty=False), "part of the answer's `id`"),
    served("rid", string(128, empty=False), "SGLang's name of `request_id`"),
    *refused("cache_salt extra_key", "the prefix cache is shared by all requests", ""),
    *refused("lora_path lora lora_request", "adapters are listed in the deployment, and named by `model`"),
    *refused("mm_processor_kwargs", "the models served take text", {}),
    *hint("padding", anything(), "texts are not padded", "do_not_pad", False),
    *refused(
        "embed_override_token_id embed_overrides query_embed_overrides item_embed_overrides",
        "prompts are text or token ids",
    ),
)
TRUNCATION = (
    served("truncate_prompt_tokens", integer(-1, _INT32), "keep so many tokens of a prompt; -1: as many as fit"),
    TRUNCATION_SIDE,
)


def answer_head(fields: Fields, prefix: str) -> dict[str, Any]:
    """Return the beginning of an answer: its id, and when it was made."""
    given = fields.either("request_id", "rid")
    return {"id": f"{prefix}-{given or secrets.token_hex(16)}", "created": int(time.time())}


def label_log_probs(delta: EngineDelta) -> list[float]:
    """Return the log-probs of the labels behind a prompt. Raises ApiError: the engine has not given them."""
    given = delta.outputs.get("token_log_probs")
    if given is None:
        raise internal()
    return [float(value) for value in given.reshape(-1)]


def usage_of(readings: Sequence[Reading], deltas: Sequence[EngineDelta]) -> dict[str, Any]:
    """Return the counts of tokens of an answer: prompts alone, since what is generated is not part of it."""
    tokens = sum(len(one.request.prompt) for one in readings)
    cached = sum(delta.cached_tokens for delta in deltas)
    details = {"cached_tokens": cached}
    return {"prompt_tokens": tokens, "total_tokens": tokens, "prompt_tokens_details": details}
