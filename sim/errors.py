"""The exceptions that are no bug of ours: a user's mistake, a rank that is gone. Everything else keeps its traceback."""
from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """One line: the value, the rule it breaks, a value that works. The command line exits with 2 on it."""


class RankLost(RuntimeError):
    """One line: which rank noticed, and what it saw. The command line exits with 1 on it."""


def unknown(what: str, name: str, known: Iterable[str]) -> UserError:
    """An error for a name that does not exist, offering the closest ones that do."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known[:6]
    return UserError(f"unknown {what} {name!r}; closest: {', '.join(near)}")
