"""Run in llama.cpp's environment: prints what its tokenizer makes of the texts of a JSON file, as JSON.

python llama_tokens.py MODEL.gguf TEXTS.json
"""

from __future__ import annotations

import json
import sys
import urllib.request
from pathlib import Path

import xllamacpp


def main(model: str, texts: str) -> None:
    """Ask the server of llama.cpp, which listens on a free port of this machine."""
    settings = xllamacpp.CommonParams()
    settings.model.path, settings.n_ctx, settings.n_parallel, settings.warmup = model, 64, 1, False
    server = xllamacpp.Server(settings)
    found = []
    for text in json.loads(Path(texts).read_text()):
        body = json.dumps({"content": text, "add_special": True, "parse_special": True}).encode()
        request = urllib.request.Request(f"{server.listening_address}/tokenize", body)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request) as answer:
            found.append(json.load(answer)["tokens"])
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
