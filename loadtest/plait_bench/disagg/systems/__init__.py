"""The systems compared: our servers and processes, and the peers."""
