"""Side-by-side benchmarks against peers; rows go to loadtest/results (append-only)."""
