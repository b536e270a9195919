"""What the published models consist of, as data: architectures, configurations, vocabulary."""
