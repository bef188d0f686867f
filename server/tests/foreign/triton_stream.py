"""tritonclient.grpc streams: many requests, one stream."""

import queue

import grpc
import numpy as np
import tritonclient.grpc as triton
from checks import arguments, check, expect, expect_in, run
from tensors import same
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc import service_pb2_grpc

args = arguments()


class Stream:
    """A client with one open stream and the answers that came through it."""

    def __init__(self, **options):
        self.answers = queue.Queue()
        self.client = triton.InferenceServerClient(args.grpc)
        self.client.start_stream(lambda result, error: self.answers.put((result, error)), **options)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.client.stop_stream()
        self.client.close()

    def send(self, value, model="simple", **options):
        array = np.full((1, 16), value, np.int32)
        tensors = []
        for name in ("INPUT0", "INPUT1"):
            tensors.append(triton.InferInput(name, [1, 16], "INT32"))
            tensors[-1].set_data_from_numpy(array)
        self.client.async_stream_infer(model, tensors, **options)

    def answer(self):
        return self.answers.get(timeout=60)


@check
def answers_come_through_the_stream():
    with Stream() as stream:
        for i in range(100):
            stream.send(i, request_id=str(i))
        seen = {}
        for _ in range(100):
            result, error = stream.answer()
            expect(error, None)
            i = int(result.get_response().id)
            same(result.as_numpy("OUTPUT0"), np.full((1, 16), 2 * i, np.int32))
            seen[i] = True
        expect(sorted(seen), list(range(100)))


@check
def an_error_is_a_message_and_the_stream_goes_on():
    with Stream() as stream:
        stream.send(1, model="nobody", request_id="bad")
        result, error = stream.answer()
        expect(result, None)
        expect_in("nobody", error.message())
        stream.send(4, request_id="good")
        result, error = stream.answer()
        expect(error, None)
        expect(result.get_response().id, "good")


@check
def a_header_turns_errors_into_the_streams_status():
    with Stream(headers={"triton_grpc_error": "true"}) as stream:
        stream.send(1, model="nobody")
        _, error = stream.answer()
        expect(error.status(), "StatusCode.NOT_FOUND")


@check
def the_final_answer_is_marked_when_asked_for():
    with Stream() as stream:
        stream.send(3, enable_empty_final_response=True)
        result, error = stream.answer()
        expect(error, None)
        parameter = result.get_response().parameters.get("triton_final_response")
        assert parameter is not None and parameter.bool_param, "no final mark"


@check
def closing_the_sending_side_keeps_the_answers():
    stub = service_pb2_grpc.GRPCInferenceServiceStub(grpc.insecure_channel(args.grpc))

    def requests():
        for i in range(10):
            request = pb.ModelInferRequest(model_name="simple", id=str(i))
            for name in ("INPUT0", "INPUT1"):
                request.inputs.add(name=name, datatype="INT32", shape=[1, 16])
                request.raw_input_contents.append(bytes(64))
            yield request

    answers = list(stub.ModelStreamInfer(requests()))
    expect(sorted(int(answer.infer_response.id) for answer in answers), list(range(10)))


@check
def a_cancelled_stream_leaves_the_model_free():
    client = triton.InferenceServerClient(args.grpc)
    answers = queue.Queue()
    client.start_stream(lambda result, error: answers.put((result, error)))
    tensor = triton.InferInput("ITERATIONS", [1], "INT64")
    tensor.set_data_from_numpy(np.array([100_000_000]))
    client.async_stream_infer("slow", [tensor])
    client.stop_stream(cancel_requests=True)
    tensor.set_data_from_numpy(np.array([3]))
    same(client.infer("slow", [tensor]).as_numpy("COUNT"), np.array([3]))


run()
