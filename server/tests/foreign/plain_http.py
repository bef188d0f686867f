"""The HTTP front end without any client library: what exactly goes in and comes out."""

import gzip
import http.client
import json
import socket
import struct
import zlib

from checks import arguments, cases, check, expect, expect_in, run

args = arguments()
HOST, PORT = args.http.rsplit(":", 1)
MODEL = "/v2/models/simple"
ONES = [1] * 16


def call(method, path, body=None, headers=None):
    connection = http.client.HTTPConnection(HOST, int(PORT), timeout=120)
    connection.request(method, path, body, headers or {})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, {name.lower(): value for name, value in answer.getheaders()}, content


def tensor(name, data=None, **extra):
    entry = {"name": name, "datatype": "INT32", "shape": [1, 16], **extra}
    if data is not None:
        entry["data"] = data
    return entry


def request(**extra):
    return {"inputs": [tensor("INPUT0", ONES), tensor("INPUT1", ONES)], **extra}


def infer(body, headers=None, model="simple"):
    if not isinstance(body, (bytes, str)):
        body = json.dumps(body)
    return call("POST", f"/v2/models/{model}/infer", body, headers)


def answered(result):
    status, headers, content = result
    expect(status, 200, f"status of {content[:300]!r}")
    return headers, content


@check
def probes():
    for path in ("/v2/health/live", "/v2/health/ready", f"{MODEL}/ready", f"{MODEL}/versions/1/ready"):
        expect(call("GET", path)[0], 200, path)
    expect(json.loads(call("GET", "/v2/health/live")[2]), {"live": True})
    expect(json.loads(call("GET", "/v2/health/ready")[2]), {"ready": True})


@check
def only_inference_is_compressed():
    """tritonclient's asyncio client accepts gzip for everything and unpacks only inference."""
    for path in (f"{MODEL}/config", MODEL, f"{MODEL}/stats", "/v2"):
        _, headers, content = call("GET", path, None, {"Accept-Encoding": "gzip, deflate"})
        expect(headers.get("content-encoding", "identity"), "identity", path)
        json.loads(content)


@check
def json_in_json_out():
    headers, content = answered(infer(request(id="x")))
    expect_in("application/json", headers["content-type"])
    answer = json.loads(content)
    expect((answer["model_name"], answer["model_version"], answer["id"]), ("simple", "1", "x"))
    outputs = {output["name"]: output for output in answer["outputs"]}
    expect(outputs["OUTPUT0"]["data"], [2] * 16)
    expect((outputs["OUTPUT0"]["datatype"], outputs["OUTPUT0"]["shape"]), ("INT32", [1, 16]))


@check
def nested_data():
    nested = {"inputs": [tensor("INPUT0", [ONES]), tensor("INPUT1", [ONES])]}
    _, content = answered(infer(nested))
    expect(json.loads(content)["outputs"][0]["data"], [2] * 16)


@check
def extension_fields_are_ignored():
    answered(infer(request(parameters={"custom": 1, "other": "x"}, something_new={"a": [1]})))


@check
def binary_tail():
    raw = struct.pack("<16i", *ONES)
    header = {
        "inputs": [
            tensor("INPUT0", parameters={"binary_data_size": 64}),
            tensor("INPUT1", parameters={"binary_data_size": 64}),
        ],
        "outputs": [
            {"name": "OUTPUT0", "parameters": {"binary_data": True}},
            {"name": "OUTPUT1", "parameters": {"binary_data": False}},
        ],
    }
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    headers, content = answered(infer(text + raw + raw, headers))
    expect(headers["content-type"], "application/octet-stream")
    length = int(headers["inference-header-content-length"])
    answer = json.loads(content[:length])
    outputs = {output["name"]: output for output in answer["outputs"]}
    expect(outputs["OUTPUT0"]["parameters"]["binary_data_size"], 64)
    expect(outputs["OUTPUT1"]["data"], [0] * 16)
    expect(content[length:], struct.pack("<16i", *[2] * 16))


