"""Bundles on this device: where they are stored, how they are downloaded, and which one is used."""
