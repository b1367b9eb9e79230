"""The names of metrics in an expression of PromQL."""

from __future__ import annotations

import re

FUNCTIONS = set(
    "sum min max avg count rate increase changes histogram_quantile predict_linear deriv min_over_time time vector "
    "absent by on group_left offset and or unless".split()
)


def names(expr: str) -> set[str]:
    """Return the identifiers of an expression that are neither labels nor functions."""
    bare = re.sub(r'"[^"]*"|\[[^]]*\]', "", expr)
    bare = re.sub(r"\{[^}]*\}", "", bare)
    bare = re.sub(r"\b(by|on|group_left) \([^)]*\)", "", bare)
    bare = re.sub(r"\boffset \w+|\b\d[\w.]*", "", bare)
    return set(re.findall(r"[A-Za-z_][\w:]*", bare)) - FUNCTIONS
