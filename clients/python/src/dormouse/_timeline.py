"""What waking a model took, as told with the answer of the request that waited, and by statistics."""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from typing import Dict, List, Optional, Tuple

from ._wire import Message


@dataclass(frozen=True)
class Stage:
    """One stage of a cold start. Times are in seconds."""

    #: A short word: ``queue``, ``read``, ``populate``, ``session``, ``warmup``, ``first-run``.
    name: str
    duration: float
    #: From the start of the load, where the server tells.
    start: Optional[float] = None
    #: Bytes it moved, 0 when the server does not tell.
    bytes: int = 0
    #: Two stages on one lane never overlap.
    lane: int = 0
    #: It had not ended when the server told of it.
    running: bool = False


@dataclass(frozen=True)
class RequestTiming:
    """What the request that found its model asleep spent its time on, in seconds."""

    #: From its arrival to the start of its run.
    waited: float = 0.0
    #: The run that answered it.
    run: float = 0.0
    #: From its arrival to its answer.
    total: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """A cold start. Times are in seconds; ``str()`` draws it."""

    #: From the start of the load until the model could run. Stages may overlap, and those in the
    #: background may end later.
    total: float
    #: What the model was woken from: ``source``, ``prepared`` or ``parked``; empty when not told.
    kind: str = ""
    #: The stages in the order they started.
    stages: Tuple[Stage, ...] = ()
    #: The time that doing stages side by side saved.
    overlap: float = 0.0
    #: No request waited for it: it was loaded by hand or ahead of an expected request.
    ahead: bool = False
    #: When it began, where the server tells.
    started: Optional[datetime.datetime] = None
    #: What the request that was told of this spent; none in statistics.
    request: Optional[RequestTiming] = None

    @property
    def bytes(self) -> int:
        """Bytes moved by all stages."""
        return sum(stage.bytes for stage in self.stages)

    def __str__(self) -> str:
        kind = f" from {self.kind}" if self.kind else ""
        lines = [f"cold start{kind}: {_milliseconds(self.total)}"]
        whole = max([self.total, *((s.start or 0.0) + s.duration for s in self.stages)])
        for stage in self.stages:
            bar = ""
            if stage.start is not None and whole > 0:
                begin = round(40 * stage.start / whole)
                length = max(1, round(40 * stage.duration / whole))
                bar = (" " * begin + "█" * length).ljust(41)
            lines.append(f"  {stage.name:<12} {bar}{_milliseconds(stage.duration)}")
        if self.request is not None:
            lines.append(
                f"  request: waited {_milliseconds(self.request.waited)}, "
                f"ran {_milliseconds(self.request.run)}, {_milliseconds(self.request.total)} in all"
            )
        return "\n".join(lines)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


@dataclass
class _Entry:
    name: str
    parameters: Dict[str, str] = field(default_factory=dict)

    def seconds(self, key: str) -> Optional[float]:
        """A parameter in milliseconds, none when it is no time."""
        try:
            value = float(self.parameters[key]) / 1e3
        except (KeyError, ValueError):
            return None
        return value if math.isfinite(value) and value >= 0 else None

    def integer(self, key: str) -> int:
        text = self.parameters.get(key, "")
        return int(text) if text.isascii() and text.isdigit() else 0


def parse_server_timing(value: str) -> Optional[Timeline]:
    """Reads a ``Server-Timing`` value; none without a ``load`` entry: the model was warm."""
    load: Optional[_Entry] = None
    stages: List[Stage] = []
    request: Dict[str, float] = {}
    for text in _split_unquoted(value, ","):
        entry = _entry(text)
        duration = entry.seconds("dur")
        if duration is None or not entry.name:
            continue
        if entry.name == "load":
            load = entry
        elif entry.name in ("wait", "run", "total"):
            request["waited" if entry.name == "wait" else entry.name] = duration
        else:
            stages.append(Stage(entry.name, duration, entry.seconds("start"), entry.integer("bytes")))
    if load is None:
        return None
    return Timeline(
        total=load.seconds("dur") or 0.0,
        kind=load.parameters.get("desc", ""),
        stages=tuple(stages),
        overlap=load.seconds("overlap") or 0.0,
        request=RequestTiming(**request) if request else None,
    )


def _entry(text: str) -> _Entry:
    name, *parameters = _split_unquoted(text, ";")
    entry = _Entry(name.strip())
    for parameter in parameters:
        key, equals, value = parameter.partition("=")
        if equals:
            entry.parameters[key.strip().lower()] = value.strip().strip('"')
    return entry


def _split_unquoted(text: str, separator: str) -> List[str]:
    parts = [""]
    quoted = escaped = False
    for character in text:
        if character == separator and not quoted:
            parts.append("")
            continue
        parts[-1] += character
        if escaped:
            escaped = False
        elif character == "\\" and quoted:
            escaped = True
        elif character == '"':
            quoted = not quoted
    return parts


def from_message(told: Message) -> Timeline:
    """A cold start as statistics have it."""
    return Timeline(
        total=told.total_ns / 1e9,
        kind=told.kind,
        stages=tuple(
            Stage(
                name=stage.name,
                duration=stage.duration_ns / 1e9,
                start=stage.start_ns / 1e9,
                bytes=stage.bytes,
                lane=stage.lane,
                running=stage.running,
            )
            for stage in told.stages
        ),
        overlap=told.overlap_ns / 1e9,
        ahead=told.ahead,
        started=datetime.datetime.fromtimestamp(told.started_unix_ns / 1e9, tz=datetime.timezone.utc),
    )
