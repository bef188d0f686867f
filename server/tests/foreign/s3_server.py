"""An S3-compatible server that says its port and serves until its input ends."""

import sys

from moto.server import ThreadedMotoServer

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
print(f"port {port}", flush=True)
sys.stdin.read()
server.stop()
