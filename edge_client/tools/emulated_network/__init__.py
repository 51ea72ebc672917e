"""An emulated network on loopback: for the demo, the tests and the benchmarks."""

from edge_client.tools.emulated_network.profiles import PROFILES, Condition, Profile
from edge_client.tools.emulated_network.proxy import LinkProxy

__all__ = ["PROFILES", "Condition", "LinkProxy", "Profile"]
