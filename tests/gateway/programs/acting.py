"""A gateway whose model acts: it calls the shell of the agent that asks it for a file, and then says that it is done.

The demo model knows no agent, and its context is too short for their prompts. The gateway, its template, its chat
format and the wire are the real ones.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from inflight.gateway.engine_client import EngineDelta, GenerateRequest
from inflight.text.tokenizer import Tokenizer
from tests.gateway.support.gateways import Inside, inside
from tests.gateway.support.scripted import Script, ScriptedEngine

ANSWER, DONE = "It joins a batch that is under way.", "The file is made."
CONTEXT = 131_072
FILE = "made.txt"
_COMMAND = f"echo $((40 + 2)) > {FILE}; cat {FILE}"
MADE = "42"
"""What the command writes: no word of the command."""
_SHELLS: dict[str, dict[str, Any]] = {
    "Bash": {"command": _COMMAND, "description": "Make a file"},
    "exec_command": {"cmd": _COMMAND},
    "bash": {"command": _COMMAND, "description": "Make a file"},
    "run_shell_command": {"command": _COMMAND, "is_background": False},
}
"""The arguments that make the file, by the name of an agent's shell."""
PATCHED, CODEX_MODEL = "patched.txt", "gpt-5.5"
"""A file that a patch makes, and a model's name under which Codex offers its tool for patches."""
_PATCH = {"input": f"*** Begin Patch\n*** Add File: {PATCHED}\n+{MADE}\n*** End Patch\n"}


class ActingEngine(ScriptedEngine):
    """Answers by what stands in the prompt."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__(tokenizer, Script(pieces=0))
        self.results: list[str] = []
        """What the last tool said, of each request in which one has."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[EngineDelta, None]:
        """Yield a call of the shell, or an answer."""
        prompt = self._tokenizer.decode(list(request.prompt), skip_special_tokens=False)
        thought = "Hm.\n</think>\n\n" if prompt.rstrip().endswith("<think>") else ""
        self._script = Script(thought + self._said(prompt), pieces=0)
        async for delta in super().generate(request):
            yield delta

    def _said(self, prompt: str) -> str:
        _, result, last = prompt.rpartition("<tool_response>")
        if result:
            self.results.append(last.partition("</tool_response>")[0])
            return DONE
        for file, calls in ((FILE, _SHELLS), (PATCHED, {"apply_patch": _PATCH})):
            for name, arguments in calls.items() if file in prompt else ():
                if f'"name": "{name}"' in prompt:
                    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"
        return ANSWER


@contextmanager
def acting() -> Iterator[tuple[Inside, ActingEngine]]:
    """Serve the demo with a model that acts, and a context that agents' prompts fit into."""
    with inside(ready=True, model_aliases=[CODEX_MODEL]) as running:
        engine = ActingEngine(running.gateway.tokenizer)
        given = running.gateway.deployment
        limits = given.limits.model_copy(update={"max_sequence_length": CONTEXT})
        app: Any = running.server.config.app
        app.state.gateway = replace(
            running.gateway, engine=engine, deployment=given.model_copy(update={"limits": limits})
        )
        yield running, engine
