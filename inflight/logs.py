"""Log lines of the stages and the gateway, as text or as JSON objects. Triton's own, in the stages' file, keep its
format."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import sys
import time
from typing import Any

from inflight.errors import readable
from inflight.settings.observability import LOG_FORMAT_VARIABLE, ObservabilitySettings

_STANDARD = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of every record; the others are the fields that a line was logged with."""
_PLAIN = re.compile(r"[\w.,:/-]+")
"""Values that are one word. All others are quoted, because a client must not write log lines by its request ids."""


def configure(settings: ObservabilitySettings) -> None:
    """Have this process log as the settings say, to its standard error."""
    chosen = os.environ.get(LOG_FORMAT_VARIABLE) or settings.log_format
    if isinstance(sys.stderr, io.TextIOWrapper):  # the Python that Triton embeds takes it for ASCII
        sys.stderr.reconfigure(encoding="utf-8", errors="backslashreplace")
    handler = logging.StreamHandler()
    handler.setFormatter(JsonFormatter() if chosen == "json" else TextFormatter())
    logging.basicConfig(level=settings.log_level.upper(), handlers=[handler])
    logging.captureWarnings(True)


class TextFormatter(logging.Formatter):
    """Time, level, logger and message; then the fields as ``name=value``, the value as JSON unless it is one word."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        texts = {name: str(value) for name, value in _fields(record).items()}
        words = [f" {name}={text if _PLAIN.fullmatch(text) else json.dumps(text)}" for name, text in texts.items()]
        return _printable(readable("".join([super().formatMessage(record), *words])))

    def formatException(self, ei: Any) -> str:
        return "\n".join(_printable(readable(line)) for line in super().formatException(ei).split("\n"))


class JsonFormatter(logging.Formatter):
    """One JSON object per line, a traceback included."""

    converter = staticmethod(time.gmtime)
    default_time_format = "%Y-%m-%dT%H:%M:%S"
    default_msec_format = "%s.%03dZ"

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": self.formatTime(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        # Made readable before it is JSON: the escapes of undecodable bytes are no valid JSON escapes.
        told = {name: readable(value) if isinstance(value, str) else value for name, value in entry.items()}
        return json.dumps(told, ensure_ascii=False, default=lambda value: readable(str(value)))


def _printable(text: str) -> str:
    """Return a line in which ends of lines, and what a terminal obeys, are shown as in a Python string."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD and value not in (None, "")}
