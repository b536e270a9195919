"""One thin Ray Serve class per deployment."""
