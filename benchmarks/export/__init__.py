"""Experiments of the exported bundle: step times of its forms, and every variant on the runtime that it is for."""
