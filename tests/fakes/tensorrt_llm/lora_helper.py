"""``LoraConfig``, with the recorded fields."""

from tensorrt_llm.tables import LLM_API, model

LoraConfig = model("LoraConfig", LLM_API["LoraConfig"]["fields"])
