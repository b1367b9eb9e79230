"""Settles what a checkpoint's files say more than once about text: end ids, chat templates, sampling defaults.

The rules are those of ``inflight.precedence``.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from inflight.precedence import first_said, overruled
from inflight.text.files import read_file, read_json
from inflight.turn_ends import turn_ends

log = logging.getLogger(__name__)

CONFIG, GENERATION, TOKENIZER = "config.json", "generation_config.json", "tokenizer_config.json"
_INT32 = 2**31
_NO_TOKEN = -1
"""The number that some files give a token which is missing."""
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 100),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
}
_RANGES["repetition_penalty"] = (1e-3, 1e3)
"""The values that requests may give, by the tables of the gateway."""
_CUTS = {"top_p", "top_k", "min_p"}
_UNREAD = (
    "num_beams", "no_repeat_ngram_size", "suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "stop_strings",
    "typical_p", "epsilon_cutoff", "eta_cutoff", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "min_new_tokens", "sequence_bias", "penalty_alpha", "guidance_scale",
)  # fmt: skip
"""Fields of generation_config.json that would change answers; requests may ask for most of them."""
_NEUTRAL: tuple[object, ...] = (None, False, 0, 1, [], {})


def end_ids(places: Mapping[str, Any], vocab_size: int, special: Mapping[str, int]) -> frozenset[int]:
    """Return the tokens that end an answer.

    Args:
        places: what each place says, the one that wins first: a token, a list of them, or None.
        vocab_size: of the model; 0: it is not known.
        special: the special tokens by name.

    Raises:
        TypeError: a place says what is no token.
    """
    taken, winner = set[int](), ""
    for place, said in places.items():
        named = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(token) is int and _NO_TOKEN <= token < _INT32 for token in named):
            raise TypeError(f"eos_token_id of {place} is {said!r:.200}")
        new = set(named) - taken - {_NO_TOKEN}
        wrong = {token for token in new if vocab_size and token >= vocab_size}
        if winner:
            wrong |= new - set(special.values())
        if wrong:
            counts = f"what {winner} says" if winner else f"the vocabulary of {vocab_size} tokens"
            overruled("end ids", counts, place, sorted(wrong))
        taken |= new - wrong
        winner = winner or (place if taken else "")
    named_so = {token for token in turn_ends(special) if not vocab_size or token < vocab_size}
    return frozenset(taken | named_so)


def read_templates(directory: Path, tokenizer: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Return the chat templates ``default`` and ``tool_use``; None: there is none.

    A checkpoint that has the second alone has it for all chats.

    Args:
        directory: the checkpoint's.
        tokenizer: what its tokenizer_config.json says.

    Raises:
        DeploymentError: a file cannot be read.
        KeyError, TypeError, ValueError: a template is no text.
    """
    of_processor = read_json(directory / "chat_template.json", optional=True)
    places = {
        "chat_template.jinja": {"default": _source(directory / "chat_template.jinja")},
        "additional_chat_templates/": {
            "tool_use": _source(directory / "additional_chat_templates" / "tool_use.jinja"),
        },
        f"`chat_template` of {TOKENIZER}": _named(tokenizer.get("chat_template")),
        "chat_template.json": _named(of_processor.get("chat_template")),
    }
    default, tool_use = (_first(name, places) for name in ("default", "tool_use"))
    return default or tool_use, tool_use


def _source(path: Path) -> str | None:
    content = read_file(path)
    return None if content is None else content.decode("utf-8")


def _named(entry: Any) -> dict[str, Any]:
    """Return templates by their names."""
    if isinstance(entry, list):
        return {one["name"]: one["template"] for one in entry}
    return entry if isinstance(entry, dict) else {"default": entry}


def _first(name: str, places: Mapping[str, Mapping[str, Any]]) -> str | None:
    said = {place: templates[name] for place, templates in places.items() if templates.get(name)}
    for place, template in said.items():
        if not isinstance(template, str):
            raise TypeError(f"chat_template of {place} is {template!r:.200}")
    if not said:
        return None
    return str(first_said("chat template", said, lambda _: f"`{name}`"))


def read_sampling_defaults(generation: Mapping[str, Any] | None, model: Mapping[str, Any]) -> dict[str, float]:
    """Return how the makers of a checkpoint sample.

    Args:
        generation: what generation_config.json says; None: there is none.
        model: what config.json says.

    Raises:
        TypeError: a value is no number.
    """
    place, source = (CONFIG, model) if generation is None else (GENERATION, generation)
    given = {name: source[name] for name in _SAMPLING if source.get(name) is not None}
    for name, value in given.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{name} of {place} is {value!r:.200}")
        least, most = _RANGES[name]
        if not least <= value <= most:  # NaN is in no range
            raise TypeError(f"{name} of {place} is {value!r:.200}; it must be from {least:g} to {most:g}")
    if "top_k" in given:
        if type(given["top_k"]) is not int:
            raise TypeError(f"top_k of {place} is {given['top_k']!r}; it must be an integer")
        given["top_k"] = max(0, given["top_k"])  # -1, too, says all tokens
    for name in _UNREAD:
        if source.get(name) not in _NEUTRAL:
            log.warning("%s: `%s` is %.120r, which is not followed: requests ask for it", place, name, source[name])
    if generation is not None:
        for name in _SAMPLING:
            if model.get(name) is not None and model[name] != given.get(name):
                overruled("sampling defaults", GENERATION, f"`{name}` of {CONFIG}", model[name])
    if source.get("do_sample") is False:
        return given | {"temperature": 0.0}
    samples = source.get("do_sample") is True or not _CUTS.isdisjoint(given)
    return {"temperature": 1.0, **given} if samples else given
