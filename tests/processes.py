"""What tests ask of the process table."""

from pathlib import Path


def process_family(pid: int) -> set[int]:
    """Return a process and all that descend from it: a zygote's sandboxes and all that runs in them."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    family = {pid}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return family
