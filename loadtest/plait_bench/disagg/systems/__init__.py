"""What is compared: our servers and processes, and the peers."""
