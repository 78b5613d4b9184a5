"""What each request's tokens are: one 64-bit content key a position, the same for the same content at that position.

Keys are the only identity that the replay knows. Keys of shared prompt blocks agree between requests, keys of
generated tokens belong to one request, and the key of a compressed entry is made from the keys of its tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from swa_backend.replay.hashing import mix, salt
from swa_backend.replay.traces import BLOCK_TOKENS, Request

_U = np.uint64


class Histories:
    """Content keys of all requests of a trace, each request's in one contiguous piece.

    Args:
        requests: the trace.
        seed: changes all content.
        ratios: compression ratios for which entry keys are kept.
    """

    def __init__(self, requests: Sequence[Request], seed: int, ratios: Iterable[int]) -> None:
        lengths = np.array([request.total_length for request in requests], dtype=np.int64)
        self.base = _starts(lengths)  # [requests] first key of each request
        self.keys = np.empty(int(lengths.sum()), dtype=_U)
        self.entry_base = {ratio: _starts(lengths // ratio) for ratio in ratios}
        self.entry_keys = {
            ratio: np.empty(int((lengths // ratio).sum()), dtype=_U) for ratio in self.entry_base
        }  # complete entries only
        self.changes = 0  # counts what `reject` and `restore` do to the keys
        self._seed = seed
        self._rejected: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        for request in requests:
            start = self.base[request.id]
            self.keys[start : start + request.total_length] = self._request_keys(request)
            for ratio, keys in self.entry_keys.items():
                first = self.entry_base[ratio][request.id]
                count = request.total_length // ratio
                keys[first : first + count] = self._entries(start, np.arange(count), ratio)

    def of(self, request: int) -> np.ndarray:
        """Keys [total_length] of a request; a view."""
        start = self.base[request]
        end = self.base[request + 1] if request + 1 < len(self.base) else len(self.keys)
        return self.keys[start:end]

    def chain(self, request: int) -> np.ndarray:
        """[total_length] uint64: value p stands for all content of positions 0..p."""
        chained: np.ndarray = mix(np.cumsum(mix(self.of(request)), dtype=_U))
        return chained

    def reject(self, request: int, first: int, count: int) -> None:
        """Put other content at draft positions first .. first+count-1 of a request, until `restore`."""
        start = self.base[request]
        where = np.arange(start + first, start + first + count)
        self._swap(self.keys, where, mix(self.keys[where] ^ salt(self._seed, "rejected", first)))
        for ratio, keys in self.entry_keys.items():
            complete = (len(self.of(request))) // ratio
            entries = np.arange(first // ratio, min((first + count - 1) // ratio + 1, complete))
            self._swap(keys, self.entry_base[ratio][request] + entries, self._entries(start, entries, ratio))

    def restore(self) -> None:
        """Undo every `reject`."""
        while self._rejected:
            array, where, old = self._rejected.pop()
            array[where] = old
            self.changes += 1

    def _swap(self, array: np.ndarray, where: np.ndarray, new: np.ndarray) -> None:
        self._rejected.append((array, where, array[where]))
        array[where] = new
        self.changes += 1

    def _request_keys(self, request: Request) -> np.ndarray:
        positions = np.arange(request.total_length, dtype=_U)
        own = salt(self._seed, "own", request.id)
        ids = np.full(request.total_length, own, dtype=_U)
        if request.blocks is not None:
            shared = mix(np.array(request.blocks, dtype=_U) ^ salt(self._seed, "block"))
            ids[: request.input_length] = np.repeat(shared, BLOCK_TOKENS)[: request.input_length]
        return mix(ids ^ mix(positions))

    def _entries(self, start: int, entries: np.ndarray, ratio: int) -> np.ndarray:
        tokens = self.keys[start + entries[:, None] * ratio + np.arange(ratio)]
        return mix(mix(tokens).sum(axis=1, dtype=_U) ^ salt("entry", ratio))


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype(np.int64)
