"""Side-by-side benchmarks: plait and its peers in the same process setup, in turn, on the same requests."""
