"""Hints that a chat template may obey: which of its variables a hint sets, and whether it takes the value."""

from __future__ import annotations

from typing import Any

from inflight.errors import InflightError
from inflight.gateway.fields import Variables
from inflight.text.chat import ChatTemplate
from inflight.text.output.format import ChatFormat

TEMPLATE_HINTS = ("reasoning_effort", "verbosity")
"""Fields of chats whose value goes to a template that has a variable of the same name."""


def hint_variables(name: str, value: Any, template: ChatTemplate, form: ChatFormat) -> Variables | None:
    """Return the template's variables that a hint sets; None: this checkpoint cannot obey it.

    Args:
        name: one of ``TEMPLATE_HINTS``.
        value: of the hint; the effort ``none`` switches thinking off, where there is any.
        template: of the checkpoint.
        form: knows whether the model reasons.
    """
    variables = {name: value} if template.uses(name) and _takes(template, name, value) else {}
    if (name, value) == ("reasoning_effort", "none"):
        if template.uses("enable_thinking"):
            variables["enable_thinking"] = False
        elif not form.has_reasoning:
            return variables
    return variables or None


def _takes(template: ChatTemplate, name: str, value: Any) -> bool:
    """Return whether a template renders with this value: some raise an error for a level that they do not have."""
    try:
        template.render([{"role": "user", "content": "Hi"}], {name: value, "add_generation_prompt": True})
    except InflightError:
        return False
    return True
