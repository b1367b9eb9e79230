"""A TensorRT-LLM that bites: the LLM API of 1.2.x as the recorded facts have it, on the portable engine.

It refuses what the real one refuses, ignores what the real one ignores, and fails on demand (see ``faults``).
"""

from tensorrt_llm.faults import fault
from tensorrt_llm.llmapi import LLM, SamplingParams

__version__ = fault("version", "1.2.1")
__all__ = ["LLM", "SamplingParams", "__version__"]
