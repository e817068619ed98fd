"""The search for pipeline stages: one stage per device, convex and in topological order."""
