"""Maintenance of this repository; never shipped."""
