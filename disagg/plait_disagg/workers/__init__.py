"""Workers that answer ranking requests: the two halves of a model, together or separate."""
