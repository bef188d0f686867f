"""tritonclient's shared memory, classification, response cache, log and trace settings."""

import os
import threading
import urllib.request
from contextlib import contextmanager

import numpy as np
import tritonclient.grpc as triton_grpc
import tritonclient.http as triton_http
import tritonclient.utils.shared_memory as shm
from checks import arguments, cases, check, expect, expect_in, refuses, run
from tritonclient.utils import InferenceServerException, np_to_triton_dtype, serialize_byte_tensor

args = arguments()
PROTOCOLS = [
    ("grpc", triton_grpc, triton_grpc.InferenceServerClient(args.grpc)),
    ("http", triton_http, triton_http.InferenceServerClient(args.http)),
]
PREFIX = f"surface-{os.getpid()}"


@contextmanager
def region(client, name, size, offset=0):
    """A region of `size` bytes that is registered while it is used."""
    key = f"/{PREFIX}-{name}"
    handle = shm.create_shared_memory_region(name, key, size)
    try:
        client.register_system_shared_memory(name, key, size - offset, offset=offset)
        yield handle
    finally:
        client.unregister_system_shared_memory(name)
        shm.destroy_shared_memory_region(handle)


def shared_input(module, name, array, where, size=None, offset=0):
    tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_shared_memory(where, array.nbytes if size is None else size, offset)
    return tensor


def shared_output(module, name, where, size, offset=0):
    output = module.InferRequestedOutput(name)
    output.set_shared_memory(where, size, offset)
    return output


def plain_input(module, name, array):
    tensor = module.InferInput(name, list(array.shape), np_to_triton_dtype(array.dtype))
    tensor.set_data_from_numpy(array)
    return tensor


def regions(client):
    status = client.get_system_shared_memory_status()
    if isinstance(status, list):
        return {entry["name"]: (entry["key"], entry["offset"], entry["byte_size"]) for entry in status}
    return {name: (entry.key, entry.offset, entry.byte_size) for name, entry in status.regions.items()}


def statistics(client, model):
    found = client.get_inference_statistics(model)
    if isinstance(found, dict):
        (entry,) = found["model_stats"]
        counts = entry["inference_stats"]
        return {key: counts[key]["count"] for key in ("success", "cache_hit", "cache_miss")} | {
            "runs": entry["execution_count"]
        }
    (entry,) = found.model_stats
    counts = entry.inference_stats
    return {key: getattr(counts, key).count for key in ("success", "cache_hit", "cache_miss")} | {
        "runs": entry.execution_count
    }


@cases(PROTOCOLS)
def extensions_are_those_that_work(protocol):
    _, _, client = protocol
    metadata = client.get_server_metadata()
    found = metadata["extensions"] if isinstance(metadata, dict) else list(metadata.extensions)
    for name in ("classification", "system_shared_memory", "trace", "logging", "binary_tensor_data", "sequence"):
        expect_in(name, found)
    assert "cuda_shared_memory" not in found, found


@cases(PROTOCOLS)
def regions_come_and_go(protocol):
    _, _, client = protocol
    # What every client of Triton's examples begins with.
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    expect(regions(client), {})
    with region(client, "here", 64, offset=16):
        expect(regions(client), {"here": (f"/{PREFIX}-here", 16, 48)})
        error = refuses(
            lambda: client.register_system_shared_memory("here", f"/{PREFIX}-here", 8), InferenceServerException
        )
        expect_in("already", error.message())
        error = refuses(
            lambda: client.register_system_shared_memory("more", f"/{PREFIX}-here", 65), InferenceServerException
        )
        expect_in("which has 64", error.message())
    expect(regions(client), {})
    for key in ("/etc/passwd", "../etc/passwd", "/../../etc/passwd", f"/{PREFIX}-absent"):
        refuses(lambda: client.register_system_shared_memory("bad", key, 8), InferenceServerException)
    error = refuses(lambda: client.get_system_shared_memory_status("absent"), InferenceServerException)
    expect_in("unable to find", error.message())


@cases(PROTOCOLS)
def cuda_is_refused_as_without_a_gpu(protocol):
    _, _, client = protocol
    error = refuses(lambda: client.register_cuda_shared_memory("c", b"aGFuZGxl", 0, 64), InferenceServerException)
    expect_in("GPUs not supported", error.message())
    status = client.get_cuda_shared_memory_status()
    expect(len(status) if isinstance(status, list) else len(status.regions), 0)


