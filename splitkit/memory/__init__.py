"""Which bytes are alive when: simulated for a graph or a pair, for stretches of a line of nodes, and measured.

=====================================================  ==========================================================
question                                               who answers it
=====================================================  ==========================================================
peak of a graph, of a split, of forward and backward   `profile.simulate_memory`: replays the nodes, in bytes (`run`)
peak of a joint plan, asked for thousands of plans     `splitkit.training.peaks`: the same count over arrays
what eager autograd keeps of each forward node         `autograd.activations`: runs the graph on fake tensors
what a stage of a pipeline holds, for every stretch    `stretch.Line`, from the `lines.Units` of one order of nodes
bytes of each rank in a step of a schedule             `splitkit.pipeline.memory`: stages as numbers
what was alive in reality                              `measure.measure_memory`: watches the allocations (`watch`)
=====================================================  ==========================================================

They agree to the byte where they answer the same question; tests hold them to it.
"""
