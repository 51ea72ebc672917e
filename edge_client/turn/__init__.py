"""One turn: what the device does next, every deadline and retry, and the shell around it."""
