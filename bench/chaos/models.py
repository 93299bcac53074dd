"""The repository: a model of each scheduler, all of them small."""

from __future__ import annotations

from pathlib import Path

from tests.rigs.pipelines import add_ensemble, add_model, step, tensor
from tests.support import repositories
from tests.support.hf_folders import write_folder
from tests.support.sequence_models import controls, instances

# Seconds that an execution may take: what hangs is killed then.
EXECUTION_LIMIT_S = 5

_LIMITED = 'rate_limiter { resources [ { name: "R" count: 1 } ] }'
_IDLE = "max_sequence_idle_microseconds: 3000000"
_LEAK = """
        if command == "leak":
            self.kept = bytearray(512 << 20)
            self.kept[::4096] = bytes([1]) * len(self.kept[::4096])
        if command == "raise":"""


def write(repository: Path) -> None:
    """Write them all."""
    repository.mkdir()
    repositories.add(repository, "simple", "identity", "repeat", "crimes")
    repositories.add_as(repository, "swap", "simple")
    code = repository / "crimes" / "1" / "model.py"
    code.write_text(code.read_text().replace('\n        if command == "raise":', _LEAK, 1))
    for strategy in ("direct", "oldest"):
        more = f"sequence_batching {{ {strategy} {{ }} {_IDLE} {controls()} }} {instances(2)}"
        repositories.add_as(repository, f"sums_{strategy}", "sequencer", more)
    for name, count in (("limited", 1), ("rival", 2)):
        add_model(repository, name, 'return self.response(Y=self.input(request, "X") * 3)')
        config = repository / name / "config.pbtxt"
        group = f"kind: KIND_CPU count: {count} {_LIMITED}"
        config.write_text(config.read_text().replace("kind: KIND_CPU", group))
    one = 'return self.response(Y=self.input(request, "X") + 1)'
    add_model(repository, "cached", one, more="response_cache { enable: true }")
    add_model(repository, "add", one)
    add_model(repository, "double", 'return self.response(Y=self.input(request, "X") * 2)')
    steps = [step("add", {"X": "IN"}, {"Y": "t"}), step("double", {"X": "t"}, {"Y": "OUT"})]
    add_ensemble(repository, "pipeline", steps, [tensor("IN")], [tensor("OUT")])
    write_folder(repository / "tiny" / "1")
