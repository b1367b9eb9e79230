'''What is typed and pasted at a terminal, as whole messages. Knows nothing of conversations.

A message is a line, a text that was pasted, or what stands between two """, of as many lines as there are.
'''

from __future__ import annotations

import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prompt_toolkit import PromptSession
from prompt_toolkit.application import create_app_session
from prompt_toolkit.filters import Condition
from prompt_toolkit.key_binding import KeyBindings
from prompt_toolkit.output import create_output
from prompt_toolkit.output.plain_text import PlainTextOutput
from prompt_toolkit.utils import is_dumb_terminal

QUOTES = '"""'
_BRACKETED_PASTE = ("\x1b[?2004h", "\x1b[?2004l")
"""Has the terminal mark the beginning and the end of what is pasted, or no longer."""


class Keyboard:
    """Reads messages from the terminal that is standard input."""

    def __init__(self) -> None:
        keys = KeyBindings()
        keys.add("escape", "enter")(lambda event: event.current_buffer.insert_text("\n"))
        shown = sys.stdout if sys.stdout.isatty() else sys.stderr
        # Not given to the session itself, which would then ask nothing of TERM and write sequences to a dumb terminal.
        output = PlainTextOutput(shown) if is_dumb_terminal() else create_output(stdout=shown)
        with create_app_session(output=output):
            self._session: PromptSession[str] = PromptSession(
                "> ",
                multiline=Condition(lambda: _is_open(self._session.default_buffer.text)),
                prompt_continuation="  ",
                key_bindings=keys,
                enable_suspend=True,
            )

    def read(self) -> str:
        """Return the next message as it was given, its quotes included.

        Raises:
            EOFError: Ctrl-D, or the terminal has gone.
            KeyboardInterrupt: Ctrl-C. Ctrl-Z suspends the program, as ever.
        """
        return self._session.prompt()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Keep what is typed meanwhile for the next message, unseen; Ctrl-C is an interrupt as ever."""
        before = termios.tcgetattr(sys.stdin)
        try:
            # Without echo and line editing, and with an interrupt that discards nothing.
            local = before[3] & ~(termios.ECHO | termios.ICANON) | termios.NOFLSH
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, [*before[:3], local, *before[4:]])
            self._write(_BRACKETED_PASTE[0])
            yield
        finally:
            with suppress(termios.error, OSError):  # the terminal may have gone
                self._write(_BRACKETED_PASTE[1])
                termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)

    def _write(self, sequence: str) -> None:
        if is_dumb_terminal():
            return
        self._session.output.write_raw(sequence)
        self._session.output.flush()


def _is_open(text: str) -> bool:
    """Return whether quotes were opened and not closed: Enter then begins a line."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))
