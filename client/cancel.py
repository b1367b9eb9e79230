"""Cancel an answer after a few chunks; the server frees what it held within a step.

python client/cancel.py "Count to a thousand" --chunks 5
"""

import argparse

from inflight.client import Client, GenerateOptions

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--chunks", type=int, default=5)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()

    with Client(arguments.url) as client:
        with client.stream(arguments.prompt, GenerateOptions(max_tokens=arguments.max_tokens)) as stream:
            for count, chunk in enumerate(stream, start=1):
                print(chunk.text, end="", flush=True)
                if count == arguments.chunks:
                    stream.cancel()
        answer = stream.completion()
        print(f"\n[{answer.finish_reason or 'cancelled'} after {answer.seconds:.2f} s]")
