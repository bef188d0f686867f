"""When a refused call is sent again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Optional, Union

import grpc

from .errors import InvalidInput, ServerError


@dataclass(frozen=True)
class RetryPolicy:
    """When a call that was refused before anything was answered is sent again.

    Those are calls that end with ``UNAVAILABLE``, and with ``RESOURCE_EXHAUSTED`` if the server
    says when to try again. Requests that belong to a sequence, requests on a stream and those of
    ``submit`` are never sent twice. A wait never goes past the call's deadline.
    """

    #: How often a call is sent at most, the first time included; 1 turns retries off.
    attempts: int = 4
    #: Seconds before the second attempt; doubled for each one after it, half of it at random.
    first_wait: float = 0.05
    #: No wait is longer; a server that asks for more gets no further attempt.
    longest_wait: float = 10.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_wait < 0 or self.longest_wait < 0:
            raise InvalidInput(f"{self} makes no sense: attempts from 1, waits from 0")

    def wait_after(self, attempt: int, error: ServerError, chance: Optional[float] = None) -> Optional[float]:
        """Seconds to wait after ``attempt`` (from 1) failed like this; none when it was the last."""
        if attempt >= self.attempts:
            return None
        if chance is None:
            chance = random.random()
        if error.retry_after is not None and error.code in (
            grpc.StatusCode.UNAVAILABLE,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
        ):
            # Spread after the hinted time, never before it: everybody was told the same.
            wait = error.retry_after
            return wait * (1 + chance / 10) if wait <= self.longest_wait else None
        if error.code is not grpc.StatusCode.UNAVAILABLE:
            return None
        doubled = self.first_wait * 2.0 ** min(attempt - 1, 60)
        return min(doubled, self.longest_wait) * (0.5 + chance / 2)


NEVER = RetryPolicy(attempts=1)


def policy(retry: Union[RetryPolicy, bool]) -> RetryPolicy:
    """A policy, or the usual one, or none."""
    if isinstance(retry, RetryPolicy):
        return retry
    return RetryPolicy() if retry else NEVER
