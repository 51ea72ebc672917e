"""The connection to the verifier: when to connect, classes of failure, flow control, and a verifier
on this machine."""
