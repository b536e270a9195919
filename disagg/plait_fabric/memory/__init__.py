"""Memory for messages: pools of leases, shared-memory segments, rings."""