@cases(PROTOCOLS)
def tensors_in_shared_memory(protocol):
    _, module, client = protocol
    left = np.arange(32, dtype=np.int32).reshape(2, 16)
    right = np.ones((2, 16), np.int32)
    size = left.nbytes
    with region(client, "in", 2 * size) as inputs, region(client, "out", 2 * size) as outputs:
        shm.set_shared_memory_region(inputs, [left, right])
        asked = [
            shared_output(module, "OUTPUT0", "out", size),
            shared_output(module, "OUTPUT1", "out", size, size),
        ]
        both = [
            shared_input(module, "INPUT0", left, "in"),
            shared_input(module, "INPUT1", right, "in", offset=size),
        ]
        answer = client.infer("simple", both, outputs=asked)
        for name, offset, wanted in (("OUTPUT0", 0, left + right), ("OUTPUT1", size, left - right)):
            output = answer.get_output(name)
            if isinstance(output, dict):
                shape = output["shape"]
                assert "data" not in output, output
            else:
                shape = list(output.shape)
                expect(output.parameters["shared_memory_region"].string_param, "out")
            expect(shape, [2, 16])
            np.testing.assert_array_equal(shm.get_contents_as_numpy(outputs, np.int32, shape, offset), wanted)
        # One in shared memory and one in the message, in either order; outputs likewise.
        for mixed in (
            [both[0], plain_input(module, "INPUT1", right)],
            [plain_input(module, "INPUT0", left), both[1]],
        ):
            answer = client.infer(
                "simple", mixed, outputs=[module.InferRequestedOutput("OUTPUT0"), asked[1]]
            )
            np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), left + right)
            np.testing.assert_array_equal(
                shm.get_contents_as_numpy(outputs, np.int32, [2, 16], size), left - right
            )


@cases(PROTOCOLS)
def strings_and_large_tensors_in_shared_memory(protocol):
    _, module, client = protocol
    words = np.array([[b"a", b"", "grün".encode()]], dtype=np.object_)
    data = serialize_byte_tensor(words)
    with region(client, "words", 4096) as handle:
        shm.set_shared_memory_region(handle, [data])
        tensor = module.InferInput("INPUT", [1, 3], "BYTES")
        tensor.set_shared_memory("words", len(data.item()))
        asked = [shared_output(module, "OUTPUT", "words", 2048, 2048)]
        client.infer("flat_bytes", [tensor], outputs=asked)
        found = shm.get_contents_as_numpy(handle, np.object_, [1, 3], 2048)
        np.testing.assert_array_equal(found, words)
    large = np.arange(3 << 20, dtype=np.float32).reshape(1, -1)
    with region(client, "large", 2 * large.nbytes) as handle:
        shm.set_shared_memory_region(handle, [large])
        asked = [shared_output(module, "OUTPUT", "large", large.nbytes, large.nbytes)]
        client.infer("flat_fp32", [shared_input(module, "INPUT", large, "large")], outputs=asked)
        found = shm.get_contents_as_numpy(handle, np.float32, large.shape, large.nbytes)
        np.testing.assert_array_equal(found, large)


@cases(PROTOCOLS)
def requests_beyond_their_region_are_refused(protocol):
    _, module, client = protocol
    array = np.ones((1, 16), np.int32)
    other = plain_input(module, "INPUT1", array)
    with region(client, "small", 64):
        for where, size, offset, part in (
            ("small", 64, 1, "invalid offset"),
            ("small", 64, 65, "invalid offset"),
            ("small", 65, 0, "invalid offset"),
            ("small", 2**62, 0, "invalid offset"),
            ("small", 60, 0, "expected 64 bytes"),
            ("nobody", 64, 0, "unable to find"),
        ):
            error = refuses(
                lambda: client.infer("simple", [shared_input(module, "INPUT0", array, where, size, offset), other]),
                InferenceServerException,
            )
            expect_in(part, error.message())
        inputs = [plain_input(module, "INPUT0", array), other]
        for where, size, offset, part in (
            ("small", 63, 0, "should be at least 64"),
            ("small", 64, 1, "invalid offset"),
            ("nobody", 64, 0, "unable to find"),
        ):
            asked = [shared_output(module, "OUTPUT0", where, size, offset)]
            error = refuses(lambda: client.infer("simple", inputs, outputs=asked), InferenceServerException)
            expect_in(part, error.message())


