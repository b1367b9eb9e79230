"""Which layers have full attention, a sliding window, chunks or a state: as the file says, or as it implies."""

from __future__ import annotations

from inflight.engine.models.architectures import Architecture
from inflight.engine.models.fields import COUNT, FLAG, INDEX, LAYERS, LENGTH, MOST, Fields
from inflight.errors import DeploymentError

SLIDING, CHUNKED, FULL = "sliding_attention", "chunked_attention", "full_attention"
RECURRENT = "linear_attention"


def layer_kinds(architecture: Architecture, fields: Fields) -> list[str]:
    """Return per layer the kind of its attention.

    Raises:
        DeploymentError: the file gives kinds that the architecture has not, or lacks the length of a window or chunk.
    """
    count = fields.required("num_hidden_layers", LAYERS)
    kinds = _given(architecture, fields, count) or _implied(architecture, fields, count)
    if architecture.last_is_full:
        kinds = [*kinds[:-1], FULL]
    for kind, name in ((SLIDING, "sliding_window"), (CHUNKED, "attention_chunk_size")):
        if kind in kinds and fields.data.get(name) is None:
            raise DeploymentError(f"config.json: {name} is null or missing; layers of {kind!r} need it")
    if SLIDING in kinds and architecture.windows in ("later", "alternate") and not _uses_windows(fields):
        raise DeploymentError(
            f"config.json: use_sliding_window is false, but layer_types has {SLIDING!r}; that is not supported"
        )
    return kinds


def sliding_window(fields: Fields) -> int | None:
    """Return the sliding window, at most as long as any context: some files say none by the largest number they can."""
    window = fields.given("sliding_window", None, LENGTH)
    return window and min(window, MOST)


def rotated_layers(architecture: Architecture, fields: Fields, count: int) -> list[bool]:
    """Return per layer whether it has a rotary embedding."""
    if not architecture.no_rope:
        return [True] * count
    interval = fields.given("no_rope_layer_interval", 4, COUNT)
    flags = fields.data.get("no_rope_layers")
    if flags is None or flags == []:  # Llama 4's files say the latter
        flags = [int((layer + 1) % interval != 0) for layer in range(count)]
    if not isinstance(flags, list) or len(flags) != count or not all(flag in (0, 1) for flag in flags):
        raise DeploymentError(f"config.json: no_rope_layers is {flags!r}; it must be a list of {count}, each 0 or 1")
    return [bool(flag) for flag in flags]


def _given(architecture: Architecture, fields: Fields, count: int) -> list[str] | None:
    """Return ``layer_types``; None: the file has none."""
    kinds = fields.data.get("layer_types")
    if kinds is None:
        return None
    if architecture.recurrent_every:
        allowed = {FULL, RECURRENT}
    elif architecture.chunked:
        allowed = {FULL, CHUNKED}
    elif architecture.full_every or architecture.windows in ("later", "alternate", "unrotated"):
        allowed = {FULL, SLIDING}
    else:  # transformers does not read them: they may only say what is so without them
        allowed = set(_implied(architecture, fields, count))
    if not isinstance(kinds, list) or len(kinds) != count or not allowed.issuperset(map(str, kinds)):
        raise DeploymentError(
            f"config.json: layer_types is {kinds!r}; it must be a list of {count}, each of {sorted(allowed)}"
        )
    return kinds


def _implied(architecture: Architecture, fields: Fields, count: int) -> list[str]:
    """Return the kinds of the layers where the file does not give them."""
    if architecture.chunked:
        return [CHUNKED if rotated else FULL for rotated in rotated_layers(architecture, fields, count)]
    if architecture.recurrent_every:
        interval = fields.given("full_attention_interval", architecture.recurrent_every, COUNT)
        return [RECURRENT if (layer + 1) % interval else FULL for layer in range(count)]
    if architecture.full_every:
        pattern = fields.given("sliding_window_pattern", architecture.full_every, COUNT)
        if pattern != architecture.full_every and not architecture.reads_pattern:
            raise DeploymentError(
                f"config.json: sliding_window_pattern is {pattern}; without layer_types it must be "
                f"{architecture.full_every}"
            )
        return [SLIDING if (layer + 1) % pattern else FULL for layer in range(count)]
    return [SLIDING if slides else FULL for slides in _slide(architecture, fields, count)]


def _slide(architecture: Architecture, fields: Fields, count: int) -> list[bool]:
    """Return per layer whether it has the sliding window, by the rule of ``Architecture.windows``."""
    rule = architecture.windows
    if rule == "none" or (rule != "all" and not _uses_windows(fields)):
        return [False] * count
    if rule == "alternate":
        last = fields.given("max_window_layers", count, INDEX)
        return [layer % 2 == 0 and layer < last for layer in range(count)]
    if sliding_window(fields) is None:
        return [False] * count
    if rule == "later":
        first = fields.given("max_window_layers", count, INDEX)
        return [layer >= first for layer in range(count)]
    if rule == "unrotated":
        return [not rotated for rotated in rotated_layers(architecture, fields, count)]
    return [True] * count


def _uses_windows(fields: Fields) -> bool:
    return bool(fields.given("use_sliding_window", False, FLAG))
