"""tritonclient over TLS with a token, against a guarded server."""

import argparse

import gevent.ssl
import numpy as np
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException


def refused(call, *signs):
    try:
        call()
    except InferenceServerException as error:
        assert any(sign in str(error) for sign in signs), str(error)
        return
    raise AssertionError("was not refused")


def inputs(module):
    made = []
    for name in ("INPUT0", "INPUT1"):
        tensor = module.InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(np.arange(16, dtype=np.int32).reshape(1, 16))
        made.append(tensor)
    return made


def check(client, module, token):
    headers = {"authorization": f"Bearer {token}"}
    assert client.is_server_live()
    refused(lambda: client.get_server_metadata(), "credential", "401")
    refused(
        lambda: client.get_server_metadata(headers={"authorization": "Bearer wrong"}),
        "not known",
        "401",
    )
    refused(lambda: client.infer("simple", inputs(module)), "credential", "401")
    refused(
        lambda: client.load_model("simple", headers=headers), "lacks the scope", "403"
    )
    assert client.get_server_metadata(headers=headers)
    result = client.infer("simple", inputs(module), headers=headers)
    assert result.as_numpy("OUTPUT0").tolist() == [[2 * n for n in range(16)]]


def main():
    parser = argparse.ArgumentParser()
    for name in ("http", "grpc", "metrics", "pid", "ca", "token"):
        parser.add_argument(f"--{name}")
    arguments = parser.parse_args()
    client = grpc_client.InferenceServerClient(
        arguments.grpc, ssl=True, root_certificates=arguments.ca
    )
    check(client, grpc_client, arguments.token)
    client.close()
    print("ok grpc")
    client = http_client.InferenceServerClient(
        arguments.http,
        ssl=True,
        ssl_context_factory=lambda: gevent.ssl.create_default_context(cafile=arguments.ca),
    )
    check(client, http_client, arguments.token)
    client.close()
    print("ok http")


if __name__ == "__main__":
    main()