@cases(PROTOCOLS)
def a_region_cut_short_during_requests_is_an_error_of_theirs(protocol):
    _, module, client = protocol
    array = np.ones((1, 1 << 18), np.float32)
    with region(client, "cut", array.nbytes) as handle:
        shm.set_shared_memory_region(handle, [array])
        path = f"/dev/shm/{PREFIX}-cut"
        done = threading.Event()

        def cut():
            while not done.is_set():
                os.truncate(path, 0)
                os.truncate(path, array.nbytes)

        cutter = threading.Thread(target=cut)
        cutter.start()
        outcomes = set()
        try:
            tensor = shared_input(module, "INPUT", array, "cut")
            asked = [shared_output(module, "OUTPUT", "cut", array.nbytes)]
            for _ in range(60):
                try:
                    client.infer("flat_fp32", [tensor], outputs=asked)
                    outcomes.add("answered")
                except InferenceServerException as error:
                    expect_in("cut", error.message())
                    outcomes.add("refused")
        finally:
            done.set()
            cutter.join()
        os.truncate(path, 0)
        error = refuses(lambda: client.infer("flat_fp32", [tensor]), InferenceServerException)
        expect_in("which has 0", error.message())
        os.truncate(path, array.nbytes)
        client.infer("flat_fp32", [tensor], outputs=asked)
    assert outcomes, "no request was sent"
    expect(client.is_server_live(), True)


@cases(PROTOCOLS)
def a_region_unregistered_during_requests_is_found_or_not(protocol):
    _, module, client = protocol
    array = np.ones((1, 1 << 16), np.float32)
    other = type(client)(args.grpc if module is triton_grpc else args.http)
    with region(client, "fleeting", array.nbytes) as handle:
        shm.set_shared_memory_region(handle, [array])
        done = threading.Event()

        def flicker():
            while not done.is_set():
                other.unregister_system_shared_memory("fleeting")
                other.register_system_shared_memory("fleeting", f"/{PREFIX}-fleeting", array.nbytes)

        thread = threading.Thread(target=flicker)
        thread.start()
        try:
            for _ in range(60):
                try:
                    answer = client.infer("flat_fp32", [shared_input(module, "INPUT", array, "fleeting")])
                    np.testing.assert_array_equal(answer.as_numpy("OUTPUT"), array)
                except InferenceServerException as error:
                    expect_in("unable to find", error.message())
        finally:
            done.set()
            thread.join()
    other.close()


@cases(PROTOCOLS)
def classes_with_labels(protocol):
    _, module, client = protocol
    scores = np.array([[0.1, 0.7, 0.2, 0.05], [4, 3, 2, 9]], np.float32)
    for binary in (True, False):
        options = {} if module is triton_grpc else {"binary_data": binary}
        asked = [module.InferRequestedOutput("OUTPUT", class_count=2, **options)]
        found = client.infer("labelled", [plain_input(module, "INPUT", scores)], outputs=asked).as_numpy("OUTPUT")
        wanted = [[b"0.700000:1:dog", b"0.200000:2:fox"], [b"9.000000:3", b"4.000000:0:cat"]]
        found = [[bytes(item) if isinstance(item, bytes) else item.encode() for item in row] for row in found]
        expect(found, wanted)
    # More classes than there are, of a model without rows and without labels.
    asked = [module.InferRequestedOutput("OUTPUT", class_count=9)]
    found = client.infer("flat_int32", [plain_input(module, "INPUT", np.array([[5, -2, 9]], np.int32))], outputs=asked)
    expect(list(found.as_numpy("OUTPUT")), [b"9:2", b"5:0", b"-2:1"])
    words = np.array([[b"a"]], dtype=np.object_)
    tensor = module.InferInput("INPUT", [1, 1], "BYTES")
    tensor.set_data_from_numpy(words)
    error = refuses(lambda: client.infer("flat_bytes", [tensor], outputs=asked), InferenceServerException)
    expect_in("unsupported type 'BYTES'", error.message())


@cases(PROTOCOLS)
def equal_requests_are_answered_from_the_cache(protocol):
    label, module, client = protocol
    base = 100 if label == "grpc" else 200

    def ask(value, **options):
        left = np.full((1, 16), value, np.int32)
        inputs = [plain_input(module, "INPUT0", left), plain_input(module, "INPUT1", np.ones((1, 16), np.int32))]
        answer = client.infer("cached", inputs, **options)
        np.testing.assert_array_equal(answer.as_numpy("OUTPUT0"), left + 1)
        return answer

    ask(base)
    before = statistics(client, "cached")
    first = ask(base, request_id="one").get_response()
    expect(first["id"] if isinstance(first, dict) else first.id, "one")
    ask(base)
    after = statistics(client, "cached")
    expect({key: after[key] - before[key] for key in after}, {"success": 2, "cache_hit": 2, "cache_miss": 0, "runs": 0})
    # Other inputs and other outputs are other requests.
    ask(base + 1)
    ask(base, outputs=[module.InferRequestedOutput("OUTPUT0")])
    again = statistics(client, "cached")
    expect({key: again[key] - after[key] for key in again}, {"success": 2, "cache_hit": 0, "cache_miss": 2, "runs": 2})
    # Models that do not ask for it are not cached.
    for _ in range(2):
        client.infer("simple", [plain_input(module, name, np.ones((1, 16), np.int32)) for name in ("INPUT0", "INPUT1")])
    expect(statistics(client, "simple")["cache_miss"], 0)


