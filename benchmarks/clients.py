"""``make clients``: environments for the programs of others that speak to the gateway, below ``artifacts/clients``.

Packages whose pins agree share one environment: to make one costs more than to run what is in it.
"""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.environments import Environments, Recipe
from benchmarks.peers.environments import TORCH

SDKS, LLAMA_INDEX, LM_EVAL = "sdks", "llama-index", "lm-eval"
GUIDELLM, AIPERF = "guidellm", "aiperf"
SUITES = "suites"
RECIPES = {
    SDKS: Recipe(
        (
            "openai==3.57.0",
            "anthropic==2.14.0",
            "langchain==1.5.2",
            "langchain-openai==1.7.4",
            "litellm==1.110.2",
            "openai-agents==0.24.0",
        )
    ),
    LLAMA_INDEX: Recipe(("llama-index-llms-openai-like==0.8.1",)),  # it needs openai 2
    LM_EVAL: Recipe(
        (
            TORCH,
            "lm-eval==0.4.13",
            "transformers==5.23.0",
            "tenacity==9.2.1",
            "aiohttp==3.14.5",
            "tiktoken==0.14.0",
            "accelerate==1.15.0",
        )
    ),
    GUIDELLM: Recipe((TORCH, "guidellm==0.8.1")),
    AIPERF: Recipe(("aiperf==0.13.0",)),
    SUITES: Recipe(  # what llama.cpp's tests of its server import
        (
            "aiohttp==3.14.5",
            "filelock==4.2.11",
            "numpy==2.4.6",
            "openai==3.57.0",
            "prometheus-client==0.26.0",
            "pytest==9.1.1",
            "pytest-timeout==2.4.0",
            "requests==2.34.2",
            "wget==3.2",
        )
    ),
}
CLIENTS = Environments("make clients", Path("artifacts/clients"), RECIPES)


if __name__ == "__main__":
    sys.exit(CLIENTS.main(sys.argv[1:]))
