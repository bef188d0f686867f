"""KEDA's side of its external scaler, through stubs that gRPC's own compiler made."""

import sys
import tempfile
import threading
from pathlib import Path

import grpc
from checks import arguments, check, expect, expect_in, refuses, run
from grpc_tools import protoc

PROTO = Path(__file__).parents[3] / "proto/keda"
args = arguments()
stubs = tempfile.TemporaryDirectory()
arguments_of_protoc = ["protoc", f"-I{PROTO}", f"--python_out={stubs.name}"]
arguments_of_protoc += [f"--grpc_python_out={stubs.name}", "externalscaler.proto"]
assert protoc.main(arguments_of_protoc) == 0
sys.path.insert(0, stubs.name)
import externalscaler_pb2 as pb  # noqa: E402
import externalscaler_pb2_grpc as stub  # noqa: E402

channel = grpc.insecure_channel(args.grpc)
scaler = stub.ExternalScalerStub(channel)
PATIENCE = 60


def trigger(**metadata):
    """As KEDA sends it, with its own keys beside ours."""
    metadata = {"scalerAddress": args.grpc, **metadata}
    return pb.ScaledObjectRef(name="dormouse", namespace="default", scalerMetadata=metadata)


def infer(model):
    import json
    import urllib.request

    inputs = [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": [1] * 16}
        for name in ("INPUT0", "INPUT1")
    ]
    body = json.dumps({"inputs": inputs}).encode()
    url = f"http://{args.http}/v2/models/{model}/infer"
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=PATIENCE) as answer:
        expect(answer.status, 200)


def poll(reference):
    """One of KEDA's polls: the spec, then its metrics, then whether there is anything to do."""
    (spec,) = scaler.GetMetricSpec(reference, timeout=PATIENCE).metricSpecs
    request = pb.GetMetricsRequest(scaledObjectRef=reference, metricName=spec.metricName)
    (value,) = scaler.GetMetrics(request, timeout=PATIENCE).metricValues
    expect(value.metricName, spec.metricName)
    return spec, value, scaler.IsActive(reference, timeout=PATIENCE).result


@check
def a_model_nobody_called_is_not_active():
    spec, value, active = poll(trigger(model="versions"))
    expect(spec.metricName, "dormouse-pending-versions")
    expect((spec.targetSize, spec.targetSizeFloat), (10, 10.0))
    expect((value.metricValue, value.metricValueFloat), (0, 0.0))
    expect(active, False)


@check
def a_stream_tells_at_once_when_somebody_calls():
    stream = scaler.StreamIsActive(trigger(model="simple", idleAfter="300ms"))
    expect(next(stream).result, False)
    caller = threading.Thread(target=infer, args=("simple",))
    caller.start()
    expect(next(stream).result, True)
    caller.join()
    # And again when nobody has called for a while.
    expect(next(stream).result, False)
    infer("simple")
    expect(next(stream).result, True)
    stream.cancel()


@check
def other_models_are_not_woken_by_that():
    infer("simple")
    expect(scaler.IsActive(trigger(model="simple")).result, True)
    expect(scaler.IsActive(trigger()).result, True)
    expect(scaler.IsActive(trigger(model="versions")).result, False)


@check
def versions_are_told_apart():
    infer("versions/versions/1")
    expect(scaler.IsActive(trigger(model="versions", version="1")).result, True)
    expect(scaler.IsActive(trigger(model="versions", version="2")).result, False)
    expect(scaler.IsActive(trigger(model="versions")).result, True)


@check
def every_metric_can_be_asked_for():
    for metric in ("pending", "queued", "inflight", "rate"):
        spec, value, _ = poll(trigger(model="simple", metric=metric, target="2.5"))
        expect(spec.metricName, f"dormouse-{metric}-simple")
        expect((spec.targetSize, spec.targetSizeFloat), (3, 2.5))
        if metric != "rate":
            expect(value.metricValueFloat, 0.0)


@check
def the_same_words_from_the_stream_of_specs():
    reference = trigger(model="simple", target="4")
    stream = scaler.StreamMetricSpec(reference)
    expect(next(stream), scaler.GetMetricSpec(reference))
    stream.cancel()


@check
def wrong_metadata_is_refused_by_its_key():
    for metadata, part in [
        ({"model": "simpel"}, "scalerMetadata.model: unknown model 'simpel'"),
        ({"model": "simple", "version": "7"}, "scalerMetadata.version: model 'simple' has no"),
        ({"metric": "tokens"}, "scalerMetadata.metric"),
        ({"target": "-1"}, "scalerMetadata.target"),
        ({"idleAfter": "soon"}, "scalerMetadata.idleAfter"),
        ({"modell": "simple"}, "did you mean 'model'?"),
    ]:
        for call in (scaler.IsActive, scaler.GetMetricSpec, lambda r: next(scaler.StreamIsActive(r))):
            error = refuses(lambda: call(trigger(**metadata)), grpc.RpcError)
            expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
            expect_in(part, error.details())


@check
def another_metrics_name_is_refused():
    request = pb.GetMetricsRequest(scaledObjectRef=trigger(), metricName="cpu")
    error = refuses(lambda: scaler.GetMetrics(request), grpc.RpcError)
    expect(error.code(), grpc.StatusCode.INVALID_ARGUMENT)
    expect_in("metricName", error.details())


run()
