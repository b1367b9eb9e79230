"""PlanRequest: what a plan is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from inflight.engine.models.config import ModelConfig
from inflight.errors import DeploymentError


@dataclass(frozen=True)
class PlanRequest:
    """Precision, load and objectives.

    Raises:
        DeploymentError: on construction, naming the field, its value and the limit.
    """

    precision: str = "auto"
    """auto: the checkpoint's 16-bit type, float32 on cpu; or a name of ``precision.PRECISIONS``."""
    kv_cache: str = "auto"
    """auto: FP8 with precisions that are calibrated with activations in FP8, else 16 bits."""
    input_tokens: int = 1024
    """Mean length of a prompt."""
    output_tokens: int = 256
    """Mean length of an answer."""
    p95_input_tokens: int | None = None
    """95 % of the prompts are no longer; None: all have the mean length."""
    p95_output_tokens: int | None = None
    rate: float | None = None
    """Requests per second to serve; None: as many as the GPUs can."""
    cache_hit_rate: float = 0.0
    """Share of the prompts' tokens that the prefix cache has."""
    slo_ttft_ms: float | None = None
    """Time to first token, of a prompt of P95 length."""
    slo_itl_ms: float | None = None
    """Mean time between two tokens of a stream."""
    price: float | None = None
    """USD per GPU hour; None: the table's assumption."""
    gpus: int | None = None
    """GPUs at hand; None: as many as are needed."""
    tensor_parallel_size: int | None = None
    """GPUs that share each layer; None: chosen."""
    excluded: tuple[str, ...] = ()
    """Patterns of the names of linear layers that stay at 16 bits."""
    block_size: int = 16
    """Tokens per block of the KV cache."""
    free_windows: bool = False
    """Whether the engine lets go of KV that has left a layer's window. The portable engine does not, nor does
    TensorRT-LLM as it is set up here, without ``max_attention_window``."""

    def __post_init__(self) -> None:
        for name in ("input_tokens", "output_tokens", "block_size"):
            _require(getattr(self, name) >= 1, name, getattr(self, name), "at least 1")
        for name in ("rate", "slo_ttft_ms", "slo_itl_ms"):
            value = getattr(self, name)
            _require(value is None or value > 0, name, value, "above 0")
        _require(self.price is None or self.price >= 0, "price", self.price, "at least 0")
        for name in ("gpus", "tensor_parallel_size"):
            value = getattr(self, name)
            _require(value is None or value >= 1, name, value, "at least 1")
        _require(0 <= self.cache_hit_rate < 1, "cache_hit_rate", self.cache_hit_rate, "at least 0 and below 1")
        for name, mean in (("p95_input_tokens", self.input_tokens), ("p95_output_tokens", self.output_tokens)):
            value = getattr(self, name)
            _require(value is None or value >= mean, name, value, f"at least the mean, {mean}")

    @property
    def longest_input(self) -> int:
        """Tokens of a prompt of P95 length."""
        return self.p95_input_tokens or self.input_tokens

    @property
    def longest(self) -> int:
        """Tokens of prompt and answer, both of P95 length."""
        return self.longest_input + (self.p95_output_tokens or self.output_tokens)

    @property
    def uncached_input(self) -> float:
        """Mean prompt tokens to compute."""
        return self.input_tokens * (1 - self.cache_hit_rate)

    @property
    def has_load(self) -> bool:
        """Whether there is a rate to hold or an objective to meet."""
        return any(value is not None for value in (self.rate, self.slo_ttft_ms, self.slo_itl_ms))

    def check(self, config: ModelConfig) -> None:
        """Check the lengths against a model.

        Raises:
            DeploymentError: its longest sequence is shorter.
        """
        limit = config.max_position_embeddings
        if self.longest > limit:
            raise DeploymentError(
                f"prompt and answer have {self.longest} tokens at P95; the model's longest sequence has {limit}"
            )


def _require(condition: bool, name: str, value: object, limit: str) -> None:
    if not condition:
        raise DeploymentError(f"{name} is {value}; it must be {limit}")
