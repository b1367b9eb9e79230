"""The tools of a request, and what it says about their use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    """JSON schema of the arguments, which are an object."""
    strict: bool = False
    """Whether the arguments must follow the schema, even where the model need not call the tool."""
    path: str = "tools"
    """The field of the request that has the schema, such as ``tools[2].function.parameters``; errors name it."""

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema with what it implies: arguments are an object."""
        return {"type": "object"} | self.parameters

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates expect it: OpenAI's own object."""
        function = {"name": self.name, "description": self.description, "parameters": self.schema}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolChoice:
    """Whether the model may, must or must not call tools."""

    kind: Literal["auto", "required", "none", "named"] = "auto"
    name: str | None = None
    """The tool that must be called, of the kind ``named``."""

    @classmethod
    def auto(cls) -> ToolChoice:
        """Return the choice that the model makes itself."""
        return cls("auto")

    @classmethod
    def required(cls) -> ToolChoice:
        """Return the choice of at least one call, of whichever tool."""
        return cls("required")

    @classmethod
    def none(cls) -> ToolChoice:
        """Return the choice of no call."""
        return cls("none")

    @classmethod
    def named(cls, name: str) -> ToolChoice:
        """Return the choice of the tool ``name``, which is called once."""
        return cls("named", name)
