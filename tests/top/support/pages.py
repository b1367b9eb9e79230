"""A snapshot, and a page of metrics, of a server that does not run."""

from __future__ import annotations

import re

from inflight.engine.snapshot import CacheState, RequestState, Snapshot
from inflight.top.poller import Page

REQUEST = RequestState("a-long-id-that-is-longer-than-its-column", "decode", 2, 30, 16, 5, 64, 1, 2.5, 0.02, 12.5)
CACHE = CacheState(8, 16, 3, 2, 3, 1, (("used", 3), ("cached", 2), ("free", 3)))
SNAPSHOT = Snapshot(4, 77, 1, 2, (REQUEST,), CACHE, "pytorch", 256)
PAGE = """\
# HELP inflight_generated_tokens_total Tokens generated
# TYPE inflight_generated_tokens_total counter
inflight_generated_tokens_total{{model="tensorrt_llm",version="1"}} {tokens}
inflight_prompt_tokens_total{{model="tensorrt_llm",version="1"}} {prompt}
inflight_cached_tokens_total{{model="tensorrt_llm",version="1"}} {cached}
inflight_start_time_seconds{{model="tensorrt_llm",version="1"}} {start}
inflight_start_time_seconds{{model="tokenizer",version="1"}} 1699999990.5
# TYPE inflight_requests_total counter
inflight_requests_total{{model="tensorrt_llm",outcome="length",version="1"}} {requests}
inflight_requests_total{{model="tokenizer",outcome="invalid",version="1"}} {requests}
inflight_steps_total{{model="tensorrt_llm",version="1"}} {steps}
inflight_step_sequences_total{{model="tensorrt_llm",version="1"}} {tokens}
inflight_step_seconds_sum{{model="tensorrt_llm",version="1"}} {seconds}
# TYPE inflight_inter_token_seconds_bucket counter
inflight_inter_token_seconds_bucket{{le="0.01",model="tensorrt_llm",version="1"}} {fast}
inflight_inter_token_seconds_bucket{{le="0.025",model="tensorrt_llm",version="1"}} {tokens}
inflight_inter_token_seconds_bucket{{le="+Inf",model="tensorrt_llm",version="1"}} {tokens}
# TYPE inflight_running_requests gauge
inflight_running_requests{{model="tensorrt_llm",version="1"}} 3
inflight_batch_size_limit{{model="tensorrt_llm",version="1"}} 4
inflight_waiting_requests{{model="tensorrt_llm",version="1"}} 9
inflight_queue_limit{{model="tensorrt_llm",version="1"}} 10
inflight_kv_cache_blocks{{model="tensorrt_llm",state="used",version="1"}} 5
inflight_kv_cache_blocks{{model="tensorrt_llm",state="cached",version="1"}} 2
inflight_kv_cache_blocks{{model="tensorrt_llm",state="free",version="1"}} 1
inflight_kv_cache_block_tokens{{model="tensorrt_llm",version="1"}} 16
"""


def page(scale: int, start: float = 1.7e9) -> Page:
    """Return the page of a server that has done ``scale`` times the same since ``start``."""
    values = {"tokens": 100, "prompt": 50, "cached": 20, "requests": 1, "steps": 25, "seconds": 0.5, "fast": 80}
    return Page(PAGE.format(start=start, **{name: value * scale for name, value in values.items()}))


def plain(output: str) -> str:
    """Return what a command has said, without colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", output)
