"""What ``plait demo`` shows."""
