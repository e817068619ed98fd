"""Where real kernels differ from fake tensors: aliasing, strides, and temporary allocations."""