@check
def the_cache_is_counted_in_metrics():
    text = urllib.request.urlopen(f"http://{args.metrics}/metrics").read().decode()
    for name in ("num_hits", "num_misses", "hit_duration", "miss_duration"):
        expect_in(f'nv_cache_{name}_per_model{{model="cached",version="1"}}', text)
    assert 'nv_cache_num_hits_per_model{model="simple"' not in text


def plain(settings):
    """Settings as a dict of plain values, whatever the protocol."""
    if isinstance(settings, dict):
        return settings
    found = {}
    for name, value in settings.settings.items():
        if hasattr(value, "value"):
            found[name] = list(value.value)
            if name != "trace_level":
                (found[name],) = found[name]
        else:
            found[name] = getattr(value, value.WhichOneof("parameter_choice"))
    return found


@cases(PROTOCOLS)
def log_settings(protocol):
    _, _, client = protocol
    before = plain(client.get_log_settings())
    expect(before["log_file"], "")
    expect((before["log_info"], before["log_verbose_level"], before["log_format"]), (True, 0, "json"))
    changed = plain(client.update_log_settings({"log_verbose_level": 1, "log_warning": False}))
    expect((changed["log_verbose_level"], changed["log_warning"], changed["log_info"]), (1, False, True))
    expect(plain(client.get_log_settings()), changed)
    for settings, part in (
        ({"log_file": "/tmp/stolen"}, "log file location"),
        ({"log_file": ""}, "log file location"),
        ({"log_format": "xml"}, "log_format"),
        ({"log_loudness": 11}, "log_loudness"),
        ({"log_info": False, "log_file": "x"}, "log file location"),
    ):
        error = refuses(lambda: client.update_log_settings(settings), InferenceServerException)
        expect_in(part, error.message())
    expect(plain(client.get_log_settings()), changed)
    expect(plain(client.update_log_settings({"log_verbose_level": 0, "log_warning": True})), before)
    assert not os.path.exists("/tmp/stolen")


@cases(PROTOCOLS)
def trace_settings(protocol):
    _, _, client = protocol
    before = plain(client.get_trace_settings())
    expect(before, {"trace_file": "", "trace_level": ["OFF"], "trace_rate": "1000", "trace_count": "-1", "log_frequency": "0"})
    settings = {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "2", "trace_count": "5"}
    changed = plain(client.update_trace_settings(settings=settings))
    expect((changed["trace_level"], changed["trace_rate"], changed["trace_count"]), (["TIMESTAMPS", "TENSORS"], "2", "5"))
    own = plain(client.update_trace_settings("simple", {"trace_level": "OFF", "trace_rate": "7"}))
    expect((own["trace_level"], own["trace_rate"], own["trace_count"]), (["OFF"], "7", "5"))
    expect(plain(client.get_trace_settings("cached"))["trace_rate"], "2")
    cleared = plain(client.update_trace_settings("simple", {"trace_level": None, "trace_rate": None}))
    expect((cleared["trace_level"], cleared["trace_rate"]), (["TIMESTAMPS", "TENSORS"], "2"))
    for settings, part in (
        ({"trace_file": "/tmp/stolen"}, "trace file location"),
        ({"trace_level": ["LOUD"]}, "LOUD"),
        ({"trace_rate": "0"}, "trace_rate"),
        ({"trace_colour": "red"}, "trace_colour"),
    ):
        error = refuses(lambda: client.update_trace_settings(settings=settings), InferenceServerException)
        expect_in(part, error.message())
    error = refuses(lambda: client.get_trace_settings("nobody"), InferenceServerException)
    expect_in("nobody", error.message())
    everything = {name: None for name in ("trace_level", "trace_rate", "trace_count", "log_frequency")}
    expect(plain(client.update_trace_settings(settings=everything)), before)


run()
