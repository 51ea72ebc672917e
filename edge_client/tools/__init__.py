"""Around an answer: doctor, comparisons, start-up times, timelines, a local verifier, an emulated network."""
