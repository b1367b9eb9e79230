"""The recorded configurations are ones that the library reads as meant, and the tensors are those of its classes."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers")

FACTS = Path(__file__).parents[1] / "facts"
SCRIPT = runpy.run_path(str(FACTS / "write_tensor_names.py"))
FAMILIES = sorted(path.stem for path in (FACTS / "published_configs").glob("*.json"))
# What the classes call by another name, or have no use for.
OF_THE_TEXT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "layer_types", "sliding_window")


def _record(folder: str, family: str) -> dict[str, Any]:
    return json.loads((FACTS / folder / f"{family}.json").read_text())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_reads_it_with_the_class_that_the_architecture_names(family: str) -> None:
    published = _record("published_configs", family)["config"]
    [architecture] = published["architectures"]
    assert architecture == family.split("-")[0] or architecture in SCRIPT["RENAMED"]
    fields = {key: value for key, value in published.items() if key != "model_type"}
    config = transformers.AutoConfig.for_model(published["model_type"], **fields)
    model_class = getattr(transformers, SCRIPT["RENAMED"].get(architecture, architecture))
    assert model_class.config_class is type(config)
    text, recorded = config.get_text_config(), published.get("text_config", published)
    known = {key: recorded[key] for key in OF_THE_TEXT if recorded.get(key) is not None}
    assert {key: getattr(text, key) for key in known} == known


@pytest.mark.parametrize("family", FAMILIES)
def test_each_has_a_source_and_names_of_tensors(family: str) -> None:
    config, names = _record("published_configs", family), _record("tensor_names", family)
    assert config["source"].strip()
    assert config["model"] == names["model"]
    assert ("published" in names) == ("published_source" in names)


@pytest.mark.parametrize("family", ["Qwen3MoeForCausalLM", "Gemma3ForConditionalGeneration", "GPTNeoXForCausalLM"])
def test_the_names_are_those_that_the_library_writes(family: str) -> None:
    entry = SCRIPT["entry"](family, _record("published_configs", family))
    recorded = _record("tensor_names", family)
    assert {key: recorded[key] for key in entry if key != "library"} == {
        key: value for key, value in entry.items() if key != "library"
    }


@pytest.mark.parametrize(
    "family", [f for f in FAMILIES if "published" in _record("tensor_names", f) and f != "GptOssForCausalLM"]
)
def test_published_tensors_have_the_prefix_that_the_library_writes(family: str) -> None:
    """A loader that knows the one knows the other; MTP layers are in published files only."""
    record = _record("tensor_names", family)
    prefixes = {name.split(".layers.")[0] for name in record["saved"] if ".layers." in name}
    found = {name.split(".layers.")[0] for name in record["published"] if ".layers." in name}
    assert found - {"mtp"} <= prefixes
