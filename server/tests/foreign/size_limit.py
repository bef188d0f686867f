"""A server with --http-max-input-size=1048576: to the byte."""

import gzip
import http.client
import json

import grpc
from checks import arguments, cases, check, expect, run
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

args = arguments()
LIMIT = 1 << 20


def call(body, headers=None):
    connection = http.client.HTTPConnection(args.http, timeout=120)
    try:
        try:
            connection.request("POST", "/v2/models/flat_uint8/infer", body, headers or {})
        except (BrokenPipeError, ConnectionResetError):
            pass
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def json_body(size):
    text = json.dumps({"inputs": [{"name": "INPUT", "datatype": "UINT8", "shape": [1, 1], "data": [7]}]})
    return text.encode() + b" " * (size - len(text)), {}


def binary_body(size):
    length = size - 4096
    for _ in range(3):
        header = {
            "inputs": [
                {
                    "name": "INPUT",
                    "datatype": "UINT8",
                    "shape": [1, length],
                    "parameters": {"binary_data_size": length},
                }
            ]
        }
        text = json.dumps(header).encode()
        length = size - len(text)
    body = text + bytes(length)
    expect(len(body), size, "size of the body")
    return body, {"Inference-Header-Content-Length": str(len(text))}


def compressed_body(size):
    body, headers = binary_body(size)
    return gzip.compress(body), {**headers, "Content-Encoding": "gzip"}


@cases([("json", json_body), ("binary", binary_body), ("gzip", compressed_body)])
def to_the_byte(case):
    status, content = call(*case[1](LIMIT))
    expect(status, 200, f"status of {content[:200]!r}")
    status, content = call(*case[1](LIMIT + 1))
    assert status in (400, 413), f"status {status} one byte above the limit"
    assert json.loads(content)["error"], content
    status, content = call(*case[1](LIMIT))
    expect(status, 200, f"status of {content[:200]!r}")


@check
def grpc_is_not_bound_by_the_http_limit():
    stub = service_pb2_grpc.GRPCInferenceServiceStub(
        grpc.insecure_channel(args.grpc, options=[("grpc.max_receive_message_length", -1)])
    )
    data = bytes(8 * LIMIT)
    request = pb.ModelInferRequest(model_name="flat_uint8", raw_input_contents=[data])
    request.inputs.add(name="INPUT", datatype="UINT8", shape=[1, len(data)])
    expect(stub.ModelInfer(request).raw_output_contents[0], data)


run()
