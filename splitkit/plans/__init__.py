"""The record between deciding and doing: the plan, its order, its rewrites, its file; no prices, no surgery."""
