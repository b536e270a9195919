"""What every route shares: keys, hosts, limits, errors, streams, counters."""
