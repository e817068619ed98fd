"""What is true of one ``fx.Graph``, computed once and read by everybody; nothing here edits a graph or knows parts."""
