"""A server on this machine: its processes, Ray, ports, recorded state; started, supervised, stopped."""
