"""Carries out a plan and decides nothing: complete, check, cut, emit, put together again; only this room builds graphs."""
