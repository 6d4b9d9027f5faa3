"""What ranks that ended badly come to: always one line, whatever they and torchrun have written."""
from __future__ import annotations

import re
from pathlib import Path

import pytest

from engine.reason import reason
from sim.errors import RankLost, UserError

TORCHRUN = """\
E1129 23:10:11 1 torch/distributed/elastic/multiprocessing/api.py:984] failed (exitcode: {code}) local_rank: 1 (pid: 77) of binary: python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
engine.serve FAILED
------------------------------------------------------------
Failures:
  <NO_OTHER_FAILURES>
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2025-11-29_23:10:11
  host      : there
  rank      : 1 (local_rank: 1)
  exitcode  : {code} (pid: 77){name}
  error_file: <N/A>
  traceback : {said}
============================================================
"""
NCCL = """\
[rank1]:[E1129 23:10:10 ProcessGroupNCCL.cpp:685] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLTOALL_BASE) ran for 45012 ms
terminate called after throwing an instance of 'c10::DistBackendError'
  what():  [PG ID 0 PG GUID 0 Rank 1] Process group watchdog thread terminated with exception
frame #0: c10::Error::Error
"""
BUG = "Traceback (most recent call last):\n  File x\n[rank1]: ZeroDivisionError: division by zero\n"
TOLD = "lost: rank 0 was told to stop, as another rank had ended\n"


def torchrun(code: int, name: str = "") -> str:
    return TORCHRUN.format(code=code, name=f" ({name})" if name else "", said=f"Signal {-code} ({name}) received by PID 77" if name else "To enable traceback see: https://pytorch.org")


SLOW = "[1]:\n  time      : 2025-11-29_23:10:41\n  host      : there\n  rank      : 0 (local_rank: 0)\n  exitcode  : -9 (pid: 76)\n  error_file: <N/A>\n  traceback : Signal 9 (SIGKILL) received by PID 76"
"""The report of a rank that torchrun killed, as it had not ended 30 s after the first."""


@pytest.mark.parametrize("code, errors, line", (
    (1, TOLD + torchrun(-9, "SIGKILL"), "rank 1 was killed by SIGKILL"),
    (1, NCCL + TOLD + torchrun(-6, "SIGABRT"), "rank 1 was killed by SIGABRT"),
    (1, torchrun(-9, "SIGKILL").replace("  <NO_OTHER_FAILURES>", SLOW), "rank 1 was killed by SIGKILL"),
    (1, TOLD + torchrun(1).replace("  <NO_OTHER_FAILURES>", SLOW.replace("10:41", "10:11")), "rank 0 was killed by SIGKILL"),
    (1, "lost: rank 1 lost the store\n" + torchrun(1).replace("  <NO_OTHER_FAILURES>", SLOW), "rank 1 lost the store"),
    (1, torchrun(-11, "SIGSEGV"), "rank 1 was killed by SIGSEGV"),
    (1, torchrun(-35), "rank 1 was killed by signal 35"),
    (1, "lost: rank 1 lost rank 0, which gave no sign of life for 20 s\n" + torchrun(1), "rank 1 lost rank 0, which gave no sign of life for 20 s"),
    (1, TOLD + torchrun(-15, "SIGTERM"), "rank 0 was told to stop, as another rank had ended"),
    (1, torchrun(-9, "SIGKILL").replace("  <NO_OTHER_FAILURES>", SLOW.replace("10:41", "10:11")), "rank 1 was killed by SIGKILL"),
    (1, BUG.replace("rank1", "rank0") + TOLD + torchrun(-9, "SIGKILL"), "rank 1 was killed by SIGKILL"),
    (1, TOLD + torchrun(-9, "SIGKILL").replace("23:10:11", "23:10:11.5+00:00"), "rank 1 was killed by SIGKILL"),
    (-9, "", "the rank was killed by SIGKILL"),
    (-6, NCCL, "the rank was killed by SIGABRT"),
))
def test_a_death_is_a_lost_rank(code, errors, line):
    found = reason(code, errors)
    assert (type(found), str(found)) == (RankLost, line)


def test_a_mistake_of_the_users_goes_before_the_deaths_that_it_brings():
    found = reason(1, TOLD + "error: S=3 is shorter than P=4\n" + torchrun(-9, "SIGKILL"))
    assert (type(found), str(found)) == (UserError, "S=3 is shorter than P=4")


@pytest.mark.parametrize("errors, said", (
    (BUG + torchrun(1), "[rank1]: ZeroDivisionError: division by zero"),
    (BUG + TOLD + torchrun(1), "[rank1]: ZeroDivisionError: division by zero"),
    (BUG + torchrun(1).replace("  <NO_OTHER_FAILURES>", SLOW.replace("10:41", "10:12")), "[rank1]: ZeroDivisionError: division by zero"),
    ("nothing that is known\n", "they said nothing"),
))
def test_a_mistake_of_ours_is_one_line_and_keeps_its_traceback_in_a_file(errors, said):
    found = reason(1, errors)
    line, kept = re.fullmatch(r"(.*) \(all that they said: (.*)\)", str(found)).groups()
    try:
        assert type(found) is RuntimeError and line == f"the ranks ended with 1: {said}"
        assert Path(kept).read_text() == errors
    finally:
        Path(kept).unlink()
