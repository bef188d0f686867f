"""Retries, deadlines, tokens and TLS, against a fake server."""

import time
from pathlib import Path
from typing import Any, List, Optional

import grpc
import numpy as np
import pytest
import trustme
from conftest import Fake

import dormouse
from dormouse import _wire
from dormouse.errors import retry_after

QUICK = dormouse.RetryPolicy(first_wait=0.001)


def refuse(fake: Fake, times: int, code: grpc.StatusCode, after: Optional[float] = None) -> None:
    """Lets the first calls fail."""

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        if fake.calls.count("ModelInfer") <= times:
            if after is not None:
                context.set_trailing_metadata((("grpc-status-details-bin", hint(after)),))
            context.abort(code, "no room")
        return _wire.ModelInferResponse(model_name=request.model_name)

    fake.answer("ModelInfer", answer)


def hint(seconds: float) -> bytes:
    info = _wire.RetryInfo()
    info.delay.seconds = int(seconds)
    info.delay.nanos = round((seconds - int(seconds)) * 1e9)
    status = _wire.Status()
    status.details.add(type_url="type.googleapis.com/google.rpc.RetryInfo", value=info.SerializeToString())
    told: bytes = status.SerializeToString()
    return told


def infer(fake: Fake, retry: Any = QUICK, **options: Any) -> dormouse.InferResult:
    with dormouse.Client(fake.url, check=False, retry=retry, timeout=60) as client:
        return client.infer("m", {"x": np.zeros(1)}, **options)


def test_a_refusal_before_any_answer_is_tried_again(fake: Fake) -> None:
    refuse(fake, 3, grpc.StatusCode.UNAVAILABLE)
    infer(fake)
    assert fake.calls == ["ModelInfer"] * 4


def test_attempts_are_limited_and_the_last_error_is_told(fake: Fake) -> None:
    refuse(fake, 9, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(dormouse.UnavailableError, match=r"no room \(UNAVAILABLE\)"):
        infer(fake)
    assert len(fake.calls) == 4


@pytest.mark.parametrize("retry", [False, dormouse.RetryPolicy(attempts=1)])
def test_retries_can_be_switched_off(fake: Fake, retry: Any) -> None:
    refuse(fake, 1, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(dormouse.UnavailableError):
        infer(fake, retry)
    assert len(fake.calls) == 1


@pytest.mark.parametrize(
    "code",
    [grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.ABORTED],
)
def test_what_may_have_run_or_will_never_fit_is_sent_once(fake: Fake, code: grpc.StatusCode) -> None:
    refuse(fake, 1, code)
    with pytest.raises(dormouse.ServerError):
        infer(fake)
    assert len(fake.calls) == 1


def test_a_part_of_a_sequence_is_never_sent_twice(fake: Fake) -> None:
    refuse(fake, 1, grpc.StatusCode.UNAVAILABLE)
    with pytest.raises(dormouse.UnavailableError):
        infer(fake, sequence_id=3, sequence_start=True)
    assert len(fake.calls) == 1


def test_the_servers_hint_is_waited_out(fake: Fake) -> None:
    refuse(fake, 1, grpc.StatusCode.RESOURCE_EXHAUSTED, after=0.05)
    began = time.monotonic()
    infer(fake)
    assert len(fake.calls) == 2 and time.monotonic() - began >= 0.05


def test_a_hint_beyond_reason_or_the_deadline_ends_it(fake: Fake) -> None:
    refuse(fake, 1, grpc.StatusCode.UNAVAILABLE, after=5000)
    with pytest.raises(dormouse.UnavailableError) as refused:
        infer(fake)
    assert refused.value.retry_after == 5000
    refuse(fake, 9, grpc.StatusCode.UNAVAILABLE, after=9)
    with pytest.raises(dormouse.UnavailableError):
        infer(fake, timeout=8)


def test_waits_double_and_are_spread() -> None:
    error = dormouse.UnavailableError(grpc.StatusCode.UNAVAILABLE, "")
    policy = dormouse.RetryPolicy(attempts=100)
    assert [policy.wait_after(n, error, 1.0) for n in (1, 2, 3)] == [0.05, 0.1, 0.2]
    assert policy.wait_after(1, error, 0.0) == 0.025
    assert policy.wait_after(90, error, 1.0) == policy.longest_wait
    assert policy.wait_after(100, error) is None
    with pytest.raises(dormouse.InvalidInput):
        dormouse.RetryPolicy(attempts=0)


def test_details_that_are_no_status_say_nothing() -> None:
    assert retry_after([("grpc-status-details-bin", b"\xff" * 9), ("x", "y")]) is None
    assert retry_after(None) is None


def test_tokens_and_metadata_go_with_every_call(fake: Fake) -> None:
    tokens = iter(["one", "two"])
    with dormouse.Client(fake.url, token=lambda: next(tokens), metadata={"X-Tenant": "blue"}) as client:
        client.is_live()
        client.is_live()
    seen = [(told["authorization"], told["x-tenant"]) for told in fake.metadata]
    assert seen == [("Bearer one", "blue"), ("Bearer two", "blue")]


def test_parameters_have_their_types(fake: Fake) -> None:
    seen = []

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        seen.append(request)
        return _wire.ModelInferResponse()

    fake.answer("ModelInfer", answer)
    infer(
        fake,
        priority=2,
        queue_timeout=0.5,
        sequence_id="s",
        sequence_end=True,
        parameters={"a": True, "b": -1, "c": 1.5, "d": "t", "e": 2**64 - 1},
    )
    chosen = {key: value.WhichOneof("parameter_choice") for key, value in seen[0].parameters.items()}
    assert chosen == {
        "priority": "uint64_param",
        "timeout": "int64_param",
        "sequence_id": "string_param",
        "sequence_start": "bool_param",
        "sequence_end": "bool_param",
        "a": "bool_param",
        "b": "int64_param",
        "c": "double_param",
        "d": "string_param",
        "e": "uint64_param",
    }
    assert seen[0].parameters["timeout"].int64_param == 500_000
    with pytest.raises(dormouse.InvalidInput, match="there are bool, int, float and str"):
        infer(fake, parameters={"x": [1]})


def test_tls_and_mutual_tls(tmp_path: Path) -> None:
    authority = trustme.CA()
    names = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "cert.pem", "key": tmp_path / "key.pem"}
    authority.cert_pem.write_to_path(str(names["ca"]))
    ours = authority.issue_cert("me@example.org")
    ours.private_key_pem.write_to_path(str(names["key"]))
    names["cert"].write_bytes(b"".join(part.bytes() for part in ours.cert_chain_pems))
    theirs = authority.issue_cert("127.0.0.1", "models.example.org")
    pair = (theirs.private_key_pem.bytes(), b"".join(part.bytes() for part in theirs.cert_chain_pems))
    credentials = grpc.ssl_server_credentials([pair], authority.cert_pem.bytes(), True)
    fake = Fake(credentials)
    try:
        mine = dormouse.TLS(ca_file=names["ca"], cert_file=names["cert"], key_file=names["key"])
        with dormouse.Client(f"grpcs://{fake.url}", tls=mine, token="t") as client:
            client.is_live()
        assert fake.metadata[0]["authorization"] == "Bearer t"
        named = dormouse.TLS(names["ca"], names["cert"], names["key"], "models.example.org")
        with dormouse.Client(fake.url, tls=named) as client:
            client.is_live()
        for stranger in (dormouse.TLS(names["ca"]), True, False):
            with (
                dormouse.Client(fake.url, tls=stranger, retry=False, timeout=60) as client,
                pytest.raises(dormouse.UnavailableError),
            ):
                client.is_live()
    finally:
        fake.server.stop(0)
    with pytest.raises(dormouse.InvalidInput, match="belong together"):
        dormouse.Client("x", tls=dormouse.TLS(cert_file=names["cert"]))


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "the address is empty"),
        ("ftp://x", "ftp:// is not spoken here"),
        ("http://", "expected http://HOST:PORT"),
        ("http://x/v2/models", "expected http://HOST:PORT"),
    ],
)
def test_addresses_that_are_none_are_refused(url: str, says: str) -> None:
    with pytest.raises(dormouse.InvalidInput, match=says):
        dormouse.Client(url)


