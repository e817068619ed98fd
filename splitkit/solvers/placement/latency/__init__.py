"""The latency objective: finish one sample as soon as possible, by list scheduling, annealing and lower bounds."""
