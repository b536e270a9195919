"""Where messages lie: pools of leases, shared-memory segments, rings."""
