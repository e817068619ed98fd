"""Writes plans as other tools read them (Megatron, torchtitan, vLLM ...), reads theirs, and prices the rounding."""
