"""Faults on demand: the file that ``FAKE_TENSORRT_LLM`` names, a JSON object.

version           what __version__ says
gpus              how many GPUs there are (2)
sampler_bytes     memory of the GPU that is left for the trtllm sampler's buffers (1 GiB)
start_s           seconds that LLM(...) takes more
crash_at_start    message of the error that LLM(...) raises
raise_in_generate message of the RuntimeError that generate_async raises
refuse            message of the RequestError that each request gets in its stream, before its first token
step_error        message of the RequestError that every active request gets from the next step, and those after it
error_after       tokens after which each sequence gets a RequestError, as upstream wraps what goes wrong in its engine
assert_after      tokens after which a response with log-probs breaks an assertion of the API; the sequence goes on
die_after         tokens after which each sequence gets a background error, and the LLM shuts down for good
end_after         tokens after which each sequence's stream ends, without a finish reason
no_log_probs      whether log-probs that were asked for are left out
shifted_logits    whether each row of generation logits is of the token after
ignore_aborts     whether aborts do nothing
stall_after       tokens after which a sequence gets no more, and cannot be aborted
hang              whether nothing is computed any more
step_delay_s      how long each token takes more

Without any fault it is no kinder than the real one: a request that is aborted before its first step ends without a
response; what is wrong with a request is found in its stream, hardly ever by generate_async; ``config.json`` is read
as transformers 4.57 reads it; a CUDA graph forgets adapters; a checkpoint's own code is not run.
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
