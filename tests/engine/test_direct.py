"""Direct: a compiled kernel is called without what found it, where that is the same; else all is called as it was."""
from __future__ import annotations

import time
from contextlib import suppress
from threading import Barrier, BrokenBarrierError, Thread

import pytest
import torch

from engine.kernels import flash_attn_4
from engine.kernels.direct import bound
from tests.engine.fakes import installed


def package(kernels: int = 1, then: tuple = (3.0,), copies: bool = False, fails: bool = False):
    """(function, what it was called with): to = 3 x, by so many kernels from its cache."""
    asked = []

    def function(x, to):
        asked.append(x)
        if fails:
            raise ValueError("no")
        for key in range(kernels):
            if key not in function.compile_cache:
                function.compile_cache[key] = lambda x, to, factor, *rest: to.copy_(factor * x)
            function.compile_cache[key](x.clone() if copies else x.detach(), to, *then)

    function.compile_cache = {}
    return function, asked


def twice(function, call=None):
    """What the second of two calls by bound gave."""
    found = bound(function, call or function, (torch.ones(4), torch.zeros(4)))
    x, to = torch.arange(4.0), torch.zeros(4)
    found(x, to)
    return to.tolist()


def test_one_kernel_is_called_directly():
    function, asked = package()
    assert twice(function) == [0.0, 3.0, 6.0, 9.0] and len(asked) == 1
    assert type(function.compile_cache) is dict and list(function.compile_cache) == [0]


@pytest.mark.parametrize("how", ({"kernels": 2}, {"then": (3.0, torch.ones(1))}, {"copies": True}, {"kernels": 0}))
def test_else_the_function_is(how):
    function, asked = package(**how)
    assert twice(function) == ([0.0] * 4 if how == {"kernels": 0} else [0.0, 3.0, 6.0, 9.0]) and len(asked) == 2


def test_a_function_without_a_cache_is_called_as_it_is():
    calls = []
    assert twice(lambda x, to: None, lambda x, to: (calls.append(x), to.copy_(2 * x))) == [0.0, 2.0, 4.0, 6.0] and len(calls) == 2


def test_the_cache_is_put_back_when_the_function_fails():
    function, _ = package(fails=True)
    cache = function.compile_cache
    with pytest.raises(ValueError):
        bound(function, function, (torch.ones(1), torch.zeros(1)))
    assert function.compile_cache is cache


def test_two_threads_that_call_first_leave_the_cache_as_it_was():
    function, asked = package()
    cache, both, entered = function.compile_cache, Barrier(2), []

    def slow(x, to):
        entered.append(1)
        last = len(entered) == 2
        with suppress(BrokenBarrierError):
            both.wait(0.2)
        time.sleep(0.1 * last)
        function(x, to)

    threads = [Thread(target=bound, args=(function, slow, (torch.ones(4), torch.zeros(4)))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert function.compile_cache is cache and len(asked) == 2


def test_flash_attn_4_asks_the_package_once_for_each_form(monkeypatch):
    asked, right = [], flash_attn_4._package
    monkeypatch.setattr(flash_attn_4, "_launches", {})
    monkeypatch.setattr(flash_attn_4, "_package", lambda causal, *operands: (asked.append(causal), right(causal, *operands)))
    with installed("flash_attn_4"):
        for S, causal in ((8, True), (8, True), (4, False), (8, False), (4, False), (8, True)):
            q, kv = torch.randn(S, 4, 16), torch.randn(8, 2, 2, 16)
            out, lse = flash_attn_4.forward(q, kv, causal)
            want = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(0, 1) for t in (q, kv[:, 0], kv[:, 1])), is_causal=causal, enable_gqa=True)
            assert torch.allclose(out, want.transpose(0, 1), atol=1e-5)
    assert asked == [True, False, False]
