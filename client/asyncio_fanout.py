"""Send many prompts at once over one connection; the server batches them in flight.

python client/asyncio_fanout.py "One" "Two" "Three" --max-tokens 32
"""

import argparse
import asyncio

from inflight.client import AsyncClient, GenerateOptions


async def main(url: str, prompts: list[str], options: GenerateOptions) -> None:
    async with AsyncClient(url) as client:
        for answer in await asyncio.gather(*(client.generate(prompt, options) for prompt in prompts)):
            print(f"{answer.seconds:6.2f} s  {answer.text!r}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompts", nargs="+")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()
    asyncio.run(main(arguments.url, arguments.prompts, GenerateOptions(max_tokens=arguments.max_tokens)))
