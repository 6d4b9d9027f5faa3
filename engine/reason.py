"""Reason: what the end of ranks comes to, from their exit code, their words on stderr and torchrun's report."""
from __future__ import annotations

import re
import signal
import tempfile
from datetime import datetime, timedelta

from engine.worker import LOST, MISTAKE, TOLD
from sim.errors import RankLost, UserError

ENDED = re.compile(r"^ *\[(\d+)\]: *\n *time *: (\d{4}-\d\d-\d\d)[_T](\d\d:\d\d:\d\d).*\n.*\n *rank *: (\d+) .*\n *exitcode *: (-?\d+) ", re.MULTILINE)
"""How torchrun reports a rank that ended badly: in which order it was noticed, when, which, and how."""
RAISED = re.compile(r"(\[rank\d+\]: )?(?!.*ChildFailedError)[A-Za-z_.]*(Error|Exception|Interrupt)\b")
"""The line of a traceback that says what was raised."""
LATE = timedelta(seconds=20)
"""One that was killed so long after the first had ended was killed by torchrun, which waits 30 s for it to end."""


def reason(code: int, errors: str) -> Exception:
    """What the ranks' exit code and stderr come to, in one line: a user's mistake, a lost rank, or a mistake of ours with its traceback in a file."""
    mistakes, losses = ([line.removeprefix(kind) for line in errors.splitlines() if line.startswith(kind)] for kind in (MISTAKE, LOST))
    if mistakes:
        return UserError(mistakes[0])
    raised, ended = [line for line in errors.splitlines() if RAISED.match(line)], _ended(errors)
    known = any(TOLD not in line for line in losses) or ended and ended[0][2] < 0
    if not raised or known:
        said = [*_killed(ended), *sorted(losses, key=lambda line: TOLD in line), *([f"the rank was killed by {signal_name(-code)}"] if code < 0 else [])]
        if said:
            return RankLost(said[0])
    with tempfile.NamedTemporaryFile("w", prefix="fpdt-ranks-", suffix=".txt", delete=False) as kept:
        kept.write(errors)
    return RuntimeError(f"the ranks ended with {code}: {raised[0] if raised else 'they said nothing'} (all that they said: {kept.name})")


def _ended(errors: str) -> list[tuple[datetime, int, int]]:
    """(time, rank, exit code) of those that torchrun reports, the first first; its times are whole seconds."""
    found = sorted((datetime.fromisoformat(f"{day} {time}"), int(n), int(rank), int(code)) for n, day, time, rank, code in ENDED.findall(errors))
    return [(time, rank, code) for time, _, rank, code in found]


def _killed(ended: list[tuple[datetime, int, int]]) -> list[str]:
    """A line for each that a signal ended, but for torchrun's own."""
    return [f"rank {rank} was killed by {signal_name(-code)}" for time, rank, code in ended if code < 0 and code != -signal.SIGTERM and time - ended[0][0] < LATE]


def signal_name(number: int) -> str:
    """9 -> SIGKILL; a real-time signal has its number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
