"""Settings and fixtures of all tests.

A folder for each package of `splitkit/`, and ``top`` for the files beside them. In addition:

- ``laws``: what holds for every policy on every model, on random graphs, and whatever a process did before.
- ``project``: imports between packages, public names, private names of torch, documentation, notebooks, wheel.
- ``remedies``: each remedy that an error names, carried out.
- ``accelerator``, ``against_torch``, ``benchmarks``, ``consumers``: splitkit on a simulated device, beside torch's own
  functions, in its benchmarks, and in the tools that take its parts.
- ``helpers``: what several tests import. ``tools``: programs to run by hand (``python tests/tools/mutation.py``).
- ``stored``: whole texts, plans and pictures, beside which `storedtexts.py` puts what the library makes today.
"""

from __future__ import annotations

import gc
import os

import pytest
from tiers import Tier

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each process that a test starts compiles the package anew
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else processes that import torch start for few kernels
gc.disable()  # until all is imported, which takes a third less time so


SELDOM = 200_000
"""New objects before the collector looks at them; Python's 700 takes a tenth of the suite, 30,000 a twentieth."""


def pytest_addoption(parser):
    parser.addoption("--times", metavar="FILE", help="write what each test took, for tests/tools/slowtests.py")


def pytest_configure(config):
    config.pluginmanager.register(Tier(config))


def pytest_collection_finish():
    """What was imported lives to the end: the collector need not look at it again and again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(SELDOM, *gc.get_threshold()[1:])
    gc.enable()


def pytest_unconfigure():
    """Pytest collects five times at its end, and Python once more: a process that ends has nothing to tidy up."""
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _no_stacks_of_seeds():
    """`torch.manual_seed` writes the whole stack down for each device that is not there, which takes longer than many a
    test, whoever calls it.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        for device in (torch.cuda, torch.xpu, torch.mtia):
            if not device.is_available():
                patch.setattr(device, "manual_seed_all", lambda seed: None)
        yield


@pytest.fixture(autouse=True)
def _one_seed_one_thread():
    import torch  # not above: the process that only hands out tests to others needs none

    torch.manual_seed(0)
    torch.set_num_threads(1)
    yield
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(False)  # which imports Inductor: 7 s of a process that needs none
    _leave_autocast(torch)


def _leave_autocast(torch):
    """Graphs that torch cuts wrongly leave autocast on; regions that interleave leave its count of open ones too high,
    and then casts of weights are never dropped.
    """
    torch.set_autocast_enabled("cpu", False)
    torch.autocast_increment_nesting()
    while torch.autocast_decrement_nesting() > 0:
        pass
    torch.clear_autocast_cache()


@pytest.fixture
def chain():
    """x -> add -> mul -> sub -> out"""
    from torch import fx, nn

    class Chain(nn.Module):
        def forward(self, x):
            return (x + 1) * 2 - 3

    return fx.symbolic_trace(Chain())


@pytest.fixture
def nodes():
    """name -> node of a graph"""
    return lambda gm: {n.name: n for n in gm.graph.nodes}
