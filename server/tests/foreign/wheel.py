"""What a user has after installing the wheel: the command, and the client to call it with."""

import json
import pathlib
import subprocess
import sys

import dormouse
import numpy as np

prefix = pathlib.Path(sys.prefix)
assert pathlib.Path(dormouse.__file__).is_relative_to(prefix), dormouse.__file__
command = prefix / "bin" / "dormouse"
version = subprocess.run([command, "--version"], check=True, capture_output=True, text=True).stdout
assert version == f"dormouse {dormouse.__version__}\n", version
for place in ("man/man1/dormouse-serve.1", "bash-completion/completions/dormouse"):
    assert (prefix / "share" / place).is_file(), place

arguments = [f"--model-repository={sys.argv[1]}", "--log-format=json"]
for protocol in ("http", "grpc", "metrics"):
    arguments += [f"--{protocol}-port=0", f"--{protocol}-address=127.0.0.1"]
server = subprocess.Popen([command, "serve", *arguments], stderr=subprocess.PIPE, text=True)
try:
    for line in server.stderr:
        record = json.loads(line)
        if record.get("message") == "listening" and record.get("protocol") == "grpc":
            address = record["address"]
            break
    else:
        raise SystemExit("the server does not listen for gRPC")
    with dormouse.Client(address, timeout=120) as client:
        result = client.infer("simple", {"INPUT0": np.full((1, 16), 4, np.int32), "INPUT1": [[1] * 16]})
        assert result["OUTPUT0"].tolist() == [[5] * 16], result
        assert result.timeline is not None, "it was asleep"
        print(result.timeline)
finally:
    server.terminate()
    rest = server.communicate(timeout=60)[1]
assert server.returncode == 0, f"{server.returncode}: {rest}"
print("ok the wheel")
