"""One request on one connection, many connections on one loop: HTTP/1.1 over uvloop, written for little CPU.

``framing`` and ``check`` are pure; ``http1`` is a connection, ``dial`` opens it, ``pool`` decides who gets one.
"""
