"""Experiments of the device: speed by link, exactness, cuts, outages, what records are worth, many conversations."""
