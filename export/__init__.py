"""From a trained drafter to a quantized, checked bundle that the device runs."""
