"""Attention of rows that are computed one by one, of all sequences together: what a row sees is a
row of a sparse matrix, for each of its heads.

    scores  = queries x keys, where they are seen
    weights = softmax of each row's
    found   = sums of values, with these weights

Keys and values are read where they are, whatever blocks they are in. A row's bits depend on nothing
but its own sequence: it has a width of its own, and no sum goes beyond its row.
"""

from __future__ import annotations

from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from shmserve.workers.backends.llm.model.cache import KvCache, Pass

_GRAIN = 16  # keys
_MOST_ROWS = 16  # of a sequence: those that verify what was proposed


class LoneRow(NamedTuple):
    """A row of a pass, at `place`: it sees `length` tokens of its sequence, and is computed with
    `width` keys, some more, so that there are few widths."""

    place: int
    length: int
    width: int
    table: list[int]


def lone_rows(rows: Pass, cache: KvCache) -> list[LoneRow]:
    """The rows of a pass that are computed one by one."""
    found: list[LoneRow] = []
    for span in rows.spans:
        if span.prompt or span.size > _MOST_ROWS:
            continue
        for index in range(span.size):
            length = span.before + index + 1
            grain = max(_GRAIN, 1 << length.bit_length() >> 3)
            width = min(length + -length % grain, cache.slots)
            found.append(LoneRow(span.first + index, length, width, span.table))
    return found


class Seen(NamedTuple):
    """What lone rows see. `pattern` [rows * heads of queries, keys and values, KV heads * slots] in
    CSR has their keys, which are in `columns`, too, and takes the scores of each layer; `hidden` is
    -inf for a key that fills a row up to its width, else 0. `parts`: how many of its values belong
    to rows of one width that follow one another, and this width; `ends`: where those of each head
    of all rows of the pass end."""

    pattern: torch.Tensor
    columns: torch.Tensor
    hidden: torch.Tensor
    ends: torch.Tensor
    parts: tuple[list[int], list[int]]

    @classmethod
    def of(cls, lone: list[LoneRow], rows: int, cache: KvCache) -> Self:
        """What these rows of a pass see, which has so many in all."""
        heads, kv_heads = cache.query_heads, cache.kv_heads
        columns, hidden, widths = [], [], []
        for width, same in groupby(lone, key=attrgetter("width")):
            slots, unseen = _keys(list(same), width, cache.block_slots)
            columns.append((slots[:, None] + cache.first_rows[:, None]).ravel())
            hidden.append(np.repeat(unseen, heads, 0).ravel())
            widths.append(width)
        counts = np.zeros((rows, heads + 2 * kv_heads), np.int32)
        for row in lone:
            counts[row.place, :heads] = row.width
        indices = torch.from_numpy(np.concatenate(columns))
        pattern = torch.sparse_csr_tensor(
            _ends(counts),
            indices,
            torch.zeros(len(indices)),
            (counts.size, kv_heads * cache.slots),
            check_invariants=False,
        )
        parts = [len(part) for part in columns], widths
        ends = _ends(counts[:, :heads])
        return cls(pattern, indices, torch.from_numpy(np.concatenate(hidden)), ends, parts)

    def attend(self, heads: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What these rows find in a layer's keys and values [KV heads * slots, head size], and 0
        for the other rows of the pass: [rows, heads * head size]; `heads` [rows, heads of queries,
        keys and values, head size]."""
        size = heads.shape[2]
        # Into the pattern itself: else its indices are copied for each layer.
        torch.sparse.sampled_addmm(
            self.pattern,
            heads.view(-1, size),
            keys.t(),
            beta=0.0,
            alpha=size**-0.5,
            out=self.pattern,
        )
        scores: Any = self.pattern.values() + self.hidden
        lengths, widths = self.parts
        if len(widths) == 1:
            weights = scores.view(-1, widths[0]).softmax(-1).view(-1)
        else:
            parts = zip(scores.split(lengths), widths, strict=True)
            weights = torch.cat(
                [part.view(-1, width).softmax(-1).view(-1) for part, width in parts]
            )
        found = torch._embedding_bag_forward_only(
            values, self.columns, self.ends, per_sample_weights=weights, include_last_offset=True
        )
        return found[0].view(heads.shape[0], -1)


def _ends(counts: np.ndarray) -> torch.Tensor:
    """0 and the running sums, int32."""
    ends = np.zeros(counts.size + 1, np.int32)
    np.cumsum(counts, out=ends[1:])
    return torch.from_numpy(ends)


def _keys(
    rows: list[LoneRow], width: int, block_slots: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The slots that rows of one width read, and what is added to their scores, [rows, width].
    Where a row ends before, it reads its first slot again: nobody else's."""
    count = -(-width // block_slots.shape[1])
    tables = [row.table[:count] + row.table[:1] * (count - len(row.table)) for row in rows]
    slots = block_slots[tables].reshape(len(rows), -1)[:, :width]
    hidden = np.zeros((len(rows), width), np.float32)
    for place, row in enumerate(rows):
        slots[place, row.length :] = slots[place, 0]
        hidden[place, row.length :] = -np.inf
    return slots, hidden
