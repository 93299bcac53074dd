"""`python -m tests.fuzz TARGET [--seconds N]`: search for bytes that break a target, led by which
lines they reach.

Begins with tests/fuzz/corpus/TARGET. An input that breaks the target is printed and stored as
crash-* in the current folder. The exit status is 0 if no such input was found. Needs atheris (pip
install -e '.[fuzz]'), but for inputs by chance.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from tests.fuzz.by_chance import search

CORPUS = Path(__file__).parent / "corpus"


def main() -> None:
    """Run until the time is over or an input breaks the target."""
    names = sorted(path.name for path in CORPUS.iterdir())
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("target", choices=names)
    parser.add_argument("--seconds", type=int, default=60, help="how long to search [60]")
    parser.add_argument("--by-chance", type=int, metavar="SEED", help="look at no lines, be fast")
    arguments = parser.parse_args()
    if arguments.by_chance is not None:
        _by_chance(arguments.target, arguments.seconds, arguments.by_chance)
        return
    try:
        import atheris
    except ImportError:
        sys.exit("tests.fuzz: needs atheris: pip install -e '.[fuzz]'")
    with atheris.instrument_imports(include=["shmserve"]):
        from tests.fuzz.targets import TARGETS
    flags = [f"-max_total_time={arguments.seconds}", "-max_len=4096", "-rss_limit_mb=2048"]
    with tempfile.TemporaryDirectory() as folder:
        # New inputs go to the first folder.
        atheris.Setup(
            [sys.argv[0], *flags, folder, str(CORPUS / arguments.target)], TARGETS[arguments.target]
        )
        atheris.Fuzz()


def _by_chance(name: str, seconds: int, seed: int) -> None:
    from tests.fuzz.http2.target import DIFFERENCE_COUNTS
    from tests.fuzz.targets import TARGETS

    corpus = [path.read_bytes() for path in sorted((CORPUS / name).iterdir())]
    count = search(TARGETS[name], corpus, seconds, seed)
    print(f"{count} inputs")
    for explained, times in DIFFERENCE_COUNTS.most_common():
        print(f"{times:10} {explained}")


if __name__ == "__main__":
    main()
