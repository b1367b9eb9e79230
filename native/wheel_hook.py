"""Has hatchling build the native step into the wheel, which is then for this platform alone."""

from __future__ import annotations

import runpy
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class NativeStepHook(BuildHookInterface):
    """Adds the library; without a compiler the wheel has none, and PyTorch computes the steps."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the library, unless the installation is an editable one: scripts/setup.py builds it there."""
        if version == "editable":
            return
        native = runpy.run_path(str(Path(__file__).with_name("build.py")))
        failure = None if native["is_built"]() else native["build"]()
        if failure is not None:
            self.app.display_warning(f"the wheel has no native step: {failure}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data |= {"pure_python": False, "tag": f"py3-none-{platform}"}
        library = native["LIBRARY"]
        build_data["force_include"][str(library)] = str(library.relative_to(Path(self.root)))
