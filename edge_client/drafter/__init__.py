"""The drafter on the device: the ONNX graph, its caches, and drafts made with it."""
