"""Stop: told by SIGTERM, a process ends at once and with one line, whatever its threads are at.

A Python handler runs in the main thread between two bytecodes: never, while that sits in a C call (NCCL, a wait for the GPU). The C
half of a handler runs in whichever thread the signal hits, and writes a byte to the wakeup file; a thread of ours reads it there.
No signal is blocked, so threads that were there before are no matter and children inherit nothing. The Python handler does the same,
for a call that the signal interrupts: the main thread gets no further.
"""
from __future__ import annotations

import os
import signal
import threading
from contextlib import contextmanager

_last_words = threading.RLock()
_leaving = False
_pipe: tuple[int, int] | None = None
"""What the handler writes to, while this process can be told to stop."""


def leave(line: str, code: int) -> None:
    """Writes the process' last line to stderr and ends it: nothing is cleaned up, no collective of the others' is waited for, no other thread adds a line."""
    global _leaving
    _last_words.acquire()
    if not _leaving:  # else a handler interrupts this very thread: back to its last words
        _leaving = True
        os.write(2, f"{line}\n".encode())
        os._exit(code)


@contextmanager
def stops(line: str):
    """Inside, SIGTERM ends the process with this line and exit code 1. For the main thread; what was there before is there again after it."""
    global _pipe
    before = _pipe
    _pipe = reader, writer = os.pipe()
    os.set_blocking(writer, False)
    handler = signal.signal(signal.SIGTERM, lambda *_: leave(line, 1))
    signal.siginterrupt(signal.SIGTERM, False)  # calls go on where they can
    wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_watch, args=(reader, line), name="stop", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if handler is None else handler)
        os.close(writer)
        _pipe = before


def _watch(reader: int, line: str) -> None:
    """Reads the numbers of signals until the writing end is closed."""
    while byte := os.read(reader, 1):
        if byte[0] == signal.SIGTERM:
            leave(line, 1)
    os.close(reader)


def _in_child() -> None:
    """A forked child has no such thread, and must not write to its parent's."""
    global _pipe
    if _pipe:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        for end in _pipe:
            os.close(end)
        _pipe = None


os.register_at_fork(after_in_child=_in_child)
