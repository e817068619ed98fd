"""Any set of units on any device: no convexity asked."""
