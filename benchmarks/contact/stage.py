"""One stage, in this process: ``python -m benchmarks.contact.stage NAME [CASE]``, as ``contact.run`` starts it."""

from __future__ import annotations

import importlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.contact.record import Recorder

if TYPE_CHECKING:  # a stage begins even where these are missing
    import torch

    from benchmarks.contact.sizes import Sizes

STAGES = {
    "environment": ("environment", "environment"),
    "imports": ("environment", "imports"),
    "kernels": ("kernels", "one"),
    "small kernels": ("kernels", "small"),
    "counted kernels": ("kernels", "counted"),
    "ceilings": ("ceilings", "ceilings"),
    "rows": ("ceilings", "rows"),
    "invariant rows": ("ceilings", "invariant_rows"),
    "tests": ("suite", "suite"),
    "engine": ("engines", "bfloat16"),
    "modes": ("engines", "modes"),
    "batch invariance": ("engines", "batch_invariant"),
    "FP8": ("engines", "fp8"),
    "expert products": ("experts", "products"),
    "experts": ("experts", "engine"),
    "sampling": ("loads", "sampling"),
    "deployment": ("loads", "deployment"),
    "arrivals": ("loads", "arrivals"),
    "profile": ("profiles", "profiles"),
    "attention": ("sweeps", "attention"),
    "transformers": ("peer", "transformers"),
}
"""Of each stage its module and its function, which is given a ``Contact`` and the case."""


@dataclass(frozen=True)
class Contact:
    """What a stage works with."""

    recorder: Recorder
    dry: bool
    """Whether the stage is a small run on a CPU, with Triton's interpreter."""
    kernels: bool
    """Whether our kernels are used; the stop rule switches them off."""
    folder: Path
    """The folder of files that come back beside the results."""

    @property
    def device(self) -> torch.device:
        """Where things are computed.

        Raises:
            RuntimeError: PyTorch finds no CUDA device, and this is no dry run.
        """
        import torch

        if self.dry:
            return torch.device("cpu")
        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
        return torch.device("cuda")

    @property
    def sizes(self) -> Sizes:
        """How much is done."""
        from benchmarks.contact.sizes import DRY, FULL

        return DRY if self.dry else FULL

    def refuses_batch_invariance(self) -> bool:
        """Return whether the device refuses ``engine.batch_invariant``, and report it."""
        import torch

        from inflight.engine.cuda.prepare import INVARIANT_ON

        if self.dry or torch.cuda.get_device_capability() == INVARIANT_ON:
            return False
        self.recorder.add("engine.batch_invariant", "refused on this device")
        return True

    def wait(self) -> None:
        """Wait for all that was launched."""
        import torch

        if not self.dry:
            torch.cuda.synchronize()


def main(name: str, case: str = "") -> int:
    """Run a stage; return the exit status."""
    file = Path(os.environ["CONTACT_FILE"])
    recorder = Recorder(file, os.environ["CONTACT_CALL"], os.environ["CONTACT_STAGE"])
    dry, kernels = bool(os.environ.get("CONTACT_DRY")), os.environ.get("CONTACT_KERNELS") != "0"
    module, function = STAGES[name]
    run = getattr(importlib.import_module(f"benchmarks.contact.{module}"), function)
    run(Contact(recorder, dry, kernels, file.parent), case)
    return int(recorder.failures > 0)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
