"""Stream one answer over gRPC; it goes on where the connection or the server breaks.

python client/grpc_stream.py "Once upon a time" --max-tokens 64
"""

import argparse

from inflight.client import Client, GenerateOptions, Retry

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()

    options = GenerateOptions(max_tokens=arguments.max_tokens, return_num_output_tokens=True)
    with Client(arguments.url, retry=Retry(resume=True)) as client, client.stream(arguments.prompt, options) as stream:
        for chunk in stream:
            print(chunk.text, end="", flush=True)
    answer = stream.completion()
    print(f"\n[{answer.finish_reason}, {answer.usage.output_tokens} tokens, {answer.seconds:.2f} s]")
