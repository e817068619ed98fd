from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from opcalls import by_hand
from opwatch import Functions, Watch, watched


def samples_of_every_op(each: int = 2) -> Iterator[Callable[[], Any]]:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds: not for every process

    for info in op_db:
        dtype = torch.float32 if torch.float32 in info.dtypes else min(info.dtypes, key=str, default=None)
        if dtype is None:
            continue
        torch.default_generator.manual_seed(0)
        # info.sample_inputs would seed every device and crawl the stack for each sample: two thirds of the time
        samples = list(itertools.islice(info.sample_inputs_func(info, "cpu", dtype, requires_grad=False), each))
        for s in samples:
            yield functools.partial(info.op, s.input, *s.args, **s.kwargs)
        if samples and info.inplace_variant:
            yield functools.partial(info.inplace_variant, samples[0].input, *samples[0].args, **samples[0].kwargs)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("calls", "least"),
    [
        (samples_of_every_op, 700),
        pytest.param(functools.partial(samples_of_every_op, 8), 700, marks=pytest.mark.campaign),
        (by_hand, 150),
    ],
)
def test_nothing_happens_that_was_not_foretold(calls: Callable[[], Iterator[Callable[[], Any]]], least: int) -> None:
    watch = Watch()
    for function in calls():
        if calls is by_hand:
            watch.checked.clear()  # each of these calls is a case of its own
        watched(watch, function)
        if calls is by_hand:  # and once without the dispatch modes, whose tensors some functions treat apart
            watch.checked.clear()
            with suppress(Exception), Functions(watch):
                function()
    assert not watch.faults, "\n".join(f"{k}: {v}" for k, v in sorted(watch.faults.items()))
    assert len(watch.targets) > least
