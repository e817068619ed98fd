"""Measure costs op by op: the graph runs on real inputs, and each new op is timed in place.

Nodes that call one op with the same shapes, strides, dtypes and other arguments in the same modes form a group; only
its first node is measured. The arguments are those of a real run, so that indices, labels and masks are valid.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import fx

from splitkit.checks import LONGEST, is_number, shown
from splitkit.costs.formulas.flop_count import flops
from splitkit.costs.timing.cache import CostCache, default_path, environment
from splitkit.costs.timing.call_timing import progress
from splitkit.costs.timing.measuring_run import Measured, MeasuringRun, random_devices
from splitkit.costs.timing.op_timing import time_in_place
from splitkit.costs.timing.run_inputs import Private, measuring_device
from splitkit.costs.timing.step_prices import MeasuredSteps, measured_steps, require_steps
from splitkit.errors import CostError
from splitkit.graph.dataflow import Dataflow, facts_of


def measured(
    gm: fx.GraphModule | Dataflow,
    inputs: Any,
    device: torch.device | str = "cpu",
    *,
    cache: str | os.PathLike[str] | bool | None = True,
    min_run_time: float = 0.02,
    backward: bool = False,
) -> Measured | MeasuredSteps:
    """Return costs by real times on a CPU or a CUDA device.

    **Forward.** The graph runs once without autograd, and the first node of each group is timed on its real arguments.
    After a warm-up the median counts, measured with ``torch.utils.benchmark`` and the current number of threads, or
    with CUDA events (the least median of several batches). An op that writes its arguments gets new copies each time.

    On a CPU the graph then runs a few more times from the same state, and each op is timed in place. These times
    include dispatch (also of views), newly allocated memory and arguments that are no longer in the caches. For each
    group, the run with the least mean counts, since other work on the machine only adds time. Thus the prices of the
    nodes of a part add up to the time of the part. A graph with an op that has effects outside the graph runs only
    once, and keeps the times of single ops.

    Parameters, buffers, inputs and random state are not changed. On a CPU nothing is copied but the inputs and the
    buffers that the graph writes. The memory needed is that of a run that frees each value after its last use, plus the
    results and copied arguments of one op. On a GPU, torch's peak-memory statistics are reset.

    **Not included.** On a GPU, or if the graph may run only once, a view costs 0 (any op that returns the memory of an
    argument and writes nothing), and arguments lie in the caches, while a real run may find them cold. Without
    ``backward``, the costs of autograd and of an op's backward are missing. An op that is unknown, or has effects
    outside the graph, runs once, as in the graph; declare it with `splitkit.extend.declare` to have it measured.
    Data-dependent shapes and branches are those of ``inputs``.

    **Backward.** With ``backward``, steps of forward and backward run in addition, and prices include both. They start
    from the outputs that are losses (a single number that requires grad), or from all outputs that require grad if none
    is. The time of forward includes autograd's work, the time of backward an op's gradients and their summation. If no
    step writes what the next one reads, a step reuses the memory of the step before. No parameter gets a gradient; the
    memory needed is what such a step takes. Without ``backward``, `splitkit.costs.training` estimates it op by op.

    **Busy machines.** Other work on the machine makes times too long. Therefore only runs count that, as the operating
    system reports, waited for a CPU for at most 5 % of their time, and runs are repeated until there is one. If there
    is none, the prices have ``busy`` set, ``note`` says so, and they are not cached. If torch uses one thread, such
    prices are still nearly right, since the time of other processes is left out; with several threads, they are the
    least times of all runs.

    **Cache.** Times are kept in a file by op, shapes, dtypes, modes, device, torch version and threads; a call that
    finds all times there measures nothing. Ctrl-C keeps the times measured so far. A damaged file is ignored with a
    warning and rewritten. Times of functions without a global name (lambdas, local functions, functions of a script)
    are not kept.

    Args:
        gm: a graph with ``meta["val"]``, or facts about it.
        inputs: a tuple of positional inputs, a dict of keyword inputs, or one tensor.
        device: where to measure. Parameters and inputs on other devices are copied there, and devices in the graph
            are replaced.
        cache: the file; ``True`` for ``$XDG_CACHE_HOME/splitkit/costs.json``, ``False`` for none.
        min_run_time: seconds for each group, alone and again in place; a group that takes longer runs a few times.
        backward: whether to measure backward too; only on a CPU and if the graph may run more than once.

    Raises:
        GraphError: SK101, SK103 or SK104 as `splitkit.analyze`; SK102 if nodes have no ``meta["val"]``.
        CostError: SK321 if the device does not exist; SK324 if the graph does not run on these inputs, or cannot be
            measured in the requested way.
        FileError: SK504 if the cache exists and cannot be read.
    """
    flow = facts_of(gm)
    if not isinstance(backward, bool):
        raise CostError("SK324", f"backward is {shown(backward)}", "Give True or False.")
    counter, where = flops(flow), measuring_device(device)
    if not is_number(min_run_time) or not 0 < float(min_run_time) <= LONGEST:
        raise CostError("SK324", f"min_run_time is {shown(min_run_time)} seconds", "Give a number above 0.")
    if not isinstance(cache, str | os.PathLike | bool | None):
        raise CostError("SK324", f"cache is {shown(cache)}", "Name a file, or give True or False.")
    path = default_path() if cache is True else Path(cache).expanduser() if cache else None
    if backward:
        require_steps(flow, where)
    kept = CostCache(path, environment(where))
    private = Private(flow, where)
    values = private.inputs(inputs)
    with progress(len(flow.index)) as advance, torch.random.fork_rng(random_devices(where)), torch.no_grad():
        rng_state = torch.random.get_rng_state()
        run = MeasuringRun(flow, private, kept, min_run_time, advance)
        with run.safely():
            run.run(*values, enable_io_processing=False)
        del private, values
        if run.keys and not run.acts_outside and where.type == "cpu":
            time_in_place(run, inputs, rng_state)
        found = Measured(flow.root, where, run.found, counter)
        return measured_steps(run, found, inputs, rng_state) if backward else found
