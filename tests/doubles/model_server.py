"""A server of /v1/completions without a model: `python model_server.py PORT`. A token is a word."""

from __future__ import annotations

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers with as many words as it is asked for, each in a chunk of its own."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """`/health` and `/metrics`."""
        self._reply([b'# TYPE preempted counter\npreempted{engine="0"} 3.0\npreempted_created 7.0\n'])

    def do_POST(self) -> None:
        """A completion, as a stream."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = asked["max_tokens"]
        events = [{"choices": [{"text": " word", "finish_reason": None}]} for _ in range(tokens)]
        usage = {"prompt_tokens": asked["prompt"].count(" "), "completion_tokens": tokens}
        events.append({"choices": [{"text": "", "finish_reason": "length"}], "usage": usage})
        self._reply([b"data: %s\n\n" % json.dumps(event).encode() for event in events])

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def _reply(self, chunks: list[bytes]) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for chunk in [*chunks, b""]:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(chunk), chunk))


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
