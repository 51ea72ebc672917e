"""The drafter as an ONNX graph, its caches, and drafts made with it: on the device, and beside a
target on a CPU."""
