"""Names of models and of their files: what is one, and what is refused."""

from __future__ import annotations

import pytest

from inflight.errors import DeploymentError
from inflight.hub.names import ModelName, is_model_file, is_model_name, is_safe_path, parse_model_name, parse_typed_name


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("org/name", ModelName("org/name")),
        ("Qwen/Qwen3-0.6B", ModelName("Qwen/Qwen3-0.6B")),
        ("org/name@v1.0", ModelName("org/name", "v1.0")),
        ("org/name@refs/pr/1", ModelName("org/name", "refs/pr/1")),
        ("org/name:Q4_K_M", ModelName("org/name", None, "Q4_K_M")),
        ("org/name@main:Q8_0/a-00001-of-00002.gguf", ModelName("org/name", "main", "Q8_0/a-00001-of-00002.gguf")),
    ],
)
def test_the_parts_of_a_name(text: str, name: ModelName) -> None:
    assert parse_model_name(text) == name
    assert str(name) == text
    assert is_model_name(text)


@pytest.mark.parametrize(
    "text",
    [
        "name", "", "/", "org/", "org/name/more", "../name", "org/..", "org/.name", "org/na me", "org/a--b",
        "org/name@",
        "org/name@../x", "org/name@-x", "org/name:", "org/name:../x.gguf", "org/name:/x.gguf", "https://hub/org/name",
        "org/name\n", "org/" + "n" * 97, "org/a..b",
    ],
)  # fmt: skip
def test_what_is_no_name_is_refused(text: str) -> None:
    with pytest.raises(DeploymentError, match=r"the form is org/name, org/name@revision or org/name:file\.gguf"):
        parse_model_name(text)


@pytest.mark.parametrize("text", ["org/Llama-3.1-8B", "org/model.v2", "org/gguf", "org/name:x.gguf"])
def test_a_name_may_have_a_dot(text: str) -> None:
    assert is_model_name(text)
    assert parse_typed_name(text) == parse_model_name(text)


@pytest.mark.parametrize(
    "text", ["./name", "../name", "/org/name", "name", "deployments/demo/model", "~/name", "a/b.gguf", "a/b.GGUF"]
)
def test_a_path_is_no_name(text: str) -> None:
    assert not is_model_name(text)


@pytest.mark.parametrize(
    "path", ["../a.json", "a/../../b.json", "/a.json", "a//b.json", "a\\b.json", "a\nb.json", "./a.json", "C:/a.json",
             ".a.json", "a/.b/c.json", "", "a" * 600 + ".json", "a" * 251 + ".json"],
)  # fmt: skip
def test_file_names_that_lead_elsewhere(path: str) -> None:
    assert not is_safe_path(path)


@pytest.mark.parametrize(
    "path", ["model.safetensors", "a/b.gguf", "tokenizer.model", "LICENSE", "LICENSE.md", "Notice.txt", "README.md",
             "USE_POLICY.md", "x/chat_template.jinja", "model.safetensors.index.json"],
)  # fmt: skip
def test_files_of_a_model(path: str) -> None:
    assert is_model_file(path)
    assert is_safe_path(path)


@pytest.mark.parametrize(
    "path", ["pytorch_model.bin", "modeling.py", "x.pt", "x.pth", "x.pkl", "LICENSE.py", "README.sh", "model.onnx",
             "license.bin", "tokenizer.model.py", "a.safetensors.exe"],
)  # fmt: skip
def test_files_that_no_model_has(path: str) -> None:
    assert not is_model_file(path)
