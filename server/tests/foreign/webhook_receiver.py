"""Receives webhooks: fails twice, checks every signature, and ends after the last event awaited.

Arguments: the secret, the events to wait for, and, for https, certificate and key.
Prints its port first and then a line per message.
"""

import hashlib
import hmac
import json
import ssl
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

secret, awaited, *tls = sys.argv[1:]
awaited = set(awaited.split(","))
failures = 2
deliveries = {}


class Receiver(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        global failures
        body = self.rfile.read(int(self.headers["content-length"]))
        stamp = self.headers["x-dormouse-timestamp"]
        expected = hmac.new(secret.encode(), f"{stamp}.".encode() + body, hashlib.sha256)
        signature = self.headers["x-dormouse-signature"]
        assert hmac.compare_digest(signature, f"sha256={expected.hexdigest()}"), signature
        assert abs(time.time() - int(stamp)) < 300, stamp
        event = json.loads(body)
        assert event["specversion"] == "1.0" and event["source"] == "dormouse/mouse-7", event
        assert self.headers["x-dormouse-delivery"] == event["id"]
        assert self.headers["content-type"] == "application/cloudevents+json"
        before = deliveries.setdefault(event["id"], body)
        assert before == body, "a retry brought another message"
        status = 204
        if failures > 0:
            failures -= 1
            status = 503
        else:
            awaited.discard(event["type"])
        self.send_response(status)
        self.send_header("content-length", "0")
        self.end_headers()
        print("event", status, event["type"], json.dumps(event["data"]), flush=True)

    def log_message(self, *_):
        pass


class Server(HTTPServer):
    # Nothing for this long: what is awaited will not come.
    timeout = 120

    def handle_timeout(self):
        sys.exit(f"never came: {awaited}")


server = Server(("127.0.0.1", 0), Receiver)
if tls:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*tls)
    server.socket = context.wrap_socket(server.socket, server_side=True)
print("port", server.server_port, flush=True)
while awaited:
    server.handle_request()
