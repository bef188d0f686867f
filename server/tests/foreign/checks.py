"""What every script here shares: its arguments, its checks and its exit code."""

import argparse
import asyncio
import inspect
import sys
import traceback

_checks = []


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--http", required=True, help="host:port of the HTTP listener")
    parser.add_argument("--grpc", required=True, help="host:port of the gRPC listener")
    parser.add_argument("--metrics", required=True, help="host:port of the metrics listener")
    parser.add_argument("--pid", type=int, required=True, help="the server's process id")
    parsed = parser.parse_args()
    # Some client libraries read the command line of whoever imports them.
    del sys.argv[1:]
    return parsed


def check(function):
    """Registers a check; it passes when it returns."""
    _checks.append(function)
    return function


def cases(values):
    """Registers one check per value."""

    def register(function):
        for value in values:
            def one(*arguments, value=value, function=function):
                return function(*arguments, value)

            name = value if isinstance(value, str) else value[0]
            one.__name__ = f"{function.__name__}[{name}]"
            _checks.append(one)
        return function

    return register


def run(*context):
    """Runs all checks in order, prints a line for each, and exits."""
    failed = 0
    for function in _checks:
        name = function.__name__
        try:
            result = function(*context)
            if inspect.isawaitable(result):
                raise TypeError("an asynchronous check needs run_async")
            print(f"ok {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    finish(failed)


async def run_async(*context):
    """Like `run` for coroutines, all on one event loop."""
    failed = 0
    for function in _checks:
        name = function.__name__
        try:
            await asyncio.wait_for(function(*context), 120)
            print(f"ok {name}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED {name}\n{traceback.format_exc()}", flush=True)
    finish(failed)


def finish(failed):
    print(f"{len(_checks) - failed} of {len(_checks)} checks passed", flush=True)
    sys.exit(1 if failed or not _checks else 0)


def expect(found, wanted, what="value"):
    if found != wanted:
        raise AssertionError(f"{what}: found {found!r}, wanted {wanted!r}")


def expect_in(part, whole, what="text"):
    if part not in whole:
        raise AssertionError(f"{what}: no {part!r} in {whole!r}")


def refuses(function, *exceptions):
    """Calls `function`, which has to raise one of `exceptions`, and returns what it raised."""
    try:
        answer = function()
    except exceptions as error:
        return error
    raise AssertionError(f"was not refused: {answer!r}")


def rss(pid):
    """Bytes of memory the process holds."""
    with open(f"/proc/{pid}/status") as status:
        for line in status:
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    raise AssertionError(f"process {pid} has no VmRSS: it is gone")
