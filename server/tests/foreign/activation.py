"""Socket activation for real: holds the sockets, starts the server when somebody connects.

Arguments: how many rounds, how long the server idles (seconds), then the server's command line.
The server ends by itself when idle. Clients come at moments around that end; each has to be
answered, by the process that is leaving or by the next one.
"""

import json
import os
import random
import select
import socket
import subprocess
import sys
import threading
import time
import urllib.request

rounds, idle, *command = sys.argv[1:]
rounds, idle = int(rounds), float(idle)
PATIENCE = 120


def listening():
    opened = socket.socket()
    opened.bind(("127.0.0.1", 0))
    opened.listen(64)
    return opened


http, grpc = listening(), listening()
notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
notify.settimeout(PATIENCE)
notify.bind("\0dormouse-test-%d" % os.getpid())
done = threading.Event()
starts, statuses, said = 0, [], []


# Where a shell can reach them: it knows descriptors of one digit only.
os.dup2(grpc.fileno(), 8)
os.dup2(http.fileno(), 9)
# The process id is known only to the process itself, which the server then takes over.
SHELL = 'export LISTEN_PID=$$; exec "$@" 3<&8 4<&9 8<&- 9<&-'


def start():
    """The server in a new process with the sockets as descriptors 3 and 4."""
    environment = {
        **os.environ,
        "LISTEN_FDS": "2",
        "LISTEN_FDNAMES": "grpc:http",
        "NOTIFY_SOCKET": "@dormouse-test-%d" % os.getpid(),
    }
    shell = ["sh", "-c", SHELL, "sh", *command]
    return subprocess.Popen(shell, env=environment, pass_fds=(8, 9), stdin=subprocess.DEVNULL)


def activate():
    """systemd's part: one process at a time, started by whatever waits in the sockets."""
    global starts
    while not done.is_set():
        waiting, _, _ = select.select([http, grpc], [], [], 0.05)
        if not waiting:
            continue
        starts += 1
        child = start()
        said.append([])
        while b"STOPPING=1" not in said[-1]:
            said[-1].append(notify.recv(64))
        statuses.append(child.wait(PATIENCE))


def call(number):
    inputs = [
        {"name": name, "shape": [1, 16], "datatype": "INT32", "data": [number] * 16}
        for name in ("INPUT0", "INPUT1")
    ]
    body = json.dumps({"inputs": inputs}).encode()
    url = "http://127.0.0.1:%d/v2/models/simple/infer" % http.getsockname()[1]
    with urllib.request.urlopen(urllib.request.Request(url, body), timeout=PATIENCE) as answer:
        (first, *_) = json.load(answer)["outputs"]
        assert first["data"] == [2 * number] * 16, first


activator = threading.Thread(target=activate)
activator.start()
chance = random.Random(7)
try:
    for number in range(rounds):
        call(number)
        if number % 2 == 0:
            # Wait until all have ended, so that the next connection has to start a process.
            patience = time.monotonic() + PATIENCE
            while len(statuses) < starts and time.monotonic() < patience:
                time.sleep(0.005)
            assert len(statuses) == starts, "the server did not end when idle"
        else:
            # Around the end: as it decides, as it leaves, just after.
            time.sleep(idle * chance.uniform(0.9, 1.15))
        print("ok round", number, flush=True)
finally:
    done.set()
    activator.join(PATIENCE)
assert statuses and set(statuses) == {0}, f"exits: {statuses}"
assert starts > rounds // 2, f"{starts} starts in {rounds} rounds"
for words in said:
    assert words == [b"READY=1", b"STOPPING=1"], words
print("ok", starts, "processes")
