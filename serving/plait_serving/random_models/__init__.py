"""Models of published architectures with random weights: what they cost to serve can be measured without a download."""
