"""What `shmserve serve --help` prints, made from the table of flags."""

from __future__ import annotations

import textwrap

from shmserve.config.options import GROUPS, IDLE, Flag


def text() -> str:
    """All flags, in their groups, and those of tritonserver that are accepted without effect."""
    lines = [
        "usage: shmserve serve --model-repository DIR [flags]",
        "       shmserve serve path/model.py:Class [flags]",
    ]
    for group, flags in GROUPS.items():
        lines += ["", f"{group}:"]
        for flag in flags:
            lines += _flag_help(flag)
    lines += ["", "Accepted and without effect, so that a tritonserver command line starts:"]
    for instead, flags in IDLE.items():
        names = ", ".join(f"--{flag.name}" for flag in flags)
        lines += textwrap.wrap(
            f"{names}: {instead}",
            92,
            initial_indent="  ",
            subsequent_indent="    ",
            break_on_hyphens=False,
        )
    return "\n".join(lines)


def _flag_help(flag: Flag) -> list[str]:
    kind = "|".join(flag.choices) or {"bool": "true|false"}.get(
        flag.kind.__name__, flag.kind.__name__.upper().replace("STR", "TEXT")
    )
    default = "" if flag.default is None else f" [{str(flag.default).lower()}]"
    return [
        f"  --{flag.name} {kind}{' (repeatable)' if flag.repeat else ''}",
        *textwrap.wrap(
            flag.help + default, 92, initial_indent="      ", subsequent_indent="      "
        ),
    ]
