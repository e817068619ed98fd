"""Answers why a plan is as it is: what limits it, what forces each node, what a change costs, how two plans differ."""
