"""The memory of any segment of an order of nodes, answered in time linear in the segment."""
