"""Checkpoints: a training that was cut goes on as if it had not been, on as many ranks or on others, and none is ever half there."""
from __future__ import annotations

import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed.checkpoint as dcp

from engine.checkpoint import Checkpoints
from engine.resume import steps
from engine.states import States
from engine.train import Trainer
from sim.errors import UserError
from tests.engine.cases import running, schedule, text, tiny

MODEL, SEQ, CHUNK = tiny(4, 2, 16, layers=2), 60, 12


def train(rank: int, group, folder: Path, zero: int, until: int, save: tuple[int, ...] = (), resume: bool = False, fail_in: str = "", seq: int = SEQ, model=MODEL):
    """[(loss, gradient norm)] of the steps up to `until`, saving after those of `save`. fail_in: the DCP writer's method in which the last save breaks."""
    with running(schedule(model, seq, CHUNK, group.size() if group else 1), rank, group) as program:
        trainer = Trainer(program, lr=1e-2, zero=zero, clip=0.5)
        checkpoints = Checkpoints(folder, trainer.states, program.schedule)
        found = []
        for step in range(checkpoints.start(resume), until):
            found.append(trainer.step(text(model, seq, seed=step)[0]))
            if step + 1 in save:
                if fail_in and step + 1 == save[-1]:
                    with patch.object(dcp.FileSystemWriter, fail_in, side_effect=OSError("cut")), pytest.raises(BaseException):  # DCP wraps it in one of those
                        checkpoints.save(step + 1)
                    break
                checkpoints.save(step + 1)
        return found


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 0), (2, 3)))
def test_resumes_bit_for_bit_after_any_step(ranks, P, zero, tmp_path):
    whole = ranks(P).run(train, tmp_path, zero, 4)[0]
    for cut in (1, 2, 3):
        folder = tmp_path / str(cut)
        assert ranks(P).run(train, folder, zero, cut, tuple(range(1, cut + 1)))[0] == whole[:cut]
        assert steps(folder) == list(range(max(1, cut - 1), cut + 1))  # the last two are kept
        for rest in ranks(P).run(train, folder, zero, 4, (), True):
            assert rest == whole[cut:]


@pytest.mark.parametrize("method", ("write_data", "finish"))
def test_a_save_that_is_cut_leaves_the_one_before(method, tmp_path):
    whole = train(0, None, tmp_path / "none", 0, 4)
    train(0, None, tmp_path, 0, 3, (1, 3), fail_in=method)
    assert steps(tmp_path) == [1] and (tmp_path / "step-3.part").exists()
    assert train(0, None, tmp_path, 0, 4, (2, 4), True) == whole[1:]
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step-2", "step-4"]


@pytest.mark.parametrize("before, after", (((1, 0), (2, 3)), ((2, 3), (1, 0)), ((2, 0), (2, 3)), ((2, 3), (2, 0))))
def test_resumes_on_other_ranks_and_at_another_stage(ranks, before, after, tmp_path):
    whole = ranks(before[0]).run(train, tmp_path / "none", before[1], 4)[0]
    ranks(before[0]).run(train, tmp_path, before[1], 2, (2,))
    rest = ranks(after[0]).run(train, tmp_path, after[1], 4, (), True)[0]
    for mine, reference in zip(rest, whole[2:], strict=True):
        assert mine.loss == pytest.approx(reference.loss, rel=1e-5)
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=1e-4)


def test_what_cannot_be_resumed_says_so(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        train(0, None, tmp_path, 0, 1, (), True)
    train(0, None, tmp_path, 0, 1, (1,))
    with pytest.raises(UserError, match="holds a checkpoint of step 1 already"):
        train(0, None, tmp_path, 0, 2)
    with pytest.raises(UserError, match="S=60, not 48"):
        train(0, None, tmp_path, 0, 2, (), True, seq=48)
    with pytest.raises(UserError, match="layers=2, not 3"):
        train(0, None, tmp_path, 0, 2, (), True, model=tiny(4, 2, 16, layers=3))


@pytest.mark.parametrize("broken", (".metadata", "__0_0.distcp", "of.json"))
@pytest.mark.parametrize("how", ("cut", "gone"))
def test_a_damaged_checkpoint_is_named_and_the_one_before_resumes(tmp_path, broken, how):
    whole = train(0, None, tmp_path / "a", 0, 3, (1, 2))
    train(0, None, tmp_path, 0, 2, (1, 2))
    file = tmp_path / "step-2" / broken
    data = file.read_bytes()
    file.unlink()
    if how == "cut":
        file.write_bytes(data[:len(data) // 2])
    with pytest.raises(UserError, match=r"step-2 is damaged \(.*\); remove it to resume from the checkpoint before it"):
        train(0, None, tmp_path, 0, 3, (), True)
    shutil.rmtree(tmp_path / "step-2")
    assert train(0, None, tmp_path, 0, 3, (), True) == whole[1:]


def on_gpus(rank: int, group, folder: Path, until: int, gpus: bool, resume: bool, seed: int) -> dict:
    """Trains to a step and saves, as if on GPUs (or not); the random state of this rank's GPU after it."""
    made = {"state": torch.full((16,), seed + rank, dtype=torch.uint8), "asked": set()}

    def get(device):
        made["asked"].add(device)
        return made["state"]

    def set_(state, device):
        made["asked"].add(device)
        made["state"] = state.clone()

    class Devices:
        def __get__(self, states, owner):
            return torch.device("cuda", 3) if gpus else torch.device("cpu")

        def __set__(self, states, device):
            pass

    with patch.object(torch.cuda, "get_rng_state", get), patch.object(torch.cuda, "set_rng_state", set_), patch.object(States, "device", Devices(), create=True):
        train(rank, group, folder, 0, until, (until,), resume)
    return {"state": made["state"].tolist(), "asked": {str(device) for device in made["asked"]}}


@pytest.mark.parametrize("before, after", ((1, 1), (2, 2), (1, 2), (2, 1)))
def test_each_ranks_gpu_goes_on_with_its_own_random_state(ranks, before, after, tmp_path):
    ranks(before).run(on_gpus, tmp_path, 1, True, False, 10)
    for rank, found in enumerate(ranks(after).run(on_gpus, tmp_path, 2, True, True, 50)):
        assert found == {"state": [10 + rank if rank < before else 50 + rank] * 16, "asked": {"cuda:3"}}


@pytest.mark.parametrize("before, after", ((True, False), (False, True)))
def test_a_checkpoint_goes_from_a_gpu_to_a_cpu_and_back(before, after, tmp_path):
    on_gpus(0, None, tmp_path, 1, before, False, 10)
    assert on_gpus(0, None, tmp_path, 2, after, True, 50) == {"state": [50] * 16, "asked": {"cuda:3"} if after else set()}
