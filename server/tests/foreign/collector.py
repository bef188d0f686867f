"""An OpenTelemetry collector's endpoint, made of OpenTelemetry's own generated code.

Listens for OTLP by gRPC and over HTTP, tells its ports on the first line, and writes every span it
is sent as a line of JSON. With --refuse N it turns the first N requests away.
"""

import argparse
import json
import sys
import threading
from concurrent import futures
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2 as service
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2_grpc as stubs

parser = argparse.ArgumentParser()
parser.add_argument("--refuse", type=int, default=0)
options = parser.parse_args()
lock = threading.Lock()


def plain(value):
    kind = value.WhichOneof("value")
    return getattr(value, kind) if kind else None


def attributes(pairs):
    return {pair.key: plain(pair.value) for pair in pairs}


def refuses():
    with lock:
        options.refuse -= 1
        return options.refuse >= 0


def tell(request, way, headers):
    with lock:
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    record = {
                        "way": way,
                        "api_key": headers.get("api-key"),
                        "resource": attributes(resource.resource.attributes),
                        "scope": scope.scope.name,
                        "trace": span.trace_id.hex(),
                        "span": span.span_id.hex(),
                        "parent": span.parent_span_id.hex(),
                        "state": span.trace_state,
                        "name": span.name,
                        "kind": span.kind,
                        "start": span.start_time_unix_nano,
                        "end": span.end_time_unix_nano,
                        "attributes": attributes(span.attributes),
                        "links": [[link.trace_id.hex(), link.span_id.hex()] for link in span.links],
                        "status": span.status.code,
                        "message": span.status.message,
                    }
                    print(json.dumps(record), flush=True)


class Collector(stubs.TraceServiceServicer):
    def Export(self, request, context):
        if refuses():
            context.abort(grpc.StatusCode.UNAVAILABLE, "come back later")
        tell(request, "grpc", dict(context.invocation_metadata()))
        return service.ExportTraceServiceResponse()


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["content-length"]))
        right = self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
        status = 503 if refuses() else 200 if right else 400
        if status == 200:
            request = service.ExportTraceServiceRequest.FromString(body)
            tell(request, "http", {name.lower(): value for name, value in self.headers.items()})
        self.send_response(status)
        self.end_headers()
        if status == 200:
            self.wfile.write(service.ExportTraceServiceResponse().SerializeToString())

    def log_message(self, *_):
        pass


server = grpc.server(futures.ThreadPoolExecutor(4))
stubs.add_TraceServiceServicer_to_server(Collector(), server)
port = server.add_insecure_port("127.0.0.1:0")
server.start()
plain_http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=plain_http.serve_forever, daemon=True).start()
print(json.dumps({"grpc": port, "http": plain_http.server_address[1]}), flush=True)
# Ends with whoever started it.
sys.stdin.read()
