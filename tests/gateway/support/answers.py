"""Answers of the gateway in the tests: asked for whole or streamed, and both in one form."""

from __future__ import annotations

import json
import random
from typing import Any

import httpx

from inflight.resources import DEMO
from inflight.settings.deployment import load_deployment, model_name

MODEL = model_name(load_deployment(DEMO).model)
OF_PROMPT = ("prompt_token_ids", "prompt_logprobs")
"""What an answer says of the prompt, and a stream of it in its first chunk."""
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the whole answer to a request."""
    response = client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 200, response.text
    whole: dict[str, Any] = response.json()
    return whole


def refusal(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    """Return the error of a request that is refused with 400."""
    response = client.post(path, json={"model": MODEL, **body})
    assert response.status_code == 400, response.text
    error: dict[str, Any] = response.json()["error"]
    return error


def chunks(client: httpx.Client, path: str, **body: Any) -> list[dict[str, Any]]:
    """Return the chunks of the streamed answer to a request, which ends as a whole one does."""
    with client.stream("POST", path, json={"model": MODEL, **body, "stream": True}) as response:
        assert response.status_code == 200, response.read()
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events]


def joined(path: str, parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the chunks of a stream as the whole answer that they add up to."""
    usage = [part["usage"] for part in parts if "usage" in part]
    whole: dict[str, Any] = {"choices": {}, "usage": usage[-1] if usage else None}
    whole |= {name: parts[0][name] for name in OF_PROMPT if name in parts[0]}
    assert not [name for part in parts[1:] for name in OF_PROMPT if name in part]
    for part in parts:
        assert part["id"] == parts[0]["id"]
        for choice in part["choices"]:
            made = whole["choices"].setdefault(choice["index"], {"index": choice["index"], "logprobs": None})
            assert "finish_reason" not in made, "a choice ends once"
            (_add_chat if path == CHAT else _add_text)(made, choice)
            _add_log_probs(made, choice["logprobs"])
            for name in ("token_ids", *OF_PROMPT):
                if name in choice:
                    made[name] = made.get(name, []) + choice[name]
            if choice["finish_reason"]:
                made |= {"finish_reason": choice["finish_reason"], "stop_reason": choice["stop_reason"]}
    choices = [whole["choices"][index] for index in sorted(whole["choices"])]
    return whole | {"choices": choices}


def _add_chat(made: dict[str, Any], choice: dict[str, Any]) -> None:
    delta = choice["delta"]
    if "message" not in made:
        assert delta.pop("role") == "assistant"
        made["message"] = {"role": "assistant", "content": None, "refusal": None}
    message = made["message"]
    for call in delta.pop("tool_calls", ()):
        _add_call(message.setdefault("tool_calls", []), call)
    for name, text in delta.items():
        if text is not None:
            message[name] = (message.get(name) or "") + text


def _add_call(calls: list[dict[str, Any]], call: dict[str, Any]) -> None:
    """Add a part of a call, as OpenAI's clients do: all strings of it are joined."""
    if call["index"] == len(calls):
        calls.append({"id": "", "type": "", "function": {"name": "", "arguments": ""}})
    made = calls[call["index"]]
    for part, new in ((made, call), (made["function"], call["function"])):
        for name, text in new.items():
            if isinstance(text, str):
                part[name] += text


def _add_text(made: dict[str, Any], choice: dict[str, Any]) -> None:
    made["text"] = made.get("text", "") + choice["text"]


def _add_log_probs(made: dict[str, Any], scores: dict[str, Any] | None) -> None:
    if scores is None:
        return
    before = made["logprobs"]
    made["logprobs"] = (
        scores
        if before is None
        else {
            name: values if before[name] is None else before[name] + values
            for name, values in scores.items()
            if values is not None
        }
        | {name: None for name, values in scores.items() if values is None}
    )


def without_names(answer: dict[str, Any]) -> dict[str, Any]:
    """Return what of an answer must be equal in another to the same request."""
    usage = answer["usage"] and {name: value for name, value in answer["usage"].items() if name.endswith("_tokens")}
    for choice in answer["choices"]:
        for call in choice.get("message", {}).get("tool_calls", ()):
            assert call.pop("id").startswith("call_")
    of_prompt = {name: answer.get(name) for name in OF_PROMPT}
    return {"choices": answer["choices"], "usage": usage, **of_prompt}


def random_sampling(draw: random.Random) -> dict[str, Any]:
    """Return fields that chats and completions share, with a seed, so that the answer is always the same."""
    maybe: dict[str, Any] = {
        "temperature": draw.choice([0, 0.7, 1.5]),
        "top_p": draw.choice([0.5, 0.9, 1]),
        "top_k": draw.choice([0, 3, 40]),
        "min_p": draw.choice([0, 0.05]),
        "presence_penalty": draw.choice([-0.5, 0.8]),
        "frequency_penalty": draw.choice([0.3, 1.2]),
        "repetition_penalty": draw.choice([0.9, 1.3]),
        "stop": draw.choice(["e", ["the", "to "], [" model", "\n"], "zzz"]),
        "n": draw.choice([2, 3]),
        "min_tokens": draw.choice([2, 5]),
        "ignore_eos": True,
        "logit_bias": {str(draw.randrange(4, 4000)): draw.choice([-100, 5, 12])},
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "return_token_ids": True,
    }
    chosen = {name: value for name, value in maybe.items() if draw.random() < 0.3}
    return {"seed": draw.randrange(1 << 40), "temperature": draw.choice([0, 1, 2]), **chosen}


def first_tokens(client: httpx.Client, path: str) -> tuple[float, float]:
    """Return how many first tokens the metrics have of a route, and their seconds together."""
    found = {}
    for line in client.get("/metrics").text.splitlines():
        name, _, value = line.rpartition(" ")
        found[name] = value
    count, total = (
        found.get(f'inflight_gateway_time_to_first_token_seconds_{part}{{route="{path}"}}', 0)
        for part in ("count", "sum")
    )
    return float(count), float(total)
