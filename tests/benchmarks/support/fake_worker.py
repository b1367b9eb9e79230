"""A worker that fails as it is told: its argument is the fault, and the job is answered with what it asks for.

python -m tests.benchmarks.support.fake_worker none|exit|hang|garbage|silence|child
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time


def main(fault: str) -> None:
    """Read the job, and do what the fault says in place of answering it."""
    job = json.load(sys.stdin)
    print("the fake worker has begun", file=sys.stderr, flush=True)
    if fault == "exit":
        print("no such model", file=sys.stderr, flush=True)
        sys.exit(3)
    if fault == "hang":
        time.sleep(3600)
    if fault == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], stdout=subprocess.DEVNULL)
        job["answer"]["child"] = child.pid
    if fault == "garbage":
        print("{half an answer")
    elif fault != "silence":
        print("progress, which is no answer")
        print(json.dumps({"result": job["answer"] | {"asked_by": os.environ.get("ASKED_BY")}}))


if __name__ == "__main__":
    main(sys.argv[1])
