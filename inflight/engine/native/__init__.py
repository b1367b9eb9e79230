"""The CPU's step in native code: one call computes all layers of a step (``native/`` has the sources)."""
