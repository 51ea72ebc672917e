"""Experiments with the device: speed by link, exactness, cuts, outages, the value of records, many
conversations."""
