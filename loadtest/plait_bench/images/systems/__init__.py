"""The systems that the image benchmark compares, inside their worker processes; `factories` opens each."""
