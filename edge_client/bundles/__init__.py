"""Bundles on this device: where they lie, how they get here, and which one is used."""
