"""Stages on paper: what they cost, who runs what when, and a step of a schedule simulated in time and bytes."""
