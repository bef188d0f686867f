"""The standard gRPC services beside inference: health and reflection."""

import grpc
from checks import arguments, check, expect, expect_in, refuses, run
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

args = arguments()
channel = grpc.insecure_channel(args.grpc)
health = health_pb2_grpc.HealthStub(channel)
reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
SERVING = health_pb2.HealthCheckResponse.SERVING
INFERENCE = "inference.GRPCInferenceService"


@check
def health_check():
    expect(health.Check(health_pb2.HealthCheckRequest()).status, SERVING)
    expect(health.Check(health_pb2.HealthCheckRequest(service=INFERENCE)).status, SERVING)


@check
def health_of_an_unknown_service():
    error = refuses(
        lambda: health.Check(health_pb2.HealthCheckRequest(service="nobody")), grpc.RpcError
    )
    expect(error.code(), grpc.StatusCode.NOT_FOUND)


@check
def health_watch():
    watch = health.Watch(health_pb2.HealthCheckRequest())
    expect(next(watch).status, SERVING)
    watch.cancel()


@check
def reflection_lists_the_services():
    database = ProtoReflectionDescriptorDatabase(channel)
    services = database.get_services()
    for service in (INFERENCE, "grpc.health.v1.Health", "externalscaler.ExternalScaler"):
        expect_in(service, services)


@check
def reflection_describes_the_inference_service():
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol=INFERENCE)
    (answer,) = reflection.ServerReflectionInfo(iter([request]))
    files = [
        FileDescriptorProto.FromString(data)
        for data in answer.file_descriptor_response.file_descriptor_proto
    ]
    methods = {
        method.name
        for file in files
        for service in file.service
        if f"{file.package}.{service.name}" == INFERENCE
        for method in service.method
    }
    expect(len(methods), 20, f"RPCs in {sorted(methods)}")


@check
def reflection_of_an_unknown_symbol():
    request = reflection_pb2.ServerReflectionRequest(file_containing_symbol="no.Such")
    try:
        (answer,) = reflection.ServerReflectionInfo(iter([request]))
    except grpc.RpcError as error:
        # Some libraries end the stream instead of answering in it.
        expect(error.code(), grpc.StatusCode.NOT_FOUND)
    else:
        expect(answer.error_response.error_code, grpc.StatusCode.NOT_FOUND.value[0])


@check
def an_unknown_method_is_unimplemented():
    call = channel.unary_unary(f"/{INFERENCE}/NoSuchMethod")
    error = refuses(lambda: call(b""), grpc.RpcError)
    expect(error.code(), grpc.StatusCode.UNIMPLEMENTED)


run()
