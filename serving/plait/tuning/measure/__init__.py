"""What the tuner measures: clones and the live service, loads, cost, usage, quality."""
