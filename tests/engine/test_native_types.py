"""The names of what the native step packs weights as: those of its header."""

from __future__ import annotations

import re

from inflight.engine.native.bindings import Packed
from inflight.resources import ROOT


def test_names_and_numbers_are_those_of_the_header() -> None:
    [types] = re.findall(r"enum Type : int32_t \{(.*?)\n\};", (ROOT / "native/kernels.h").read_text(), re.DOTALL)
    found = {name.lower(): int(number) for name, number in re.findall(r"k(\w+) = (\d+),", types)}
    assert found == {packed.name.replace("_", "").lower(): packed.value for packed in Packed}
