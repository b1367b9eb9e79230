"""Which chat format a checkpoint has."""

from __future__ import annotations

from inflight.text.output.format import ChatFormat
from inflight.text.tokenizer import Tokenizer


def find_chat_format(tokenizer: Tokenizer, override: str | None = None) -> ChatFormat:
    """Return the chat format of a checkpoint, or the one that ``override`` names.

    Raises:
        DeploymentError: there is no format of that name.
    """
    return ChatFormat(tokenizer)
