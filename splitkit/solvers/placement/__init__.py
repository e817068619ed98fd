"""Which unit of a graph goes to which device: arrays in, a plan with its value, its bound and its gap out."""
