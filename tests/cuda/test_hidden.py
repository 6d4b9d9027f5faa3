"""Hidden states on the host: the bits of hidden states in HBM, repeated, with slow copies too, and blocks that overlap."""
from __future__ import annotations

from engine.model import LanguageModel
from tests.cuda.places import CHUNK, FLASH, MODEL, SEQ, deterministic, one_and_two_ranks
from tests.cuda.test_bits import pause
from tests.engine.cases import Place, digest, running, schedule, shard, text
from tests.engine.hooks import late_copies


def passes(rank: int, group, place: Place, hidden: str, order: str, times: int = 1, late_ms: float = 0) -> list[dict[str, str]]:
    """Digests of the loss and of each gradient but the embedding's, which sums in fp32 from the host, in each pass through one program."""
    s = schedule(MODEL, SEQ, CHUNK, group.size() if group else 1, "bf16", hidden=hidden, order=order)
    with deterministic(), running(s, rank, group, place) as program:
        lm, found = LanguageModel(program).to(program.backend.device), []
        tokens, labels, valid = shard(s, rank, *text(MODEL, SEQ))
        tokens, labels = tokens.to(program.backend.device), labels.to(program.chain.label_device)
        if late_ms:
            late_copies(program, lambda: pause(late_ms))
        for _ in range(times):
            loss = lm(tokens, labels, valid)
            loss.backward()
            program.backend.settle()
            found.append({"loss": digest(loss)} | {name: digest(p.grad) for name, p in lm.named_parameters() if name != "embedding"})
            lm.zero_grad()
        return found


@one_and_two_ranks
def test_bits_are_those_of_hidden_states_in_hbm(ranks, P):
    for order in ("query-up", "query-down", "kv-outer"):
        near, far = (ranks(P).run(passes, FLASH, hidden, order, times) for hidden, times in (("hbm", 1), ("host", 5)))
        for one, five in zip(near, far):
            assert five == one * 5, order


def test_slow_copies_change_no_bit(ranks):
    right, late = (ranks(1).run(passes, FLASH, "host", "query-up", 2, ms) for ms in (0, 20))
    assert late == right
