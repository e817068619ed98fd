"""Prices the stages of a pipeline, orders their actions by a schedule, and simulates the time and memory of a step."""
