"""How messages travel: in process, shared memory, TCP; handshake, framing, credit."""
