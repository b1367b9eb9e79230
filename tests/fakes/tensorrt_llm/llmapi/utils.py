"""What of ``tensorrt_llm.llmapi.utils`` is used."""

from tensorrt_llm.faults import fault


def get_device_count() -> int:
    """Return how many GPUs there are."""
    return int(fault("gpus", 2))
