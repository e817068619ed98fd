"""Carries out a plan and decides nothing: complete, check, cut, emit, join again; only this room builds graphs."""
