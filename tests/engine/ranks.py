"""Ranks: processes kept over many cases, so that a case costs no start. On CPU with gloo; on GPUs, one each, with NCCL.

    ranks = Ranks(2)
    ranks.run(function, *args)  ->  [function(0, group, *args) of rank 0, function(1, group, *args) of rank 1]

`function` is one a child can import. A rank that dies, or gives no answer in time, ends them all, each by its own handle.
"""
from __future__ import annotations

import multiprocessing
import os
import shutil
import tempfile
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

PRELOAD = ["torch.distributed", "torch._dynamo", "tests.engine.cases"]
"""Imported once, before ranks are forked; optimizers take dynamo in at their first step."""
GRACE_S = 20
"""How much longer the others may take once one rank has failed."""


@dataclass
class Outcome:
    """What a call came to on one rank: a value, or the kind and text of what went wrong."""

    value: object = None
    error: str = ""
    """Name of the exception's type, "died" or "no answer"; empty if all went well."""
    text: str = ""
    after_s: float = 0.0


class RankError(Exception):
    """A rank raised, died or gave no answer."""


class Ranks:
    """P processes in one group (one alone has none), one thread each."""

    def __init__(self, P: int, device: str = "cpu") -> None:
        context = multiprocessing.get_context("forkserver" if device == "cpu" else "spawn")  # CUDA does not survive a fork
        if device == "cpu":
            context.set_forkserver_preload(PRELOAD)
        self._folder = tempfile.mkdtemp(prefix="ranks-")
        store = f"file://{Path(self._folder) / 'store'}"
        self.alive, self.P = True, P
        self._pipes, self.processes = [], []
        for rank in range(P):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, P, store, device), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self.processes.append(process)

    def run(self, function, *args, within_s: float = 120) -> list:
        """The value of each rank. Raises RankError with the first failure's text."""
        outcomes = self.outcomes(function, *args, within_s=within_s)
        for rank, outcome in enumerate(outcomes):
            if outcome.error:
                raise RankError(f"rank {rank}: {outcome.error}: {outcome.text}")
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function, *args, within_s: float = 120) -> list[Outcome]:
        """What each rank came to. The pool is closed if one died, gave no answer or had a CUDA error, which none recovers from."""
        start = time.monotonic()
        end = start + within_s
        found: dict[int, Outcome] = {}
        for pipe in self._pipes:
            pipe.send((function, args))
        while len(found) < self.P and (rest := end - time.monotonic()) > 0:
            open_ = {pipe: rank for rank, pipe in enumerate(self._pipes) if rank not in found}
            for pipe in wait(list(open_), rest):
                try:
                    outcome = pipe.recv()
                except (EOFError, ConnectionResetError):
                    outcome = Outcome(error="died")
                outcome.after_s = time.monotonic() - start
                found[open_[pipe]] = outcome
                if outcome.error:
                    end = min(end, time.monotonic() + GRACE_S)
        result = [found.get(rank, Outcome(error="no answer", after_s=time.monotonic() - start)) for rank in range(self.P)]
        if any(outcome.error in ("died", "no answer") or "CUDA error" in outcome.text for outcome in result):
            self.close()
        return result

    def close(self) -> None:
        """Ends every rank that still runs."""
        self.alive = False
        for process in self.processes:
            process.kill()
            process.join()
        shutil.rmtree(self._folder, ignore_errors=True)


def _serve(pipe, rank: int, P: int, store: str, device: str) -> None:
    """A rank: calls what it is sent, answers with an Outcome, until the pipe closes."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if device == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # what deterministic algorithms ask for, before CUDA starts
        torch.cuda.set_device(rank)
    if P > 1:
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", init_method=store, rank=rank, world_size=P)
    group = dist.group.WORLD if P > 1 else None
    while True:
        try:
            function, args = pipe.recv()
        except EOFError:
            return
        try:
            outcome = Outcome(function(rank, group, *args))
        except BaseException as failure:  # noqa: BLE001 - handed to the test, which decides
            outcome = Outcome(error=type(failure).__name__, text=f"{failure}\n{traceback.format_exc()}")
        if device == "cuda" and not outcome.error:
            torch.cuda.empty_cache()  # ranks of other pools use this GPU too
        pipe.send(outcome)
