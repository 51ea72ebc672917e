"""Tools: doctor, comparisons, audits, start-up times, an emulated network."""
