"""ModelOpt's rules, in both forms that its releases have: which quantizers are on, and with how many bits."""

from __future__ import annotations

import fnmatch
from typing import Any

import pytest

from inflight.errors import DeploymentError
from inflight.export.quantize.modelopt import Recipe, quantizer_rules

OFF: dict[str, Any] = {"enable": False}
FP8 = {"num_bits": (4, 3), "axis": None}
LISTS = {
    "FP8_DEFAULT_CFG": {
        "quant_cfg": [
            {"quantizer_name": "*", "enable": False},
            {"quantizer_name": "*weight_quantizer", "cfg": FP8},
            {"quantizer_name": "*input_quantizer", "cfg": FP8},
            {"quantizer_name": "*lm_head*", "enable": False},
        ],
        "algorithm": "max",
    },
    "FP8_KV_CFG": {"quant_cfg": [{"quantizer_name": "*[kv]_bmm_quantizer", "cfg": FP8}]},
}
"""As ModelOpt 0.47 has them, shortened."""
DICTIONARIES = {
    "FP8_DEFAULT_CFG": {
        "quant_cfg": {
            "*weight_quantizer": FP8,
            "*input_quantizer": FP8,
            "*lm_head*": OFF,
            "nn.BatchNorm1d": {"*": OFF},
            "default": OFF,
        },
        "algorithm": "max",
    },
    "FP8_KV_CFG": {"quant_cfg": {"*[kv]_bmm_quantizer": FP8 | {"enable": True}}, "algorithm": "max"},
}
"""As the releases before the lists have them, shortened: that of NVIDIA's image is one."""
NAMES = [
    f"{linear}.{quantizer}"
    for linear in ("layers.0.q_proj", "layers.1.q_proj", "lm_head")
    for quantizer in ("weight_quantizer", "input_quantizer")
] + ["layers.0.k_bmm_quantizer", "layers.0.q_bmm_quantizer"]


def state_by_list(rules: list[dict[str, Any]]) -> dict[str, bool]:
    """Apply rules as ModelOpt 0.47 does: in turn, by a pattern of the quantizer's name."""
    state = dict.fromkeys(NAMES, True)
    for rule in rules:
        assert set(rule) <= {"quantizer_name", "cfg", "enable"}
        for name in fnmatch.filter(NAMES, rule["quantizer_name"]):
            state[name] = rule.get("enable", True)
    return state


def state_by_dictionary(rules: dict[str, dict[str, Any]]) -> dict[str, bool]:
    """Apply rules as older releases do: ``default`` first, then in turn by pattern or by the class of the parent."""
    assert all(isinstance(rule, dict) for rule in rules.values())
    state = dict.fromkeys(NAMES, rules.get("default", {}).get("enable", True))
    for pattern, rule in rules.items():
        if pattern == "default" or pattern.startswith("nn."):
            continue
        for name in fnmatch.filter(NAMES, pattern):
            state[name] = rule.get("enable", True)
    return state


RECIPES = {
    "all": (Recipe("fp8", fp8_kv_cache=True), {"layers.0.k_bmm_quantizer"}, 2),
    "one kept": (Recipe("fp8", fp8_kv_cache=False, keep=("layers.1.q_proj",)), set(), 1),
    "the cache alone": (Recipe("bf16", fp8_kv_cache=True), {"layers.0.k_bmm_quantizer"}, 0),
    "what is off is named again": (Recipe("fp8", fp8_kv_cache=False, keep=("lm_head",)), set(), 2),
}


@pytest.mark.parametrize("name", RECIPES)
def test_both_forms_say_the_same(name: str) -> None:
    recipe, cache, linears = RECIPES[name]
    expected = cache | {one for one in NAMES[: 2 * linears] if "proj" in one}
    for known, apply in ((LISTS, state_by_list), (DICTIONARIES, state_by_dictionary)):
        before = repr(known)
        config = quantizer_rules(recipe, known)
        assert config["algorithm"] == "max"
        assert {one for one, on in apply(config["quant_cfg"]).items() if on} == expected  # type: ignore[operator]
        assert repr(known) == before, "ModelOpt's own configuration was changed"


def test_a_rule_of_ours_comes_after_modelopts_own() -> None:
    """A pattern that the older form has already must move behind what it overrules."""
    known = {
        **DICTIONARIES,
        "FP8_DEFAULT_CFG": {"quant_cfg": {"a.*": OFF, "*": FP8, "default": OFF}, "algorithm": "max"},
    }
    rules = quantizer_rules(Recipe("fp8", fp8_kv_cache=False, keep=("a",)), known)["quant_cfg"]
    assert list(rules)[-1] == "a.*"


def test_a_release_without_the_precision_is_named() -> None:
    with pytest.raises(DeploymentError, match="has no NVFP4_DEFAULT_CFG; use the one of"):
        quantizer_rules(Recipe("nvfp4", fp8_kv_cache=False), LISTS)


@pytest.mark.parametrize("form", ["list", "dictionary"])
def test_int4_has_groups_of_the_recipes_size(form: str) -> None:
    """Two bits of ``w4a8``'s weights are settings of one rule; only INT4's has groups."""
    weights: Any = [{"num_bits": 4, "block_sizes": {-1: 128, "type": "static"}}, {"num_bits": (4, 3), "axis": None}]
    rules: Any = {"*weight_quantizer": weights[0], "default": OFF}
    if form == "list":
        rules = [{"quantizer_name": "*", "enable": False}, {"quantizer_name": "*weight_quantizer", "cfg": weights}]
    known = {
        "INT4_AWQ_CFG": {"quant_cfg": rules, "algorithm": "awq_lite"},
        **(LISTS if form == "list" else DICTIONARIES),
    }
    found = quantizer_rules(Recipe("int4-awq", fp8_kv_cache=False, group=64), known)["quant_cfg"]
    weight = found[1]["cfg"][0] if form == "list" else found["*weight_quantizer"]
    assert weight["block_sizes"] == {-1: 64, "type": "static"}
    assert weights[0]["block_sizes"][-1] == 128, "ModelOpt's own configuration was changed"
