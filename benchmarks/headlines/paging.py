"""Memory that paging wastes, beside one contiguous piece per sequence (W. Kwon et al., SOSP 2023, section 3.1)."""

from __future__ import annotations

import numpy as np

from benchmarks.checkpoints import SMALL, TINY, VOCAB
from benchmarks.drive import Driver, ask
from benchmarks.figures import columns, curves, level, panels
from benchmarks.result import Result
from benchmarks.setting import Setting
from inflight.engine.request import Request

_LONGEST = 2048
"""What a sequence may be long, and what one contiguous piece must have room for."""
_ASKED = 1024
"""``max_tokens`` of each request: people ask for more than they get."""
_KNOWN_PERCENT = 4.0
"""What the paper has."""
_CONTIGUOUS = {
    "longest": "longest sequence reserved",
    "asked": "prompt and max_tokens reserved",
    "power": "next power of 2 reserved",
}


def paging(setting: Setting) -> Result:
    """Serve the same mixed requests with each block size, and look at the memory after every step."""
    rows = []
    for size in setting.pick((1, 4, 8, 16, 32, 64, 128, 256), (16, 128)):
        setting.say(f"paging: blocks of {size} tokens")
        needed, taken = _serve(setting, size, _requests(setting))
        waste = {way: round(100 * (1 - needed / tokens), 2) for way, tokens in taken.items()}
        rows.append({"block_size": size, "paged_%": waste["paged"]} | {f"{way}_%": waste[way] for way in _CONTIGUOUS})
    good = [row["block_size"] for row in rows if row["paged_%"] < _KNOWN_PERCENT]
    [default] = [row for row in rows if row["block_size"] == 16]
    finding = (
        f"Of the memory of the blocks in use, {default['paged_%']} % hold nothing with blocks of 16 tokens, the "
        f"default; less than {_KNOWN_PERCENT:g} % with blocks of up to {max(good, default=0)}. One contiguous piece "
        f"per sequence wastes {default['longest_%']} % where the longest sequence of {_LONGEST:,} tokens is "
        f"reserved, {default['asked_%']} % where prompt and max_tokens ({_ASKED:,}) are, and {default['power_%']} % "
        "where room doubles. What is lost is the rest of each sequence's last block, half a block on average: large "
        "blocks do not pay where sequences are short, and blocks of one token pay for their exactness with the "
        "longest tables."
    )
    figure, [axes] = panels(1)
    curves(axes, {"paged": columns(rows, "block_size", "paged_%")}, "tokens per block", "memory wasted, %", log_x=True)
    for place, (way, name) in enumerate(_CONTIGUOUS.items()):
        level(axes, float(default[f"{way}_%"]), name, place)
    axes.set_ylim(0, 100)
    return Result("paging", "Memory wasted by paging", finding, rows, figure)


def _requests(setting: Setting) -> list[Request]:
    generator, scale = np.random.default_rng(0), setting.pick(1.0, 0.1)
    found = []
    for _ in range(setting.pick(64, 8)):
        prompt, output = (
            int(scale * np.clip(generator.lognormal(np.log(median), 0.8), 20, 1000)) for median in (300, 150)
        )
        found.append(ask(generator.integers(1, VOCAB, prompt).tolist(), output))
    return found


def _serve(setting: Setting, block_size: int, requests: list[Request]) -> tuple[int, dict[str, int]]:
    """Return the tokens that were held and those there was room for, by the way of reserving it; summed over steps."""
    engine = setting.engine(
        setting.pick(SMALL, TINY), 16 * _LONGEST, block_size=block_size, max_batch_size=16, max_tokens_per_step=1024,
        prefix_reuse=False, policy="max_utilization", max_sequence_length=_LONGEST,
    )  # fmt: skip
    driver = Driver(engine)
    streams = [(len(request.prompt), driver.submit(request)) for request in requests]
    needed, taken = 0, dict.fromkeys(("paged", *_CONTIGUOUS), 0)
    while engine.busy:
        driver.step()
        running = [(prompt, stream) for prompt, stream in streams if stream.tokens and not stream.ended]
        if len(running) != engine.stats.running_requests:
            continue  # a prompt is half computed
        held = [prompt + len(stream.tokens) - 1 for prompt, stream in running]
        needed += sum(held)
        taken["paged"] += engine.stats.state().kv_blocks_used * block_size
        taken["longest"] += len(held) * _LONGEST
        taken["asked"] += sum(min(prompt + _ASKED, _LONGEST) for prompt, _ in running)
        taken["power"] += sum(1 << (tokens - 1).bit_length() for tokens in held)
    return needed, taken
