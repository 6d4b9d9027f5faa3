"""Files: written whole or not at all, and refused before the work where they cannot be."""
from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sim.errors import UserError


def write(path: str | Path, content: str) -> None:
    """Writes text to a file, whole or not at all; a device or pipe is written to as it is."""
    replaced(path, lambda part: part.write_text(content))


def replaced(path: str | Path, fill: Callable[[Path], object]) -> None:
    """Calls fill on a new file beside `path`, which takes its name once it is filled. Raises UserError where that cannot be done."""
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            fill(path)
            return
        part = path.with_name(f".{path.name[:100]}.{os.getpid()}.part")
        try:
            fill(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}); name a file in a folder of your own") from None


def writable(path: Path | None) -> None:
    """Raises UserError if a file cannot be written there."""
    if path is None:
        return
    try:
        if path.is_dir():
            raise UserError(f"{path} cannot be written, it is a folder; name a file")
        if not path.absolute().parent.is_dir():
            raise UserError(f"{path} cannot be written, {path.parent} is no folder; name a file in one that exists")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise UserError(f"{path} cannot be written, you have no right to; name a file in a folder of your own")
    except OSError as error:
        raise UserError(f"{str(path)[:80]} cannot be written ({error.strerror}); name another file") from None


@contextmanager
def claimed(path: Path) -> Iterator[None]:
    """A folder that one process at a time writes results to. Raises UserError while another one does; any death of that one frees it."""
    folder(path)
    try:
        lock = open(path / ".lock", "w")
    except OSError as error:
        raise UserError(f"{path / '.lock'} cannot be written ({error.strerror}); name a folder of your own") from None
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(f"{path} is being written to by another run; name another folder, or wait") from None
        yield


def folder(path: Path) -> None:
    """Makes a folder, if it is not there, that files can be written in. Raises UserError."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        if not os.access(path, os.W_OK):
            raise PermissionError(13, "you have no right to")
    except OSError as error:
        raise UserError(f"{str(path)[:80]} is no folder to write in ({error.strerror}); name a folder of your own") from None
