"""The recorded configurations are ones that the library reads as meant, and the tensors are those of its classes."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
loading = pytest.importorskip("transformers.core_model_loading")

FACTS = Path(__file__).parents[1] / "facts"
SCRIPT = runpy.run_path(str(FACTS / "write_tensor_names.py"))
FAMILIES = sorted(path.stem for path in (FACTS / "published_configs").glob("*.json"))


def _record(folder: str, family: str) -> dict[str, Any]:
    return json.loads((FACTS / folder / f"{family}.json").read_text())


def _published(family: str) -> dict[str, Any]:
    return SCRIPT["as_library_reads"](_record("published_configs", family)["config"])


PUBLISHED = [family for family in FAMILIES if "published" in _record("tensor_names", family)]
# The configuration is of a derivative with fewer experts.
OTHER_SIZES = ("Gemma4ForConditionalGeneration-26B-A4B",)
# The published experts are input x output; the library reads them, but saves output x input.
TRANSPOSED = ("Qwen3VLMoeForConditionalGeneration",)
# What the classes call by another name, or have no use for.
OF_THE_TEXT = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "layer_types", "sliding_window")


@pytest.mark.parametrize("family", FAMILIES)
def test_the_library_reads_it_with_the_class_that_the_architecture_names(family: str) -> None:
    published = _published(family)
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


def _first(name: str) -> str:
    """The first tensor of those that a name with ranges stands for: layers.0-2,4-6.x is layers.0.x and others."""
    return re.sub(r"\.(\d+)[-,][^.]*(?:\.\.\.[^.]*)?\.", r".\1.", name)


@pytest.mark.parametrize("family", PUBLISHED)
def test_published_tensors_have_the_prefix_that_the_library_writes(family: str) -> None:
    """A loader that knows the one knows the other; MTP layers are in published files only."""
    record = _record("tensor_names", family)
    prefixes = {name.split(".layers.")[0] for name in record["saved"] if ".layers." in name}
    found = {name.split(".layers.")[0] for name in record["published"] if ".layers." in name}
    assert found - {"mtp"} <= prefixes


@pytest.mark.sweep
@pytest.mark.parametrize("family", [family for family in PUBLISHED if family not in OTHER_SIZES])
def test_published_shapes_are_those_of_the_published_configuration(family: str) -> None:
    """The two were found apart; the model of the one, which has no memory here, has the shapes of the other."""
    published = _published(family)
    fields = {key: value for key, value in published.items() if key not in ("model_type", "quantization_config")}
    config = transformers.AutoConfig.for_model(published["model_type"], **fields)
    with torch.device("meta"):
        model = getattr(transformers, published["architectures"][0])(config)
    in_memory = model.state_dict()
    shapes = {name: list(tensor.shape) for name, tensor in (in_memory | _saved(model, in_memory)).items()}
    tensors = {_first(name): shape for name, (shape, _) in _record("tensor_names", family)["published"].items()}
    if family in TRANSPOSED:
        tensors = {
            name: [*shape[:-2], *shape[:-3:-1]] if ".experts." in name else shape for name, shape in tensors.items()
        }
    compared = {name: shape for name, shape in tensors.items() if name in shapes}
    assert compared
    assert {name: shapes[name] for name in compared} == compared


def _saved(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    return loading.revert_weight_conversion(model, dict(tensors))
