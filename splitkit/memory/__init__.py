"""Which bytes are alive when: simulated for a graph or a pair of graphs, for segments of an order, and measured.

=====================================================  ==============================================================
question                                               answered by
=====================================================  ==============================================================
peak of a graph, a split, or forward and backward      `profile.simulate_memory`: follows the nodes (`simulation`)
peaks of thousands of plans of a joint graph           `splitkit.training.peaks`: the same simulation over arrays
what eager autograd saves for each forward node        `saved_storages.activations`: a run on fake tensors
what a pipeline stage holds, for any segment           `segment.OrderMemory`, made by `graph_memory`
bytes of each rank in a step of a schedule             `splitkit.pipeline.memory`: stages as numbers
what was alive in a real run                           `measurement.measure_memory`: watches ops (`storage_watch`)
=====================================================  ==============================================================

They agree to the byte where they answer the same question; tests hold them to it.
"""
