"""Side-by-side benchmarks: ours and peers in the same process set-up, in turn, on the same requests."""
