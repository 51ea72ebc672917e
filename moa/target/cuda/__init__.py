"""The target on an accelerator: a decoder of our own kernels, replayed as graphs, and sampling
without the host."""
