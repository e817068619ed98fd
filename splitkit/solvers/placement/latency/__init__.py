"""The objective latency: one sample as soon as possible, by lists, moves and a bound."""
