"""Writes docs/contract.md, docs/deployment.md and docs/metrics.md from the tables that the code itself uses.

python -m inflight.serve.reference docs
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from inflight.contract import DETOKENIZER, ENGINE, ENSEMBLE, STAGES, TOKENIZER, Tensor
from inflight.deployment import Deployment
from inflight.serve.metrics_page import metrics_page

_MODELS = {
    ENSEMBLE: "The client's view: text in, text out.",
    TOKENIZER: "Text or messages to token ids. Internal; its tensors may change.",
    ENGINE: "Token ids in, token ids out. Public, like the ensemble.",
    DETOKENIZER: "Token ids to text. Internal; its tensors may change.",
}


def files() -> dict[str, str]:
    """Return the generated pages by name."""
    return {"contract.md": contract_page(), "deployment.md": deployment_page(), "metrics.md": metrics_page()}


def contract_page() -> str:
    """Return the page about the tensors of every stage."""
    parts = [
        "# The contract\n\n"
        "Written from `inflight/contract.py` by `make contract`; a test holds them equal.\n\n"
        "Names, types and shapes are those of the TensorRT-LLM ensemble (1.2.x). **+** marks Inflight's own additions. "
        "*refused* marks inputs that are not supported: a request that uses one fails with `UNIMPLEMENTED` and the "
        "tensor's name, unless its value requests nothing. *X only* marks tensors that every other `engine.kind` "
        "refuses in the same way. To Triton every input is optional; the stages check what a request needs. "
        "Shapes are without the batch dimension; `text_output` has none.\n"
    ]
    for model, (inputs, outputs) in STAGES.items():
        parts.append(
            f"\n## `{model}`\n\n{_MODELS[model]}\n\n### Inputs\n\n{_table(inputs)}\n### Outputs\n\n{_table(outputs)}"
        )
    return "".join(parts)


def _table(tensors: tuple[Tensor, ...]) -> str:
    rows = [f"| {_mark(one)}`{one.name}` | {one.dtype} | {list(one.dims)} | {_meaning(one)} |" for one in tensors]
    return "| tensor | type | shape | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _mark(tensor: Tensor) -> str:
    return "**+** " if tensor.own else ""


def _meaning(tensor: Tensor) -> str:
    if tensor.served_by is None:
        return tensor.doc
    mark = f"*{', '.join(tensor.served_by)} only*" if tensor.served_by else "*refused*"
    return f"{mark}: {tensor.doc}"


def deployment_page() -> str:
    """Return the page about ``deployment.yaml``."""
    head = (
        "# deployment.yaml\n\n"
        "Written from `inflight/deployment.py` by `make contract`; a test holds them equal.\n\n"
        "A deployment is a directory with this file. An unknown key or a wrong value stops the start with an error "
        "that names it, what is allowed and the nearest known key.\n\n"
        "| key | default | meaning |\n|---|---|---|\n"
    )
    return head + "\n".join(_rows(Deployment, "")) + "\n"


def _rows(section: type[BaseModel], prefix: str) -> list[str]:
    rows: list[str] = []
    for name, field in section.model_fields.items():
        kind: Any = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            rows += _rows(kind, f"{prefix}{name}.")
        else:
            rows.append(f"| `{prefix}{name}` | {_default(field)} | {field.description} |")
    return rows


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None:
        return "`null`"
    value = list(field.default) if isinstance(field.default, tuple) else field.default
    return f"`{str(value).lower()}`"


if __name__ == "__main__":
    for name, text in files().items():
        (Path(sys.argv[1]) / name).write_text(text)
