"""The rotary parameters of a layer, as a ``config.json`` gives them: in old spellings and new."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inflight.engine.models.architectures import Architecture
from inflight.engine.models.fields import AMOUNT, COUNT, FACTORS, FLAG, NUMBER, Fields, given
from inflight.engine.models.layer_kinds import SLIDING
from inflight.errors import DeploymentError
from inflight.precedence import overruled

_OF_ROPE = {
    "factor": NUMBER,
    "original_max_position_embeddings": NUMBER,
    "low_freq_factor": NUMBER,
    "high_freq_factor": NUMBER,
    "attention_factor": NUMBER,
    "beta_fast": AMOUNT,
    "beta_slow": AMOUNT,
    "mscale": AMOUNT,
    "mscale_all_dim": AMOUNT,
    "llama_4_scaling_beta": AMOUNT,
    "truncate": FLAG,
    "short_factor": FACTORS,
    "long_factor": FACTORS,
}
"""The parameters of rotary embeddings."""
_KNOWN = {*_OF_ROPE, "rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Files have more beside them, which change nothing for text: such as ``mrope_section``."""
_LENGTH = "original_max_position_embeddings"
_OF_A_LENGTH = ("llama3", "yarn", "longrope")
"""The types of scaling that depend on the length that a model was made for first."""


def read_rope(architecture: Architecture, fields: Fields, kind: str, head_dim: int) -> Mapping[str, Any]:
    """Return the rotary parameters of a layer of this kind, with ``rope_type`` and ``rope_theta`` set.

    Raises:
        DeploymentError: they are not what they must be; which one is named.
    """
    data = fields.data
    spellings = [data[name] for name in ("rope_scaling", "rope_parameters") if data.get(name) is not None]
    if wrong := [one for one in spellings if not isinstance(one, Mapping)]:
        raise DeploymentError(f"config.json: the parameters of RoPE are {wrong[0]!r}; an object is expected")
    parameters: Mapping[str, Any] = next(filter(None, spellings), {})
    if spellings and parameters != spellings[-1] and "rope_parameters" in fields.given_names:
        overruled("rotary embedding", "`rope_scaling`", "`rope_parameters`", spellings[1])
    of_kinds = architecture.sliding_rope != "shared" or isinstance(parameters.get(kind), Mapping)
    if isinstance(parameters.get(kind), Mapping):
        parameters = parameters[kind]
    elif kind == SLIDING and architecture.sliding_rope == "local":
        parameters = {"rope_theta": data.get("rope_local_base_freq", 10_000.0)}
    elif kind == SLIDING and architecture.sliding_rope == "plain":
        parameters = {"rope_theta": parameters.get("rope_theta")}
    rope = {name: value for name, value in parameters.items() if value is not None and name in _KNOWN}
    beside = given(data, "rope_theta", None, NUMBER)
    rope["rope_theta"] = given(rope, "rope_theta", 10_000.0 if beside is None else beside, NUMBER)
    if beside not in (None, rope["rope_theta"]) and kind != SLIDING and "rope_theta" in fields.given_names:
        overruled("base of the rotary embedding", f"{rope['rope_theta']}", "`rope_theta` outside", beside)
    older = rope.pop("type", "default")
    if older not in ("default", rope.setdefault("rope_type", older)):
        overruled("type of the rotary embedding", f"`rope_type` {rope['rope_type']!r}", "`type`", older)
    if rope["rope_type"] in architecture.longrope_types:
        rope["rope_type"] = "longrope"
    if rope["rope_type"] == "mrope":  # text has the same position in each of its three parts
        rope["rope_type"] = "default"
    if rope["rope_type"] in _OF_A_LENGTH:
        outside = None if of_kinds else data.get(_LENGTH)  # it wins over the one within, unless kinds have their own
        if outside not in (None, rope.get(_LENGTH, outside)) and _LENGTH in fields.given_names:
            overruled("length before scaling", f"{outside}", f"`{_LENGTH}` within", rope[_LENGTH])
        within = rope.get(_LENGTH, fields.required("max_position_embeddings", COUNT))
        rope[_LENGTH] = within if outside is None else outside
    for name, kind_of in _OF_ROPE.items():
        value = given(rope, name, None, kind_of)
        if type(value) is int:
            rope[name] = float(value)  # PyTorch takes no integers of more than 64 bits
    share = given(rope, "partial_rotary_factor", given(data, "partial_rotary_factor", 1.0, NUMBER), NUMBER)
    if architecture.latent:
        share = 1.0  # the file's is of dimensions that are rotated and those that are not
    if share > 1 or int(head_dim * share) % 2 or not int(head_dim * share):
        raise DeploymentError(
            f"config.json: partial_rotary_factor is {share} and head_dim {head_dim}; the first must be at most 1, and "
            "their product an even number"
        )
    rope["partial_rotary_factor"] = share
    rope["rope_theta"] = float(rope["rope_theta"])
    return rope
