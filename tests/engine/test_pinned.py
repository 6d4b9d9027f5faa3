"""Pinned memory against a driver that is made up: all of it touched and registered once, or nothing kept and one line said."""
from __future__ import annotations

import mmap
import re
import resource
import weakref
from types import SimpleNamespace

import pytest
import torch

from engine import ranks, serve
from engine.backend import pinned
from engine.backend.pinned import Pinned
from experiments.bars import pinning, progress
from sim.errors import UserError


@pytest.fixture
def driver(monkeypatch):
    """What is registered (address -> bytes), the code it answers with, and the maps that were made."""
    made = SimpleNamespace(registered={}, code=0, maps=[])

    class Map(mmap.mmap):
        def __new__(cls, *args):
            pages = super().__new__(cls, *args)
            made.maps.append(weakref.ref(pages))
            return pages

    def register(address, size, flags):
        if not made.code:
            made.registered[address] = size
        return made.code

    cudart = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: made.registered.pop(address) and 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(pinned.mmap, "mmap", Map)
    monkeypatch.setattr(pinned, "PIECE_BYTES", 4096)
    return made


def test_it_is_touched_registered_and_given_back(driver):
    said = []
    memory = Pinned(10_000, lambda *tick: said.append(tick))
    assert said == [(4096, 10_000), (8192, 10_000), (10_000, 10_000)]
    assert driver.registered == {memory.tensor.data_ptr(): 10_000} and memory.tensor.data_ptr() % 4096 == 0
    memory.tensor.fill_(7)
    memory.free()
    assert driver.registered == {} and memory.tensor is None and driver.maps[0]() is None
    memory.free()


def test_pages_that_are_still_looked_at_go_with_the_last_look(driver):
    memory = Pinned(10_000)
    view = memory.tensor[100:200]
    memory.free()
    assert driver.registered == {} and driver.maps[0]() is not None and view.sum() == 0
    del view
    assert driver.maps[0]() is None


@pytest.mark.parametrize("limit, more", ((resource.RLIM_INFINITY, ""), (65536, " and 64.00 KiB may be locked")))
def test_a_driver_that_refuses_leaves_nothing_and_says_what_there_is(driver, limit, more, monkeypatch):
    driver.code = 2
    monkeypatch.setattr(resource, "getrlimit", lambda which: (limit, limit))
    with pytest.raises(UserError) as caught:
        Pinned(10_000)
    end = "; take fewer tokens (--seq), or fewer ranks of this node" + ", or raise ulimit -l" * bool(more)
    assert re.fullmatch(r"pinning 9.77 KiB of host memory failed \(2\): [\d.]+ GiB is available" + re.escape(more + end), str(caught.value))
    assert driver.registered == {} and driver.maps[0]() is None


def test_an_interrupt_while_touching_leaves_nothing(driver):
    def interrupt(done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Pinned(10_000, interrupt)
    assert driver.registered == {} and driver.maps[0]() is None


def test_more_than_there_can_be_is_one_line():
    with pytest.raises(UserError, match=r"^1073741824.00 GiB of host memory cannot be taken \(.*\): [\d.]+ GiB is available"):
        Pinned(1 << 60)


def test_progress_goes_from_rank_0_to_a_bar(capsys):
    for rank in (0, 1):
        serve.pinned(rank)(1 << 30, 5 << 29)
    printed = capsys.readouterr().out
    assert printed == f"pin {1 << 30} {5 << 29}\n"
    workers = object.__new__(ranks._Workers)
    workers._process = SimpleNamespace(stdout=[printed, "tick\n", f"pin {5 << 29} {5 << 29}\n", "done\n"])
    bar = progress()
    assert list(workers.lines(pinning(bar))) == ["tick\n", "done\n"]
    task, = bar.tasks
    assert (task.description, task.completed, task.total) == ("pin host memory (GiB)", 3, 3)
