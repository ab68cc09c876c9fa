"""Errors meant for the user: one line that says what is wrong, where, what was expected and how to mend it."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can mend. The message is the one line that a command prints before it exits with 2."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class RecordingError(UserError):
    """A recording, or its file, that cannot be used."""
