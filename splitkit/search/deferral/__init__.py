"""Which nodes of a backward compute the gradients that leave a stage, and which may wait: exact, by minimum cuts."""
