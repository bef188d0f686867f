"""tritonclient.grpc on a server that closes connections which are idle, or old."""

import time

import grpc
import numpy as np
import tritonclient.grpc as triton
from checks import arguments, check, expect, run

args = arguments()


def tensors():
    made = []
    for name in ("INPUT0", "INPUT1"):
        tensor = triton.InferInput(name, [1, 16], "INT32")
        tensor.set_data_from_numpy(np.ones((1, 16), np.int32))
        made.append(tensor)
    return made


def ask(client):
    answer = client.infer("simple", tensors())
    expect(answer.as_numpy("OUTPUT0").tolist(), [[2] * 16])


@check
def calls_with_pauses_around_the_idle_time():
    client = triton.InferenceServerClient(args.grpc)
    for index in range(100):
        time.sleep(0.035 + index % 20 / 1000)
        ask(client)


@check
def calls_without_a_pause():
    client = triton.InferenceServerClient(args.grpc)
    for _ in range(500):
        ask(client)


@check
def a_channel_that_connects_long_before_its_first_call():
    channel = grpc.insecure_channel(args.grpc, options=[("grpc.use_local_subchannel_pool", 1)])
    grpc.channel_ready_future(channel).result(timeout=10)
    time.sleep(0.3)
    live = channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
    expect(live(b""), b"\x08\x01")


@check
def a_stream_that_pauses():
    answers = []
    client = triton.InferenceServerClient(args.grpc)
    client.start_stream(lambda result, error: answers.append((result, error)))
    for count in range(1, 4):
        client.async_stream_infer("simple", tensors())
        while len(answers) < count:
            time.sleep(0.01)
        time.sleep(0.2)
    client.stop_stream()
    expect([error for _, error in answers], [None] * 3)


run()
