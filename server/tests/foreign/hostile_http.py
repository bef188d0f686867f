"""Single requests that are meant to kill or bloat the server."""

import gzip
import http.client
import json
import socket
import time
import zlib

from checks import arguments, cases, check, expect, rss, run

args = arguments()
HOST, PORT = args.http.rsplit(":", 1)
MIB = 1 << 20
INFER = "/v2/models/simple/infer"
GOOD = json.dumps(
    {
        "inputs": [
            {"name": name, "datatype": "INT32", "shape": [1, 16], "data": [1] * 16}
            for name in ("INPUT0", "INPUT1")
        ]
    }
)


def call(path, body, headers=None, method="POST"):
    connection = http.client.HTTPConnection(HOST, int(PORT), timeout=300)
    try:
        try:
            connection.request(method, path, body, headers or {})
        except (BrokenPipeError, ConnectionResetError):
            pass  # The server may answer before it has read all; the answer is what counts.
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def refused(result):
    status, content = result
    assert 400 <= status < 500, f"status {status}: {content[:200]!r}"


def lives():
    status, content = call(INFER, GOOD)
    expect(status, 200, f"status of {content[:200]!r}")


@check
def warm_up():
    lives()


@cases([(f"{name} in {where}", opening, closing, where)
        for where in ("infer", "index", "load")
        for name, opening, closing in (("lists", "[", "]"), ("objects", '{"a":', "}"))])
def deep_json(case):
    _, opening, closing, where = case
    path = {"infer": INFER, "index": "/v2/repository/index", "load": "/v2/repository/models/simple/load"}[where]
    before = rss(args.pid)
    for depth in (200, 100_000, 250_000):
        nest = opening * depth + "1" + closing * depth
        refused(call(path, nest))
        refused(call(path, f'{{"inputs":{nest}}}' if where == "infer" else f'{{"parameters":{nest}}}'))
        refused(call(path, opening * depth))
    lives()
    grown = rss(args.pid) - before
    assert grown <= 8 * MIB, f"grew by {grown / MIB:.1f} MiB"


@check
def deep_json_as_data():
    for depth in (200, 100_000):
        data = "[" * depth + "1" + "]" * depth
        refused(call(INFER, f'{{"inputs":[{{"name":"INPUT0","datatype":"INT32","shape":[1],"data":{data}}}]}}'))
    lives()


@cases([("2^40", [1, 1 << 40]), ("2^62", [1 << 62, 1 << 62]), ("2^63", [1, (1 << 63) - 1]),
        ("2^64", [1, 1 << 64]), ("zero times huge", [0, 1 << 62, 1 << 62]), ("10^4 dimensions", [1] * 10_000)])
def shapes(case):
    before = rss(args.pid)
    for model, datatype in (("simple", "INT32"), ("flat_fp32", "FP32"), ("flat_bytes", "BYTES")):
        name = "INPUT0" if model == "simple" else "INPUT"
        value = "x" if datatype == "BYTES" else 1
        entry = {"name": name, "datatype": datatype, "shape": case[1]}
        body = json.dumps({"inputs": [{**entry, "data": [value]}]})
        refused(call(f"/v2/models/{model}/infer", body))
        text = json.dumps({"inputs": [{**entry, "parameters": {"binary_data_size": 4}}]})
        headers = {"Inference-Header-Content-Length": str(len(text))}
        refused(call(f"/v2/models/{model}/infer", text.encode() + bytes(4), headers))
    lives()
    grown = rss(args.pid) - before
    assert grown <= 8 * MIB, f"grew by {grown / MIB:.1f} MiB"


@check
def long_file_parameter():
    for length in (256, 4096, 100_000):
        parameters = {"config": "{}", "file:" + "x" * length: "AAAA"}
        refused(call("/v2/repository/models/simple/load", json.dumps({"parameters": parameters})))
    lives()


