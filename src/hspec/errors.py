"""Errors that a user can act on.

Every message says what went wrong, where, and what to do. The command line prints the message without a traceback
and exits with the class's code; library users catch :class:`HSpecError`.
"""

from __future__ import annotations


class HSpecError(Exception):
    """Something failed that the user can mend; exit code 1."""

    exit_code = 1


class UsageError(HSpecError):
    """The request itself cannot be honoured (a wrong argument, an incompatible drafter); exit code 2."""

    exit_code = 2
