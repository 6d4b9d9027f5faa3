"""Pulse: a rank that counts no more is lost to the others, soon; one that has ended well is not."""
from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
import torch.distributed as dist

from engine import worker
from engine.pulse import Pulse


@pytest.fixture
def store():
    return dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)


class Stuck:
    """Like a killed rank: no beat comes any more."""

    def add(self, key, value):
        threading.Event().wait()


def client(store) -> dist.TCPStore:
    return dist.TCPStore("localhost", store.port, is_master=False)


def test_a_rank_that_counts_no_more_is_lost_to_all_others(store):
    heard = queue.Queue()
    others = [Pulse(client(store), rank, 3, heard.put, every_s=0.02, quiet_s=0.4) for rank in (0, 2)]
    gone = Pulse(client(store), 1, 3, heard.put, every_s=0.02, quiet_s=1000)
    time.sleep(0.6)
    assert heard.empty()
    gone._store = Stuck()
    assert sorted(heard.get(timeout=5) for _ in range(2)) == [f"rank {rank} lost rank 1, which gave no sign of life for 0.4 s" for rank in (0, 2)]
    for other in others:
        other.end()


def test_a_rank_that_has_ended_is_not_missed(store):
    heard = queue.Queue()
    last, first = (Pulse(client(store), rank, 2, heard.put, every_s=0.02, quiet_s=0.2) for rank in (0, 1))
    time.sleep(0.1)
    first.end()
    time.sleep(0.6)
    last.end()
    assert heard.empty()


def test_a_store_that_is_gone_is_said():
    class Gone:
        def add(self, key, value):
            raise dist.DistNetworkError("Connection reset by peer\nmore")

    heard = queue.Queue()
    Pulse(Gone(), 1, 2, heard.put, every_s=0.01)
    assert heard.get(timeout=5) == "rank 1 lost the store that all ranks share: Connection reset by peer"


RANK = """
import ctypes, functools, os, signal
from engine import worker
from engine import worker
from engine.pulse import Pulse
worker.Pulse = functools.partial(Pulse, every_s=0.1, quiet_s=2)
with worker.joined("cpu", "fpdt: ") as (rank, group):
    print("there", flush=True)
    {}
"""


def nodes(code: str) -> list[subprocess.Popen]:
    """Two nodes of one rank each, both there, with nobody beside who would tell one that the other has ended."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    started = [subprocess.Popen([sys.executable, "-c", RANK.format(code)], env=env | {"RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for rank in range(2)]
    for process in started:
        assert process.stdout.readline() == "there\n"
    return started


@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGSTOP))
def test_a_rank_in_a_call_that_does_not_return_ends_when_another_node_is_gone(how):
    watching, gone = nodes("ctypes.CDLL(None).sleep(1000)")
    try:
        start = time.monotonic()
        gone.send_signal(how)
        errors = watching.communicate(timeout=20)[1]
        assert time.monotonic() - start < 10
        assert (watching.returncode, errors) == (1, "fpdt: rank 0 lost rank 1, which gave no sign of life for 2 s\n")
    finally:
        for process in (watching, gone):
            process.kill()
            process.wait()


def test_ranks_that_end_far_apart_end_well():
    for process in nodes("__import__('time').sleep(4 * rank)"):
        assert process.communicate(timeout=30) == ("", "") and process.returncode == 0


def test_on_gpus_nothing_but_the_pulse_watches(monkeypatch):
    """NCCL's watchdog is told to handle nothing, and counts from the issue of a collective, so its time is long; starting has its own."""
    said = {}
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, timeout: said.update(backend=backend, start=timeout.total_seconds(), handling=os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]))
    monkeypatch.setattr(dist.distributed_c10d, "_set_pg_timeout", lambda timeout: said.update(timeout=timeout.total_seconds()))
    monkeypatch.setattr(dist, "TCPStore", lambda *where, **_: said.update(store=where))
    monkeypatch.setattr(worker, "Pulse", lambda store, rank, size, lost: said.update(pulse=(rank, size)))
    with pytest.raises(KeyboardInterrupt), worker.joined("cuda"):
        raise KeyboardInterrupt
    assert said == {"backend": "cpu:gloo,cuda:nccl", "start": 300, "handling": "0", "timeout": 86400, "store": ("here", 1), "pulse": (0, 2)}
