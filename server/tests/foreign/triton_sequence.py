"""Sequences, ragged batches and decoupled models, asked by tritonclient over both protocols."""

import concurrent.futures
import queue
import threading
import time

import numpy as np
import tritonclient.grpc as triton
import tritonclient.http as triton_http
from checks import arguments, check, expect, expect_in, run
from tensors import same
from tritonclient.utils import InferenceServerException

args = arguments()
grpc_client = triton.InferenceServerClient(args.grpc)
http_client = triton_http.InferenceServerClient(args.http)
BOTH = ((grpc_client, triton), (http_client, triton_http))

next_id = iter(range(1000, 10**6)).__next__


def tensor(module, name, array, kind="INT32"):
    made = module.InferInput(name, list(array.shape), kind)
    made.set_data_from_numpy(array)
    return made


def step(client, module, model, number, id, start=False, end=False, shape=(1, 1), **options):
    inputs = [tensor(module, "INPUT", np.full(shape, number, np.int32))]
    return client.infer(
        model, inputs, sequence_id=id, sequence_start=start, sequence_end=end, **options
    )


def fails(words, call, *arguments, **options):
    try:
        call(*arguments, **options)
    except InferenceServerException as error:
        expect_in(words, error.message())
        return error
    raise AssertionError(f"no error with {words!r}")


def total(result):
    return int(result.as_numpy("OUTPUT").reshape(-1)[0])


def whole_sequence(client, module, model, id, shape=(1, 1)):
    sums = []
    for i in range(5):
        result = step(client, module, model, i + 1, id, i == 0, i == 4, shape)
        sums.append(total(result))
    expect(sums, [1, 3, 6, 10, 15])


@check
def the_extension_is_offered():
    expect_in("sequence", list(grpc_client.get_server_metadata().extensions))
    expect_in("sequence", http_client.get_server_metadata()["extensions"])


@check
def state_goes_from_one_request_to_the_next_over_both_protocols():
    for client, module in BOTH:
        for model in ("direct", "oldest"):
            whole_sequence(client, module, model, next_id())
        whole_sequence(client, module, "unbatched", next_id(), (1,))


@check
def controls_tell_start_end_ready_and_id():
    id = next_id()
    marks = []
    for start, end in ((True, False), (False, False), (False, True)):
        result = step(grpc_client, triton, "direct", 1, id, start, end)
        marks.append(result.as_numpy("MARKS").tolist()[0])
    expect(marks, [[1, 0, 1, id], [0, 0, 1, id], [0, 1, 1, id]])
    both = step(http_client, triton_http, "oldest", 1, id, True, True)
    expect(both.as_numpy("MARKS").tolist(), [[1, 1, 1, id]])


@check
def metadata_shows_neither_controls_nor_states():
    metadata = http_client.get_model_metadata("direct")
    expect([tensor["name"] for tensor in metadata["inputs"]], ["INPUT"])
    expect([tensor["name"] for tensor in metadata["outputs"]], ["OUTPUT", "MARKS"])
    config = http_client.get_model_config("oldest")["sequence_batching"]
    expect(config["max_sequence_idle_microseconds"], 60000000)
    expect(config["oldest"]["preferred_batch_size"], [4])


@check
def errors_are_worded_as_tritons():
    for client, module in BOTH:
        words = "must specify a non-zero or non-empty correlation ID"
        fails(words, step, client, module, "direct", 1, 0, True)
        id = next_id()
        words = (
            f"inference request for sequence {id} to model 'direct' must specify the START flag "
            "on the first request of the sequence"
        )
        fails(words, step, client, module, "direct", 1, id)
        words = "must specify batch-size 1 due to requirements of sequence batcher"
        fails(words, step, client, module, "direct", 1, id, True, shape=(2, 1))
        words = "a correlation ID that is a number"
        fails(words, step, client, module, "direct", 1, "a name", True)
        # After its end a sequence is unknown again.
        step(client, module, "direct", 1, id, True, True)
        fails("must specify the START flag", step, client, module, "direct", 1, id)


@check
def a_second_start_begins_anew():
    id = next_id()
    for model in ("direct", "oldest"):
        expect(total(step(grpc_client, triton, model, 7, id, True)), 7)
        expect(total(step(grpc_client, triton, model, 7, id)), 14)
        expect(total(step(grpc_client, triton, model, 2, id, True)), 2)
        expect(total(step(grpc_client, triton, model, 2, id, False, True)), 4)


