"""The client for threads against a live server."""

import threading
import time
from typing import Any, List

import numpy as np
import pytest

import dormouse
from dormouse import Client
from dormouse._tensors import BF16

ARRAYS = {
    "bool": np.array([[True, False, True]]),
    "uint8": np.array([[0, 255]], np.uint8),
    "uint16": np.array([[0, 65535]], np.uint16),
    "uint32": np.array([[0, 2**32 - 1]], np.uint32),
    "uint64": np.array([[0, 2**64 - 1]], np.uint64),
    "int8": np.array([[-128, 127]], np.int8),
    "int16": np.array([[-(2**15), 2**15 - 1]], np.int16),
    "int32": np.array([[-(2**31), 2**31 - 1]], np.int32),
    "int64": np.array([[-(2**63), 2**63 - 1]], np.int64),
    "fp16": np.array([[1.5, -np.inf]], np.float16),
    "bf16": np.array([[1.5, -2.0]], BF16),
    "fp32": np.array([[1.5, np.nan, -0.0]], np.float32),
    "fp64": np.array([[1.5, np.inf]], np.float64),
    "bytes": np.array([[b"", "ä\0".encode(), b"\xff" * 300]], object),
}


def ones() -> "np.ndarray[Any, np.dtype[np.int32]]":
    return np.ones((1, 16), np.int32)


@pytest.mark.parametrize("kind", sorted(ARRAYS))
def test_every_datatype_comes_back_as_it_went(client: Client, kind: str) -> None:
    array = ARRAYS[kind]
    result = client.infer(f"identity_{kind}", {"INPUT": array})
    assert list(result) == ["OUTPUT"]
    output = result["OUTPUT"]
    assert output.dtype == array.dtype
    assert output.shape == array.shape
    if array.dtype == object:
        assert output.tolist() == array.tolist()
    else:
        assert output.tobytes() == array.tobytes()


def test_what_is_not_contiguous_or_not_little_endian_arrives_as_well(client: Client) -> None:
    array = np.arange(12, dtype=">i4").reshape(3, 4).T
    output = client.infer("identity_int32", {"INPUT": array})["OUTPUT"]
    assert output.tolist() == array.tolist()
    fortran = np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3))
    assert client.infer("identity_fp32", {"INPUT": fortran})["OUTPUT"].tolist() == fortran.tolist()


def test_lists_and_strings_become_what_the_model_wants(client: Client) -> None:
    result = client.infer("simple", {"INPUT0": [list(range(16))], "INPUT1": [[1] * 16]})
    assert result["OUTPUT0"].tolist() == [[n + 1 for n in range(16)]]
    assert client.infer("identity_bytes", {"INPUT": [["é", b"x"]]})["OUTPUT"].tolist() == [
        ["é".encode(), b"x"]
    ]
    assert client.infer("identity_fp32", {"INPUT": [[1, 2.5]]})["OUTPUT"].tolist() == [[1.0, 2.5]]
    assert client.infer("identity_bf16", {"INPUT": [[1, 2.5]]})["OUTPUT"].astype(float).tolist() == [
        [1.0, 2.5]
    ]
    unicode = client.infer("identity_bytes", {"INPUT": np.array([["mäuse"]])})
    assert unicode["OUTPUT"].tolist() == [["mäuse".encode()]]


def test_bf16_may_be_given_by_its_bits(client: Client) -> None:
    bits = np.array([[0x3FC0, 0xC000]], np.uint16)
    assert client.infer("identity_bf16", {"INPUT": bits})["OUTPUT"].tobytes() == bits.tobytes()


def test_an_empty_tensor_is_a_tensor(client: Client) -> None:
    output = client.infer("flat_fp32", {"INPUT": np.zeros((0, 3), np.float32)})["OUTPUT"]
    assert output.shape == (0, 3)


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"INPUT0": ones(), "X": ones()}, "model 'simple' has no input 'X'; it has INPUT0, INPUT1"),
        ({"INPUT0": ones().astype(np.float64)}, "is INT32, given FP64: convert it to numpy's int32"),
        ({"INPUT0": ones()[:, :3]}, "has the shape [-1, 16], given [1, 3]"),
        ({"INPUT0": ones()[0]}, "has the shape [-1, 16], given [16]"),
        ({"INPUT0": [[1.5] * 16]}, "is INT32: float64 values are not INT32"),
        ({"INPUT0": [[2**40] * 16]}, "is INT32: values beyond the range of INT32"),
        ({"INPUT0": [["a"] * 16]}, "values are not INT32"),
        ({"INPUT0": [[1], [1, 2]]}, "is INT32: setting an array element with a sequence"),
        ({"INPUT0": ones().astype(np.complex64)}, "which the protocol does not have"),
    ],
)
def test_what_does_not_fit_the_signature_is_not_sent(client: Client, inputs: Any, says: str) -> None:
    before = client.statistics("simple")[0].fail.count
    with pytest.raises(dormouse.InvalidInput) as refused:
        client.infer("simple", inputs)
    assert says in str(refused.value)
    assert client.statistics("simple")[0].fail.count == before


