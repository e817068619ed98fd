"""Write the graphs and modules of parts; no other package builds graphs."""
