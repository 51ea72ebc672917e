"""One turn: what the device does next, all deadlines and retries, and the shell around it."""
