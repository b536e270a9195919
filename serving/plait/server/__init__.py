"""A server on this machine: its processes, Ray, ports and recorded state; started, supervised, stopped."""