def test_an_output_that_there_is_not_is_not_asked_for(client: Client) -> None:
    with pytest.raises(dormouse.InvalidInput, match="has no output 'Z'; it has OUTPUT0, OUTPUT1"):
        client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}, outputs=["Z"])


def test_elements_of_bytes_must_be_bytes_or_text(client: Client) -> None:
    with pytest.raises(dormouse.InvalidInput, match="element 1 is of type int; a BYTES tensor holds"):
        client.infer("identity_bytes", {"INPUT": np.array([["a", 3]], object)})


def test_only_the_outputs_asked_for_are_answered(client: Client) -> None:
    result = client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}, outputs=["OUTPUT1"], id="7")
    assert (list(result), result.id, result.model_name, result.model_version) == (
        ["OUTPUT1"],
        "7",
        "simple",
        "1",
    )
    assert result.as_numpy("OUTPUT0") is None


def test_a_version_can_be_chosen(client: Client) -> None:
    inputs = {"INPUT0": ones() * 3, "INPUT1": ones()}
    first = client.infer("versions", inputs, version="1")
    second = client.infer("versions", inputs, version="2")
    assert first["OUTPUT0"].tolist() == second["OUTPUT1"].tolist() != second["OUTPUT0"].tolist()


def test_the_server_has_the_last_word(client: Client) -> None:
    with pytest.raises(dormouse.InvalidRequestError) as refused:
        client.infer("simple", {"INPUT0": ones()})
    assert "INPUT1" in refused.value.message
    with pytest.raises(dormouse.NotFoundError):
        client.infer("nobody", {"INPUT0": ones()})
    with pytest.raises(dormouse.NotFoundError):
        client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}, version="9")


def test_unchecked_requests_are_judged_by_the_server(url: str) -> None:
    with Client(url, check=False) as client, pytest.raises(dormouse.InvalidRequestError):
        client.infer("simple", {"INPUT0": np.ones((1, 16)), "INPUT1": ones()})


def test_options_that_there_are_not_are_refused(client: Client) -> None:
    options: Any = {"priorty": 1}
    with pytest.raises(TypeError, match="there is no option 'priorty'"):
        client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}, **options)
    misspelt: Any = {"tokn": "x"}
    with pytest.raises(TypeError, match="there is no option 'tokn'"):
        Client("localhost", **misspelt)
    with pytest.raises(TypeError, match="takes a list of names"):
        client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}, outputs="OUTPUT0")


def test_a_cold_start_is_told_to_who_paid_for_it(client: Client) -> None:
    client.unload("scalar")
    client.load("scalar", config={"parameters": {"dormouse.keep_alive": {"string_value": "off"}}})
    metadata = client.model_metadata("scalar")
    (spec,) = metadata.inputs
    inputs = {spec.name: np.zeros(tuple(max(n, 1) for n in spec.shape), np.float32)}
    told = [client.infer("scalar", inputs).timeline for _ in range(3)]
    cold = [timeline for timeline in told if timeline is not None]
    assert cold, "closed after each run, it woke at least once"
    last = cold[-1]
    assert last.total > 0 and last.stages and last.request is not None
    assert last.request.total >= last.request.run
    assert last.kind in ("source", "prepared")
    assert f"cold start from {last.kind}: " in str(last)
    (statistics,) = client.statistics("scalar")
    assert statistics.cold_starts and statistics.cold_starts[-1].started is not None
    assert statistics.cold_starts[-1].stages[0].start is not None


def test_a_warm_answer_has_no_timeline(client: Client) -> None:
    client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()})
    assert client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()}).timeline is None


def iterations(number: int) -> Any:
    return {"ITERATIONS": np.array([number])}


def test_deadlines_hold(client: Client) -> None:
    client.infer("slow", iterations(1))
    with pytest.raises(dormouse.DeadlineError) as late:
        client.infer("slow", iterations(10**9), timeout=0.2)
    assert isinstance(late.value, TimeoutError)


