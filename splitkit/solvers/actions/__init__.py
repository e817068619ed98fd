"""Orders the actions of a pipeline step: forward, input gradient and weight gradient of each microbatch and stage."""
