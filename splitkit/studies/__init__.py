"""Questions over many plans: the frontier of a training step, a sweep over pipelines."""
