"""Policies for torch.compile: a backend, and models that train under a policy."""
