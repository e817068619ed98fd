"""Pure algorithms over arrays: numpy and scipy in, indices out; no torch, no fx, no other package of splitkit."""
