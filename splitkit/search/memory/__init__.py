"""The search for the fewest parts that fit the memory of their devices."""
