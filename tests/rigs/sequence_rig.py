"""A scheduler of sequences without process, socket or clock: which rows its instances are given."""

from typing import Any

from shmserve.ipc.messages import inference as m
from shmserve.ipc.messages.publications import ProcessExited
from shmserve.ipc.tensors.schemas import SEQUENCE_END, SEQUENCE_START
from shmserve.ipc.transport.router import trailing_pid
from tests.rigs.scheduler_rig import GATEWAY, Rig

START, END = SEQUENCE_START, SEQUENCE_END


class SequenceRig(Rig):
    """A model with sequences; `strategy` and other settings are of its `sequence_batching`."""

    def __init__(
        self,
        strategy: str = "direct",
        rows: int = 2,
        instances: int = 1,
        strategy_fields: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        server = {key: options.pop(key) for key in list(options) if key.endswith("scheduler")}
        decoupled = options.pop("decoupled", False)
        sequences = {strategy: strategy_fields or {}, **options}
        super().__init__(None, rows, decoupled=decoupled, sequences=sequences, **server)
        self.peers = [self.start(index, 100 + index) for index in range(instances)]
        self._batches: dict[int, list[Any]] = {}
        self._running: dict[bytes, m.Execute] = {}

    def request(
        self, sequence: int | str, flags: int = 0, peer: bytes = GATEWAY, **fields: Any
    ) -> int:
        kind = "correlation_text" if isinstance(sequence, str) else "correlation_id"
        work_fields: dict[str, Any] = {kind: sequence, "flags": flags, **fields}
        (number,) = self.submit(peer=peer, **work_fields)
        return number

    def batches(self) -> dict[int, list[Any]]:
        """Return the new batches of each instance: the sequence of each row, None for null rows."""
        self._take()
        batches, self._batches = self._batches, {}
        return batches

    def _take(self) -> None:
        for peer, batch in self.take_batches():
            self._running[peer] = batch
            self._batches[self.peers.index(peer)] = [named(row) for row in batch.rows]

    def is_running(self, index: int = 0) -> bool:
        self._take()
        return self.peers[index] in self._running

    def rows(self, index: int = 0) -> list[m.SequenceRow]:
        self._take()
        return self._running[self.peers[index]].rows

    def finish_batch(self, index: int = 0, *replies: m.Reply) -> None:
        self._take()
        peer = self.peers[index]
        self.finish(peer, self._running.pop(peer), *replies)

    def end_process(self, index: int = 0) -> None:
        self._take()
        self._running.pop(self.peers[index], None)
        self.supervisor(ProcessExited(trailing_pid(self.peers[index]), "signal 9"))

    def outcomes(self) -> dict[int, Any]:
        """Return the outcome of requests since the last call: the text of an error, or None."""
        return {a.id: a.message if isinstance(a, m.Failed) else None for a in self.answers()}


def named(row: m.SequenceRow) -> Any:
    return (row.correlation_text or row.correlation_id) if row.key else None
