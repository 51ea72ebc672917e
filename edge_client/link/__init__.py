"""The connection to the verifier: when to dial, what a failure means, flow control, and a verifier on this machine."""