def test_settings_that_make_no_sense_are_refused() -> None:
    for options, says in [
        ({"compression": "brotli"}, "there are 'gzip' and 'deflate'"),
        ({"timeout": -1}, "a timeout of -1 seconds"),
    ]:
        with pytest.raises(dormouse.InvalidInput, match=says):
            dormouse.Client("x", **options)  # type: ignore[arg-type]
    with pytest.raises(dormouse.InvalidInput, match="tls=False forbids it"):
        dormouse.Client("grpcs://x", tls=False)


def test_nobody_there_is_said_so() -> None:
    with (
        dormouse.Client("127.0.0.1:1", retry=False, timeout=60) as client,
        pytest.raises(dormouse.UnavailableError, match=r"127[.]0[.]0[.]1:1"),
    ):
        client.is_live()


def test_a_signature_that_has_changed_is_asked_for_again(fake: Fake) -> None:
    size = 2

    def signature(request: Any, context: grpc.ServicerContext) -> Any:
        message = _wire.MODEL_METADATA.response(name=request.name)
        message.inputs.add(name="x", datatype="FP32", shape=[size])
        return message

    fake.answer("ModelMetadata", signature)
    with dormouse.Client(fake.url) as client:
        client.infer("m", {"x": [1, 2]})
        client.infer("m", {"x": [3, 4]})
        assert fake.calls.count("ModelMetadata") == 1
        size = 3
        client.infer("m", {"x": [1, 2, 3]})
        assert fake.calls.count("ModelMetadata") == 2
        with pytest.raises(dormouse.InvalidInput):
            client.infer("m", {"x": [1, 2]})


def test_outputs_may_come_from_a_generator(fake: Fake) -> None:
    asked: List[Any] = []

    def note(request: Any, context: grpc.ServicerContext) -> Any:
        asked.append([output.name for output in request.outputs])
        return _wire.MODEL_INFER.response(model_name="m")

    def metadata(request: Any, context: grpc.ServicerContext) -> Any:
        told = _wire.MODEL_METADATA.response(name="m")
        told.inputs.add(name="x", datatype="FP32", shape=[1])
        # The second time it has another output.
        for name in ("a", "b")[: fake.calls.count("ModelMetadata")]:
            told.outputs.add(name=name, datatype="FP32", shape=[1])
        return told

    fake.answer("ModelInfer", note)
    fake.answer("ModelMetadata", metadata)
    inputs = {"x": np.ones(1, np.float32)}
    with dormouse.Client(fake.url) as client:
        client.infer("m", inputs, outputs=(name for name in ["a"]))
        client.infer("m", inputs, outputs=(name for name in ["b", "a"]))
    assert asked == [["a"], ["b", "a"]]
