"""splitkit: split PyTorch graphs into parts, and prove that the parts do what the whole did."""
