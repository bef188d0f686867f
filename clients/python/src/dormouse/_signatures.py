"""Models' signatures, asked for once and again when one seems to be out of date."""

from __future__ import annotations

import threading
from typing import Dict, Optional, Tuple

from ._models import ModelMetadata

Key = Tuple[str, str]

MOST = 10_000
"""Signatures that are kept; beyond that, all are forgotten and asked for anew."""


class Signatures:
    """By model and version. Safe to use from several threads."""

    def __init__(self) -> None:
        self._known: Dict[Key, ModelMetadata] = {}
        self._lock = threading.Lock()

    def get(self, model: str, version: str) -> Optional[ModelMetadata]:
        """What is known of a model."""
        with self._lock:
            return self._known.get((model, version))

    def put(self, model: str, version: str, signature: ModelMetadata) -> None:
        """Remembers what the server said."""
        with self._lock:
            if len(self._known) >= MOST:
                self._known.clear()
            self._known[model, version] = signature

    def forget(self, model: str) -> None:
        """Forgets all versions of a model."""
        with self._lock:
            for key in [key for key in self._known if key[0] == model]:
                del self._known[key]
