"""One request per connection, many connections on one loop: HTTP/1.1 over uvloop, written for low CPU use.

`framing` and `answers` are pure; `http1` is a connection, `dial` opens it, `pool` assigns connections to requests.
"""
