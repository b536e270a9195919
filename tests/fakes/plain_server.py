"""A server of the standard library alone, for tests of the load tester in bare surroundings. ``python plain_server.py``
prints its URL and answers until it is killed.

/v1/images/generations answers like the image API; /slow after 60 ms; /fail with 500; /answered with the number of
answers so far; anything else with ``ok``.
"""

from __future__ import annotations

import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Plain(BaseHTTPRequestHandler):
    answered = 0
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.answer()

    def answer(self):
        if self.path.startswith("/slow"):
            time.sleep(0.06)
        images = b'{"created": 1, "data": [{"b64_json": "aGVsbG8="}], "timings": {"total": 0.004}}'
        body = images if self.path.startswith("/v1/images") else b"ok"
        if self.path == "/answered":
            body = str(Plain.answered).encode()
        else:
            Plain.answered += 1
        self.send_response(500 if self.path.startswith("/fail") else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        """Nothing: stdout holds the URL."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Plain)
    server.daemon_threads = True
    print(f"http://127.0.0.1:{server.server_port}", flush=True)
    server.serve_forever()
