"""README's command for OpenAI's API, word for word, with the default port's number replaced."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

from tests.gateway.support.gateways import Beside

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_readmes_command_of_the_gateway_answers(gateway: Beside) -> None:
    [command] = re.findall(r"^curl .*:8080/.*$", README, re.MULTILINE)
    here = command.replace("http://127.0.0.1:8080", gateway.url)
    done = subprocess.run(here, shell=True, capture_output=True, text=True, timeout=120, check=True)
    assert "first token" in json.loads(done.stdout)["choices"][0]["message"]["content"]
