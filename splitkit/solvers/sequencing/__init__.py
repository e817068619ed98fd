"""Sequences operations on machines for the shortest makespan: a job shop whose operations may hold several machines."""
