"""Sequences operations on machines for the shortest makespan: a job shop in which an operation may hold two machines."""
