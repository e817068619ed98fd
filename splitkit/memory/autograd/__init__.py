"""What autograd saves of a forward graph, and what its backward nodes allocate temporarily."""
