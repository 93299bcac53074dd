"""`python -m tests.differential [NAME...]`: play the scripts (of these groups or names, or all)
against shmserve and a real Triton, and say where they differ.

Exit status 0: nowhere, but where it is known. Without a Triton it is skipped, with status 0, too.
"""

import sys
from dataclasses import replace

from tests.differential.compare import differences, judge
from tests.differential.script import Group
from tests.differential.scripts import GROUPS
from tests.differential.servers import Missing, products, run_group


def select_scripts(names: list[str]) -> list[Group]:
    """Return the groups with only the scripts that are named directly or by their group."""
    groups = []
    for group in GROUPS:
        selected = [s for s in group.scripts if not names or {*names} & {s.name, group.name}]
        if selected:
            groups.append(replace(group, scripts=selected))
    return groups


def main(names: list[str]) -> int:
    """Play the scripts and print the differences; return the number of scripts that differ."""
    try:
        shmserve, triton = products()
    except Missing as missing:
        print(f"skipped: {missing}")
        return 0
    mismatch_count = total = 0
    for group in select_scripts(names):
        records = [run_group(product, group) for product in (shmserve, triton)]
        for script in group.scripts:
            total += 1
            own_record, triton_record = (recorded[script.name] for recorded in records)
            if isinstance(own_record, str) or isinstance(triton_record, str):
                texts = [text for text in (own_record, triton_record) if isinstance(text, str)]
            else:
                texts = judge(differences(own_record, triton_record), script.known_differences)
            mismatch_count += bool(texts)
            print(f"{'differs' if texts else 'agrees '}  {group.name}/{script.name}", flush=True)
            for text in texts:
                print("  " + text[:2000].replace("\n", "\n  "))
    print(f"{total - mismatch_count} of {total} scripts agree")
    return mismatch_count


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
