"""World: what torchrun sets is read; anything else is one line."""
from __future__ import annotations

import pytest

from engine.world import NAMES, World, world
from sim.errors import UserError


def at(monkeypatch, **said: str) -> World:
    for name in (*NAMES, "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    return world()


def test_a_rank_knows_its_place(monkeypatch):
    assert at(monkeypatch) == World(0, 1, 0, 1)
    assert at(monkeypatch, WORLD_SIZE="4") == World(0, 1, 0, 1)
    assert at(monkeypatch, RANK="0", WORLD_SIZE="1") == World(0, 1, 0, 1)
    assert at(monkeypatch, RANK="5", WORLD_SIZE="8", LOCAL_RANK="1", LOCAL_WORLD_SIZE="4", MASTER_ADDR="here", MASTER_PORT="1") == World(5, 8, 1, 4)


@pytest.mark.parametrize("said, shown", (
    ({"RANK": "0"}, "RANK=0 WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ({"RANK": "two", "WORLD_SIZE": "4"}, "RANK=two WORLD_SIZE=4 LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 WORLD_SIZE=4 LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 WORLD_SIZE=4 LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ({"RANK": "0", "WORLD_SIZE": ""}, "RANK=0 WORLD_SIZE= LOCAL_RANK= LOCAL_WORLD_SIZE="),
    ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, "RANK=0 WORLD_SIZE=2 LOCAL_RANK=1 LOCAL_WORLD_SIZE="),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here"}, "MASTER_ADDR=here MASTER_PORT="),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "a"}, "MASTER_ADDR=here MASTER_PORT=a"),
    ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "here", "MASTER_PORT": "99999"}, "MASTER_ADDR=here MASTER_PORT=99999"),
    ({"RANK": "0", "WORLD_SIZE": "9" * 20}, f"RANK=0 WORLD_SIZE={'9' * 20} LOCAL_RANK= LOCAL_WORLD_SIZE="),
))
def test_what_makes_no_sense_is_one_line(said, shown, monkeypatch):
    with pytest.raises(UserError) as caught:
        at(monkeypatch, **said)
    assert str(caught.value) == f"the environment says {shown}, which is no rank's; start with torchrun, which sets them all, or unset RANK"
