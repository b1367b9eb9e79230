"""What settings and requests a model with recurrent layers can be served with."""

from __future__ import annotations

from inflight.engine.config import EngineConfig
from inflight.engine.kvcache.states import snapshot_unit
from inflight.engine.models.config import STATE_CHUNK, ModelConfig
from inflight.errors import DeploymentError, UnsupportedFeature


def check_recurrent(config: EngineConfig, model: ModelConfig) -> None:
    """Check the settings of the states of a model's recurrent layers, and those that have to do with them.

    Raises:
        DeploymentError: one cannot be had with this model; it names the setting, the value, and what is allowed.
    """
    if not model.recurrent:
        for name in ("state_snapshots", "state_snapshot_tokens"):
            if getattr(config, name) is not None:
                raise DeploymentError(
                    f"kv_cache.{name} is {getattr(config, name)}; {model.architecture} has no recurrent layers: "
                    "leave it out"
                )
        return
    unit, interval = snapshot_unit(config.block_size), config.state_snapshot_tokens
    if interval is not None and interval % unit:
        raise DeploymentError(
            f"kv_cache.state_snapshot_tokens is {interval}; with blocks of {config.block_size} tokens it must be a "
            f"multiple of {unit}"
        )
    _check_others(config)
    most = config.max_batch_size - 1 + STATE_CHUNK
    if config.max_tokens_per_step < most:
        raise DeploymentError(
            f"batching.max_tokens_per_step is {config.max_tokens_per_step}; recurrent layers take prompts by "
            f"{STATE_CHUNK} tokens, so that beside {config.max_batch_size - 1} decoding sequences (`max_batch_size` "
            f"is {config.max_batch_size}) it must be at least {most}"
        )
    chunk = config.prefill_chunk_tokens
    if chunk is not None and chunk < STATE_CHUNK:
        raise DeploymentError(
            f"batching.prefill_chunk_tokens is {chunk}; recurrent layers take prompts by {STATE_CHUNK} tokens: it must "
            "be no less"
        )


def check_beam_width(beam_width: int) -> None:
    """Check a request to a model with recurrent layers.

    Raises:
        UnsupportedFeature: it asks for beam search, whose beams would need states of their own.
    """
    if beam_width > 1:
        raise UnsupportedFeature("beam_width above 1 is not supported for a model with recurrent layers")


def _check_others(config: EngineConfig) -> None:
    if config.speculation.method is not None:
        raise DeploymentError(
            f"speculation.method is {config.speculation.method}; the states of recurrent layers cannot go back to "
            "before drafts that are refused: leave it out"
        )
    if config.offload_to != "none":
        raise DeploymentError(
            f"kv_cache.offload.to is {config.offload_to}; a prefix of recurrent layers is of no use without its state, "
            "which is not offloaded: it must be none"
        )