def test_a_request_under_way_can_be_awaited_or_given_up(client: Client) -> None:
    inputs = {"INPUT0": ones(), "INPUT1": ones()}
    called: List[dormouse.Pending] = []
    done = threading.Event()
    pending = client.submit("simple", inputs)
    pending.add_done_callback(called.append)
    pending.add_done_callback(lambda _: done.set())
    assert pending.result(60)["OUTPUT0"].tolist() == [[2] * 16]
    assert done.wait(60) and called == [pending] and pending.done()
    assert not pending.cancel()
    given_up = client.submit("slow", iterations(10**9))
    given_up.cancel()
    with pytest.raises(dormouse.RequestCancelled):
        given_up.result(60)


def test_a_stream_answers_every_request(client: Client) -> None:
    with client.stream(timeout=60) as stream:
        for n in range(100):
            stream.send("simple", {"INPUT0": ones() * n, "INPUT1": ones()}, id=str(n))
        stream.finish()
        seen = {int(result.id): result["OUTPUT0"][0, 0] for result in stream}
    assert seen == {n: n + 1 for n in range(100)}


def test_a_failed_request_does_not_end_the_stream(client: Client) -> None:
    with client.stream(timeout=60) as stream:
        stream.send("simple", {"INPUT0": ones()}, id="bad")
        with pytest.raises(dormouse.RequestFailed) as failed:
            next(stream)
        assert failed.value.id == "bad" and "INPUT1" in failed.value.message
        stream.send("simple", {"INPUT0": ones(), "INPUT1": ones()}, id="good")
        assert next(stream).id == "good"
        stream.finish()
        assert list(stream) == []
        with pytest.raises(dormouse.StreamClosed):
            stream.send("simple", {"INPUT0": ones(), "INPUT1": ones()})


def test_a_stream_leaves_no_thread_behind(client: Client) -> None:
    with client.stream(timeout=60) as stream:
        stream.send("simple", {"INPUT0": ones(), "INPUT1": ones()})
        next(stream)
    before = threading.active_count()
    for _ in range(5):
        with client.stream(timeout=60):
            pass
    until = time.monotonic() + 60
    while threading.active_count() > before and time.monotonic() < until:
        time.sleep(0.01)
    assert threading.active_count() <= before


def test_the_last_answer_of_a_request_is_marked_on_demand(client: Client) -> None:
    with client.stream(timeout=60) as stream:
        inputs = {"INPUT0": ones(), "INPUT1": ones()}
        stream.send("simple", inputs, empty_final_response=True)
        assert next(stream).final


def test_a_stream_ends_with_its_deadline(client: Client) -> None:
    with client.stream(timeout=0.05) as stream, pytest.raises(dormouse.DeadlineError):
        next(stream)


def test_models_are_loaded_and_unloaded(client: Client) -> None:
    client.unload("flat_int8")
    assert not client.is_model_ready("flat_int8")
    entry = next(entry for entry in client.index() if entry.name == "flat_int8")
    assert not entry.ready
    client.load("flat_int8")
    assert client.is_model_ready("flat_int8")
    assert "flat_int8" in {entry.name for entry in client.index(ready=True)}
    with pytest.raises(dormouse.ServerError) as refused:
        client.load("corrupt")
    assert refused.value.message


def test_what_the_server_says_of_itself(client: Client) -> None:
    assert client.is_live() and client.is_ready()
    metadata = client.server_metadata()
    assert metadata.name and "model_repository" in metadata.extensions
    model = client.model_metadata("simple")
    assert str(model.inputs[0]) == "INPUT0: INT32[-1, 16]"
    assert client.model_config("simple")["backend"] == "onnxruntime"
    client.infer("simple", {"INPUT0": ones(), "INPUT1": ones()})
    (statistics,) = client.statistics("simple")
    assert statistics.inference_count >= 1 and statistics.success.seconds > 0
    assert statistics.last_inference is not None and statistics.batches


def test_threads_share_a_client(client: Client) -> None:
    wrong: List[Any] = []

    def call(n: int) -> None:
        for _ in range(20):
            result = client.infer("simple", {"INPUT0": ones() * n, "INPUT1": ones()})
            if result["OUTPUT0"][0, 0] != n + 1:
                wrong.append(result)

    threads = [threading.Thread(target=call, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("compression", ["gzip", "deflate"])
def test_requests_may_be_compressed(url: str, compression: str) -> None:
    with Client(url, compression=compression) as client:
        array = np.zeros((1, 10_000), np.float32)
        assert client.infer("identity_fp32", {"INPUT": array})["OUTPUT"].shape == (1, 10_000)
