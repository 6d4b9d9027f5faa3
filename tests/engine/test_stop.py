"""Told to stop, a rank ends within a second and with its one line, though its main thread sits in a call that no Python handler interrupts."""
from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from engine import stop
from engine.worker import joined

LINE = "lost: rank 0 was told to stop, as another rank had ended\n"
STUCK = {
    "asleep in C": "ctypes.CDLL(None).sleep(1000)",
    "in a mutex": "c = ctypes.CDLL(None); m = ctypes.create_string_buffer(64); c.pthread_mutex_lock(m); c.pthread_mutex_lock(m)",
    "in a read": "ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)",
    "in a lock": "threading.Lock().acquire() and (l := threading.Lock()).acquire() and l.acquire()",
    "busy beside a thread from before": "[None for _ in iter(int, 1)]",
}


def begin(code: str) -> subprocess.Popen:
    """A Python process that has printed a line just before it gets to `code`; threads were there before it could be told to stop."""
    script = f"""
import ctypes, os, subprocess, sys, threading
threading.Thread(target=threading.Event().wait, daemon=True).start()
from engine.worker import joined
with joined():
    print("there", flush=True)
    {code}
"""
    process = subprocess.Popen([sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "there\n"
    time.sleep(0.1)
    return process


def end(process: subprocess.Popen) -> tuple[int, str]:
    try:
        errors = process.communicate(timeout=20)[1]
    finally:
        process.kill()
    return process.returncode, errors


@pytest.mark.parametrize("where", STUCK)
def test_it_ends_within_a_second_wherever_it_is(where):
    process = begin(STUCK[where])
    start = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert end(process) == (1, LINE)
    assert time.monotonic() - start < 1


@pytest.mark.parametrize("child", ("subprocess.Popen(['sleep', '1000']).pid", "os.fork() or os.execvp('sleep', ['sleep', '1000'])", "os.fork() or ctypes.CDLL(None).sleep(1000)"))
def test_its_children_end_by_a_signal_as_ever_and_do_not_end_it(child):
    process = begin(f"pid = {child}; __import__('time').sleep(0.3); os.kill(pid, 15); print(os.waitpid(pid, 0)[1], flush=True); ctypes.CDLL(None).sleep(1000)")
    assert process.stdout.readline() == f"{int(signal.SIGTERM)}\n"
    process.send_signal(signal.SIGTERM)
    assert end(process) == (1, LINE)


def test_inside_a_process_it_leaves_everything_as_it_was():
    def state():
        return signal.getsignal(signal.SIGTERM), signal.set_wakeup_fd(-1), signal.pthread_sigmask(signal.SIG_BLOCK, ())

    affinity = os.sched_getaffinity(0)
    before, threads = state(), threading.active_count()
    try:
        for _ in range(3):
            with joined() as (rank, group):
                assert (rank, group) == (0, None) and signal.pthread_sigmask(signal.SIG_BLOCK, ()) == before[2]
            with pytest.raises(ZeroDivisionError), joined():
                1 / 0
    finally:
        os.sched_setaffinity(0, affinity)
    assert state() == before
    until = time.monotonic() + 5
    while threading.active_count() > threads and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() == threads


def test_another_signal_is_not_its_own(monkeypatch):
    left = []
    monkeypatch.setattr(stop, "leave", lambda *said: left.append(said))
    heard = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with stop.stops("the end"):
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.1)
            assert left == []
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            assert set(left) == {("the end", 1)}
    finally:
        signal.signal(signal.SIGUSR1, heard)
