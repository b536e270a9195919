"""Transports for messages: in-process, shared memory, TCP; handshake, framing, credit."""
