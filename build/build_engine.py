"""Build a deployment for a GPU: plan, quantize, compile, verify, write. The same as `inflight build`.

python build/build_engine.py --model DIR --gpu h100 --precision fp8
python build/build_engine.py --model DIR --gpu h100 --precision fp8 --dry-run
"""

from __future__ import annotations

import typer

from inflight.export.build.commands import build

if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(build)
    app()
