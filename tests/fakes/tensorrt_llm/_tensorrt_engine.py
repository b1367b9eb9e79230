"""``LLM`` of the TensorRT flow."""

from tensorrt_llm.llmapi.llm import TrtLLM as LLM

__all__ = ["LLM"]
