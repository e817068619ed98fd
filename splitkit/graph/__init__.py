"""Facts about one ``fx.Graph``, computed once for all readers. Nothing here edits a graph or knows about parts."""
