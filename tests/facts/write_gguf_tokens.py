"""Writes ``gguf_tokens.json``: how llama.cpp tokenizes with the demo model's vocabulary, by ``tokenizer.ggml.pre``.

    .venv/bin/python -m tests.facts.write_gguf_tokens artifacts/peers/llama.cpp/build/bin/llama-server

`make peers ARGS=llama.cpp` builds that program.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx

from inflight.gguf.words import WORDS
from inflight.resources import DEMO, bundled
from tests.engine.support.gguf_files import write_gguf
from tests.support.gguf_tokenizers import add_byte_level, read_tokenizer

_MODEL = bundled(DEMO) / "model"
_ADDRESS = "http://127.0.0.1:18980"
_BUT = {
    "qwen2, qwen35": "the published tokenizers normalize text to NFC, llama.cpp does not: no text here changes by it",
    "tekken, gpt-4o": "the published rules take marks for parts of words, llama.cpp does not: no text here has one",
}
_TEXTS = [
    "The quick brown fox jumps over the lazy dog. She sells sea shells; how much wood?",
    "def main():\n    return {'a': 1}\n\n\nprint( main() )  # a comment",
    "don't DON'T I'LL we've 'sure' it's",
    "1 12 123 1234 12345678 3.14 1,000,000 ½ ² Ⅷ",
    "Größe, naïve café, Ελληνικά, русский текст, עברית",
    "日本語のテキスト。中文字符，한국어 문장",
    "camelCase XMLHttpRequest snake_case ALLCAPS Title",
    "emoji 😀👩‍👩‍👧 done!!!\n?! ... //x /*y*/\r\n#tag @me $5",
    "   leading\t\ttabs  \n\n  and trailing   ",
    "http://x.y/z?q=1&r=[2]",
]


def _serve(program: str, pre: str, folder: Path) -> list[list[int]]:
    """Return the tokens of each text."""
    data = read_tokenizer(_MODEL / "tokenizer.json")
    file = write_gguf(_MODEL, folder, lambda _: "F32", lambda writer, size: add_byte_level(writer, data, pre, size))
    port = _ADDRESS.rpartition(":")[2]
    server = subprocess.Popen([program, "-m", file.path, "--port", port, "-c", "256"], stderr=subprocess.DEVNULL)
    try:
        while True:
            try:
                if httpx.get(f"{_ADDRESS}/health").status_code == httpx.codes.OK:
                    break
            except httpx.TransportError:
                time.sleep(0.1)
        return [httpx.post(f"{_ADDRESS}/tokenize", json={"content": text}).json()["tokens"] for text in _TEXTS]
    finally:
        server.terminate()
        server.wait()


def main(program: str) -> None:
    """Ask llama.cpp for each rule, by the first name that it has."""
    names = {words: name for name, words in reversed(WORDS.items())}
    ids = {}
    for name in reversed(names.values()):
        with tempfile.TemporaryDirectory() as folder:
            ids[name] = _serve(program, name, Path(folder))
    source = "llama-server of llama-cpp-python 0.3.36, /tokenize, with the vocabulary and merges of the demo model"
    facts = {"source": source, "but": _BUT, "texts": _TEXTS, "ids": ids}
    path = Path(__file__).with_name("gguf_tokens.json")
    path.write_text(json.dumps(facts, ensure_ascii=False).replace("]], ", "]],\n") + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
