"""Ask one question over HTTP, as a chat, and print the whole answer.

python client/http_generate.py "Why is the sky blue?" --system "Answer in one sentence."
"""

import argparse

from inflight.client import GenerateOptions, HttpClient

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("question")
    parser.add_argument("--system", default="You are a helpful assistant.")
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--max-tokens", type=int)
    arguments = parser.parse_args()

    messages = [{"role": "system", "content": arguments.system}, {"role": "user", "content": arguments.question}]
    with HttpClient(arguments.url) as client:
        print(client.generate(messages, GenerateOptions(max_tokens=arguments.max_tokens)).text)