@check
def names_and_growing_states_from_a_file():
    for client, module in BOTH:
        name = f"a sequence of {module.__name__}"
        for i in range(4):
            result = step(client, module, "history", i, name, i == 0, i == 3)
            same(result.as_numpy("HISTORY"), np.array([[41, 42, *range(i + 1)]], np.int32))
            expect(result.as_numpy("NAME").reshape(-1)[0], name.encode())
    # Two sequences whose states differ in length do not get in each other's way.
    step(grpc_client, triton, "history", 1, "long", True)
    step(grpc_client, triton, "history", 2, "long")
    step(grpc_client, triton, "history", 3, "short", True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        end = {"start": False, "end": True}
        longer = pool.submit(step, grpc_client, triton, "history", 9, "long", **end)
        shorter = pool.submit(step, grpc_client, triton, "history", 9, "short", **end)
        same(longer.result().as_numpy("HISTORY"), np.array([[41, 42, 1, 2, 9]], np.int32))
        same(shorter.result().as_numpy("HISTORY"), np.array([[41, 42, 3, 9]], np.int32))
    fails("at most 128 bytes", step, grpc_client, triton, "history", 1, "x" * 129, True)


@check
def many_sequences_side_by_side_keep_their_own_sums():
    def one(index):
        client, module = BOTH[index % 2]
        if module is triton_http:
            # This client belongs to the thread that made it.
            client = triton_http.InferenceServerClient(args.http)
        model = ("direct", "oldest")[index // 2 % 2]
        id = next_id()
        sums, expected = [], []
        for i in range(20):
            result = step(client, module, model, index + i, id, i == 0, i == 19)
            sums.append(total(result))
            expected.append((expected[-1] if expected else 0) + index + i)
            expect(result.as_numpy("MARKS").tolist()[0][3], id)
        expect(sums, expected)

    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        list(pool.map(one, range(24)))


@check
def a_stream_keeps_the_order_of_a_sequence():
    answers = queue.Queue()
    with triton.InferenceServerClient(args.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        ids = [next_id() for _ in range(3)]
        for i in range(50):
            for id in ids:
                inputs = [tensor(triton, "INPUT", np.full((1, 1), i, np.int32))]
                client.async_stream_infer(
                    "fresh",
                    inputs,
                    request_id=f"{id}/{i}",
                    sequence_id=id,
                    sequence_start=i == 0,
                    sequence_end=i == 49,
                )
        for i in range(50):
            for id in ids:
                result, error = answers.get(timeout=60)
                expect(error, None)
                expect(result.get_response().id, f"{id}/{i}")
                expect(total(result), i * (i + 1) // 2)
        client.stop_stream()


@check
def a_sequence_whose_client_vanished_frees_its_slot():
    # One slot: the second sequence waits in the backlog until the first one has been idle.
    first, second = next_id(), next_id()
    step(grpc_client, triton, "single", 1, first, True)
    expect(total(step(grpc_client, triton, "single", 5, second, True)), 5)
    fails("must specify the START flag", step, grpc_client, triton, "single", 1, first)
    expect(total(step(grpc_client, triton, "single", 5, second, False, True)), 10)


@check
def the_backlog_has_a_deadline():
    first, second = next_id(), next_id()
    step(grpc_client, triton, "patient", 1, first, True)
    # Microseconds.
    fails("", step, grpc_client, triton, "patient", 1, second, True, timeout=200_000)
    fails("must specify the START flag", step, grpc_client, triton, "patient", 1, second)
    # It did not wait until the first one was over for being idle.
    expect(total(step(grpc_client, triton, "patient", 1, first, False, True)), 2)
    whole_sequence(grpc_client, triton, "patient", second)


@check
def those_who_wait_for_a_slot_do_not_hold_back_the_end_that_frees_it():
    answers = queue.Queue()
    with triton.InferenceServerClient(args.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))

        def send(number, id, start, end):
            inputs = [tensor(triton, "INPUT", np.full((1, 1), number, np.int32))]
            client.async_stream_infer(
                "patient", inputs, sequence_id=id, sequence_start=start, sequence_end=end
            )

        first = next_id()
        send(1, first, True, False)
        # More than a stream may otherwise have under way, and each waits for the one slot.
        for number in range(200):
            send(number, next_id(), True, True)
        send(1, first, False, True)
        sums = []
        # Long before the first one would be over for being idle.
        until = time.monotonic() + 110
        for _ in range(202):
            result, error = answers.get(timeout=until - time.monotonic())
            expect(error, None)
            sums.append(total(result))
        expect(sums, [1, *range(200), 2])
        client.stop_stream()


@check
def sequences_are_counted():
    first, second = next_id(), next_id()
    expired = counter("dormouse_sequences_expired_total", "single")
    expect(counter("dormouse_sequences_open", "patient"), 0)
    step(grpc_client, triton, "patient", 1, first, True)
    inputs = [tensor(triton, "INPUT", np.ones((1, 1), np.int32))]
    answers = queue.Queue()
    grpc_client.async_infer(
        "patient",
        inputs,
        lambda result, error: answers.put(error),
        sequence_id=second,
        sequence_start=True,
        sequence_end=True,
    )
    eventually(lambda: counter("dormouse_sequences_waiting", "patient") == 1)
    expect(counter("dormouse_sequences_open", "patient"), 2)
    step(grpc_client, triton, "patient", 1, first, False, True)
    expect(answers.get(timeout=60), None)
    eventually(lambda: counter("dormouse_sequences_open", "patient") == 0)
    expect(counter("dormouse_sequences_waiting", "patient"), 0)
    step(grpc_client, triton, "single", 1, first, True)
    eventually(lambda: counter("dormouse_sequences_expired_total", "single") > expired)


def eventually(holds):
    until = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.05)


@check
def a_cancelled_step_ends_its_sequence():
    first, second = next_id(), next_id()
    step(grpc_client, triton, "patient", 1, first, True)
    answers = queue.Queue()
    inputs = [tensor(triton, "INPUT", np.ones((1, 1), np.int32))]
    call = grpc_client.async_infer(
        "patient",
        inputs,
        lambda result, error: answers.put(error),
        sequence_id=second,
        sequence_start=True,
    )
    call.cancel()
    assert answers.get(timeout=60) is not None
    step(grpc_client, triton, "patient", 1, first, False, True)
    # The slot went to nobody: a third sequence gets it at once.
    whole_sequence(grpc_client, triton, "patient", next_id())


@check
def a_sequence_keeps_its_model_awake():
    id = next_id()
    step(grpc_client, triton, "sleepy", 4, id, True)
    deadline = time.monotonic() + 3
    while time.monotonic() < deadline:
        time.sleep(0.1)
        expect(loads("sleepy"), 1)
    expect(total(step(grpc_client, triton, "sleepy", 4, id, False, True)), 8)
    expect(loads("sleepy"), 1)
    # With nobody's sequence it goes to sleep again.
    for _ in range(600):
        if closes("sleepy") == 1:
            break
        time.sleep(0.1)
    expect(closes("sleepy"), 1)


def counter(name, model):
    import urllib.request

    text = urllib.request.urlopen(f"http://{args.metrics}/metrics", timeout=60).read().decode()
    for line in text.splitlines():
        if line.startswith(name + "{") and f'model="{model}"' in line:
            return int(float(line.rsplit(" ", 1)[1]))
    return 0


def loads(model):
    return counter("dormouse_loads_total", model)


def closes(model):
    return counter("dormouse_sleeps_total", model)


@check
def a_stateless_model_takes_no_notice_of_sequences():
    array = np.ones((1, 16), np.int32)
    for client, module in BOTH:
        inputs = [tensor(module, name, array) for name in ("INPUT0", "INPUT1")]
        result = client.infer("simple", inputs, sequence_id=7, sequence_start=True)
        same(result.as_numpy("OUTPUT0"), array + array)


def ragged(client, module, values, **options):
    array = np.array([values], np.float32)
    return client.infer("ragged", [tensor(module, "INPUT", array, "FP32")], **options)


@check
def a_ragged_batch_is_joined_and_described():
    barrier = threading.Barrier(3)

    def one(length):
        barrier.wait()
        return ragged(grpc_client, triton, range(length))

    with concurrent.futures.ThreadPoolExecutor(3) as pool:
        results = list(pool.map(one, (3, 4, 5)))
    ends = sorted(int(result.as_numpy("END").item()) for result in results)
    expect(ends[-1], 12)
    for length, result in zip((3, 4, 5), results):
        same(result.as_numpy("SUM"), np.array([[sum(range(length))]], np.float32))
        same(result.as_numpy("ELEMENTS"), np.array([[length]], np.float32))
        same(result.as_numpy("SHAPES"), np.array([[length, length]], np.int32))
        # The longest of the batch: it was one.
        same(result.as_numpy("MOST"), np.array([[5]]))
        same(result.as_numpy("DOUBLED"), 2 * np.arange(length, dtype=np.float32).reshape(1, -1))


@check
def a_ragged_request_alone_is_a_batch_as_well():
    for client, module in BOTH:
        result = ragged(client, module, [1, 2, 3, 4])
        same(result.as_numpy("SUM"), np.array([[10]], np.float32))
        same(result.as_numpy("MOST"), np.array([[4]]))
        same(result.as_numpy("DOUBLED"), np.array([[2, 4, 6, 8]], np.float32))


@check
def a_decoupled_model_is_asked_through_a_stream():
    array = np.ones((1, 16), np.int32)
    for (client, module), caller in zip(BOTH, ("ModelInfer RPC", "HTTP end point")):
        inputs = [tensor(module, name, array) for name in ("INPUT0", "INPUT1")]
        words = f"{caller} doesn't support models with decoupled transaction policy"
        error = fails(words, client.infer, "decoupled", inputs)
        expect_in(error.status(), ("StatusCode.UNIMPLEMENTED", "501"))
    assert grpc_client.get_model_config("decoupled").config.model_transaction_policy.decoupled
    answers = queue.Queue()
    with triton.InferenceServerClient(args.grpc) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        inputs = [tensor(triton, name, array) for name in ("INPUT0", "INPUT1")]
        for i in range(20):
            client.async_stream_infer(
                "decoupled", inputs, request_id=str(i), enable_empty_final_response=i % 2 == 0
            )
        for i in range(20):
            result, error = answers.get(timeout=60)
            expect(error, None)
            response = result.get_response()
            expect(response.id, str(i))
            expect(response.parameters["triton_final_response"].bool_param, True)
            same(result.as_numpy("OUTPUT0"), array + array)
        assert answers.empty(), "one answer each"
        client.stop_stream()


run()