@check
def raw_binary_request():
    """A header length of 0: the body is the one input, and nothing else."""
    body = struct.pack("<4f", 1, 2, 3, 4)
    headers = {"Inference-Header-Content-Length": "0"}
    headers, content = answered(infer(body, headers, "external"))
    length = int(headers.get("inference-header-content-length", len(content)))
    (output,) = json.loads(content[:length])["outputs"]
    expect((output["name"], output["shape"]), ("Y", [1, 4]))
    expect(content[length:], struct.pack("<4f", 20, 20, 20, 20))


@check
def chunked_body():
    def pieces():
        text = json.dumps(request()).encode()
        for i in range(0, len(text), 7):
            yield text[i : i + 7]

    connection = http.client.HTTPConnection(HOST, int(PORT), timeout=120)
    connection.request("POST", f"{MODEL}/infer", pieces(), {}, encode_chunked=True)
    answer = connection.getresponse()
    content = answer.read()
    expect(answer.status, 200, f"{content[:200]!r}")
    expect(json.loads(content)["outputs"][0]["data"], [2] * 16)


@check
def keep_alive_and_pipelining():
    text = json.dumps(request()).encode()
    head = f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n\r\n".encode()
    with socket.create_connection((HOST, int(PORT)), timeout=120) as stream:
        stream.sendall((head + text) * 5)
        got = b""
        while got.count(b'"model_name"') < 5:
            piece = stream.recv(65536)
            assert piece, f"closed after {got.count(b'model_name')} answers"
            got += piece
    expect(got.count(b"HTTP/1.1 200"), 5)


@check
def expect_continue():
    text = json.dumps(request()).encode()
    head = (
        f"POST {MODEL}/infer HTTP/1.1\r\nHost: x\r\nContent-Length: {len(text)}\r\n"
        "Expect: 100-continue\r\nConnection: close\r\n\r\n"
    )
    with socket.create_connection((HOST, int(PORT)), timeout=120) as stream:
        stream.sendall(head.encode())
        expect_in(b"HTTP/1.1 100", stream.recv(1024))
        stream.sendall(text)
        expect_in(b"HTTP/1.1 200", stream.recv(65536))


@cases(["gzip", "deflate"])
def compressed_both_ways(encoding):
    text = json.dumps(request()).encode()
    body = gzip.compress(text) if encoding == "gzip" else zlib.compress(text)
    headers = {"Content-Encoding": encoding, "Accept-Encoding": encoding}
    headers, content = answered(infer(body, headers))
    if headers.get("content-encoding") == encoding:
        content = gzip.decompress(content) if encoding == "gzip" else zlib.decompress(content)
    expect(json.loads(content)["outputs"][0]["data"], [2] * 16)


@cases(
    [
        ("no body", b""),
        ("no JSON", b"hello"),
        ("cut JSON", b'{"inputs":['),
        ("a list", b"[]"),
        ("a number", b"5"),
        ("no inputs", b"{}"),
        ("inputs no list", b'{"inputs":{}}'),
        ("input no object", b'{"inputs":[5]}'),
        ("input without a name", b'{"inputs":[{"shape":[1],"datatype":"INT32","data":[1]}]}'),
        ("input without a shape", b'{"inputs":[{"name":"INPUT0","datatype":"INT32","data":[1]}]}'),
        ("input without a type", b'{"inputs":[{"name":"INPUT0","shape":[1],"data":[1]}]}'),
        ("input without data", json.dumps({"inputs": [tensor("INPUT0"), tensor("INPUT1", ONES)]})),
        ("invalid UTF-8", b'{"id":"\xff","inputs":[]}'),
        ("JSON after the end", json.dumps(request()) + "{}"),
        ("text for a number", json.dumps({"inputs": [tensor("INPUT0", ["1"] * 16), tensor("INPUT1", ONES)]})),
        ("fraction for an integer",
         json.dumps({"inputs": [tensor("INPUT0", [1.5] * 16), tensor("INPUT1", ONES)]})),
        ("number too large",
         json.dumps({"inputs": [tensor("INPUT0", [2**31] * 16), tensor("INPUT1", ONES)]})),
        ("too few values", json.dumps({"inputs": [tensor("INPUT0", [1] * 15), tensor("INPUT1", ONES)]})),
        ("too many values", json.dumps({"inputs": [tensor("INPUT0", [1] * 17), tensor("INPUT1", ONES)]})),
        ("negative shape", json.dumps({"inputs": [tensor("INPUT0", ONES, shape=[-1, 16])]})),
        ("fractional shape", json.dumps({"inputs": [tensor("INPUT0", ONES, shape=[1.5, 16])]})),
        ("unknown type", json.dumps({"inputs": [tensor("INPUT0", ONES, datatype="INT33")]})),
        ("outputs no list", json.dumps(request(outputs=5))),
        ("unknown output", json.dumps(request(outputs=[{"name": "NONE"}]))),
    ]
)
def bad_request(case):
    _, body = case
    status, headers, content = infer(body)
    expect(status, 400, f"status of {content[:300]!r}")
    assert json.loads(content)["error"], "no words"