@check
def many_parameters_inputs_and_outputs():
    for body in (
        {"parameters": {str(i): i for i in range(200_000)}, "inputs": []},
        {"inputs": [{"name": str(i), "datatype": "INT32", "shape": [1], "data": [1]} for i in range(100_000)]},
        {**json.loads(GOOD), "outputs": [{"name": "OUTPUT0"}] * 100_000},
    ):
        refused(call(INFER, json.dumps(body)))
    lives()


@check
def a_million_chunks_of_one_byte():
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n".encode()

    def flood():
        with socket.create_connection((HOST, int(PORT)), timeout=300) as stream:
            stream.sendall(head)
            for _ in range(100):
                stream.sendall(b"1\r\n \r\n" * 10_000)
            stream.sendall(b"0\r\n\r\n")
            answer = stream.recv(65536)
            assert answer.startswith(b"HTTP/1.1 400"), answer[:100]

    flood()
    before = rss(args.pid)
    # As many of a hundred as there is time for: it is growth with each of them that counts.
    until = time.monotonic() + 10
    floods = 0
    while floods < 100 and time.monotonic() < until:
        flood()
        floods += 1
    lives()
    grown = rss(args.pid) - before
    print(f"{floods} floods")
    assert grown < MIB, f"grew by {grown / MIB:.1f} MiB in {floods} floods"


def bomb(encoding):
    """A GiB of spaces, about a MiB on the wire."""
    compressor = zlib.compressobj(9, wbits=31 if encoding == "gzip" else 15)
    piece = b" " * MIB
    return b"".join(compressor.compress(piece) for _ in range(1024)) + compressor.flush()


@cases([("gzip", 100), ("deflate", 20)])
def decompression_bombs(case):
    encoding, bombs = case
    body = bomb(encoding)
    assert len(body) < 2 * MIB
    headers = {"Content-Encoding": encoding}
    refused(call(INFER, body, headers))
    before = rss(args.pid)
    for _ in range(bombs):
        status, content = call(INFER, body, headers)
        expect(status, 400, f"status of {content[:200]!r}")
    lives()
    grown = rss(args.pid) - before
    assert grown < 32 * MIB, f"grew by {grown / MIB:.1f} MiB"


@check
def bombs_elsewhere():
    body = bomb("gzip")
    for path in ("/v2/repository/index", "/v2/repository/models/simple/load"):
        refused(call(path, body, {"Content-Encoding": "gzip"}))
    nested = gzip.compress(gzip.compress(GOOD.encode()))
    refused(call(INFER, nested, {"Content-Encoding": "gzip"}))
    lives()


@check
def many_and_large_headers():
    for headers in ({f"x-{i}": "1" for i in range(90)}, {"x-large": "y" * 60_000}):
        try:
            connection = http.client.HTTPConnection(HOST, int(PORT), timeout=300)
            connection.request("POST", INFER, GOOD, headers)
            status = connection.getresponse().status
            assert status in (200, 400, 431), status
        except (ConnectionError, http.client.HTTPException):
            pass
    lives()


@check
def broken_framing():
    for text in (
        b"\x00\x01\x02\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"GET /v2 HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v2/models/simple/infer HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"ffffffffffffffffff\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
    ):
        with socket.create_connection((HOST, int(PORT)), timeout=300) as stream:
            try:
                stream.sendall(text)
                stream.shutdown(socket.SHUT_WR)
                answer = stream.recv(65536)
            except ConnectionError:
                continue
            assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:100]
    lives()


@check
def clients_that_die_in_the_middle():
    head = f"POST {INFER} HTTP/1.1\r\nHost: x\r\nContent-Length: 10000000\r\n\r\n".encode()
    before = rss(args.pid)
    for _ in range(200):
        with socket.create_connection((HOST, int(PORT)), timeout=300) as stream:
            stream.sendall(head + bytes(100_000))
    lives()
    grown = rss(args.pid) - before
    assert grown < 32 * MIB, f"grew by {grown / MIB:.1f} MiB"


run()
