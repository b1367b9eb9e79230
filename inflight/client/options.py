"""The options that the commands ``inflight chat`` and ``inflight generate`` share."""

from __future__ import annotations

from typing import Annotated

import typer

Url = Annotated[
    str,
    typer.Option(envvar="INFLIGHT_URL", help="host:port is gRPC (grpcs:// with TLS); http:// or https:// is HTTP."),
]
Model = Annotated[str, typer.Option(help="Triton model to ask.")]
MaxTokens = Annotated[int | None, typer.Option(help="Most tokens to generate; by default the server's limit.")]
Temperature = Annotated[float | None, typer.Option(help="Sampling temperature; 0 or absent: greedy.")]
TopK = Annotated[int | None, typer.Option(help="Sample among the k likeliest tokens.")]
TopP = Annotated[float | None, typer.Option(help="Sample among the likeliest tokens whose sum reaches p.")]
BeamWidth = Annotated[int | None, typer.Option(help="Beams of beam search; the best one's text is the answer.")]
LengthPenalty = Annotated[float | None, typer.Option(help="Beams are ranked by log-prob / length ** this.")]
Seed = Annotated[int | None, typer.Option(help="Random seed.")]
Stop = Annotated[list[str] | None, typer.Option(help="String that ends an answer; may be given several times.")]
LOADING_S = 120.0
"""How long a command waits for a server that is there and still loads its model."""