@cases(
    [
        ("not a number", "many"),
        ("negative", "-1"),
        ("beyond the body", "100000"),
        ("huge", str(2**64)),
        ("cuts the JSON", "5"),
    ]
)
def bad_header_length(case):
    status, _, content = infer(request(), {"Inference-Header-Content-Length": case[1]})
    expect(status, 400, f"status of {content[:300]!r}")


@cases([("too small", 60), ("too large", 68), ("negative", -1), ("huge", 2**62), ("text", "64")])
def bad_binary_size(case):
    header = {"inputs": [tensor("INPUT0", parameters={"binary_data_size": case[1]}), tensor("INPUT1", ONES)]}
    text = json.dumps(header).encode()
    headers = {"Inference-Header-Content-Length": str(len(text))}
    status, _, content = infer(text + bytes(64), headers)
    expect(status, 400, f"status of {content[:300]!r}")


@check
def unknown_compression_is_refused():
    status, _, content = infer(json.dumps(request()), {"Content-Encoding": "br"})
    assert status in (400, 415, 501), (status, content)
    expect_in(b"br", content)


@check
def broken_compression_is_refused():
    for encoding in ("gzip", "deflate"):
        status, _, content = infer(b"not compressed at all", {"Content-Encoding": encoding})
        assert 400 <= status < 500, (status, content)


@cases(
    [
        ("GET", f"{MODEL}/infer", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/nothing", 404),
        ("GET", "/v2/models/nobody", 404),
        ("GET", "/v2/models/nobody/config", 404),
        ("GET", "/v2/models/nobody/stats", 404),
        ("GET", f"{MODEL}/versions/9", 404),
    ]
)
def wrong_places(case):
    method, path, wanted = case
    status, _, content = call(method, path, None if method == "GET" else b"{}")
    # Triton answers both with 400; a client needs only to see that it is its own mistake.
    assert status in (wanted, 400), f"{method} {path}: {status}, {content[:200]!r}"


@check
def index_and_statistics():
    _, content = answered(call("POST", "/v2/repository/index", b"{}"))
    names = {entry["name"] for entry in json.loads(content)}
    assert {"simple", "slow", "corrupt"} <= names, names
    _, content = answered(call("POST", "/v2/repository/index"))
    assert json.loads(content)
    _, content = answered(call("POST", "/v2/repository/index", b'{"ready":true}'))
    assert all(entry["state"] == "READY" for entry in json.loads(content))
    _, content = answered(call("GET", f"{MODEL}/stats"))
    (entry,) = json.loads(content)["model_stats"]
    for key in ("name", "version", "last_inference", "inference_count", "execution_count", "inference_stats", "batch_stats"):
        expect_in(key, entry)


@check
def metrics_page():
    host, port = args.metrics.rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=120)
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    text = answer.read().decode()
    expect(answer.status, 200)
    for name in (
        "nv_inference_request_success",
        "nv_inference_request_failure",
        "nv_inference_count",
        "nv_inference_exec_count",
        "nv_inference_request_duration_us",
        "nv_inference_queue_duration_us",
        "nv_inference_compute_input_duration_us",
        "nv_inference_compute_infer_duration_us",
        "nv_inference_compute_output_duration_us",
        "nv_inference_pending_request_count",
    ):
        expect_in(f"# TYPE {name} ", text)
        expect_in(f'{name}{{model="simple",version="1"', text)


run()
