"""The program ``inflight``: what has to be set before the first library is loaded, which takes seconds."""

from __future__ import annotations

import os
import signal
import sys


def main() -> None:
    """Run the command that the arguments name."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # what fails is told by us, in one line, and not by gRPC too
    interrupt = signal.getsignal(signal.SIGINT)
    if interrupt is signal.default_int_handler:  # and not ignored, as for a shell's background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C has nothing to end yet but the program
    from inflight.cli import app, import_command

    import_command(sys.argv[1:])
    signal.signal(signal.SIGINT, interrupt)
    app()


if __name__ == "__main__":
    main()
