"""Faults on demand: the file that ``FAKE_TENSORRT_LLM`` names, a JSON object.

version          what __version__ says
gpus             how many GPUs there are (2)
crash_at_start   message of the error that LLM(...) raises
raise_in_generate message of the RuntimeError that generate_async raises
error_after      tokens after which each sequence gets a RequestError, as upstream wraps what goes wrong in its engine
die_after        tokens after which each sequence gets a background error, and the LLM shuts down for good
end_after        tokens after which each sequence's stream ends, without a finish reason
no_log_probs     whether log-probs that were asked for are left out
ignore_aborts    whether aborts do nothing
stall_after      tokens after which a sequence gets no more, and cannot be aborted
step_delay_s     how long each token takes more
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def fault(name: str, default: Any = None) -> Any:
    """Return a fault's value; read each time, so that a test can change it while a server runs."""
    path = os.environ.get("FAKE_TENSORRT_LLM")
    return json.loads(Path(path).read_text()).get(name, default) if path else default
