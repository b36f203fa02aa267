"""``--help``: the configuration files themselves, whose comments say what each key means."""

from pathlib import Path

_USAGE = """\
kvbench compares KV-cache allocators in one real decoding engine.

usage: python -m kvbench [+experiment=NAME] [GROUP=OPTION ...] [KEY=VALUE ...]
  python -m kvbench +experiment=beam_search          compare the allocators on beam search
  python -m kvbench allocator=paged,static           one workload, two allocators
  python -m kvbench ... --cfg job                    show the resulting configuration and stop
A comma-separated value sweeps. Keys below are set by their dotted path, e.g. pool.size=1GiB.
"""


def help_text(config_dir: Path) -> str:
    """Usage, every group with its options, and every key with its default and one line of meaning."""
    sections = [_USAGE, _indent("keys:", (config_dir / "config.yaml").read_text())]
    for group in sorted(path for path in config_dir.iterdir() if path.is_dir() and path.name != "experiment"):
        for option in sorted(group.glob("*.yaml")):
            sections.append(_indent(f"{group.name}={option.stem}:", option.read_text()))
    experiments = sorted((config_dir / "experiment").glob("*.yaml"))
    lines = [f"  +experiment={path.stem}: {_first_comment(path)}" for path in experiments]
    return "\n".join([*sections, "experiments:", *lines])


def _indent(title: str, text: str) -> str:
    return "\n".join([title, *(f"  {line}" for line in text.strip().splitlines()), ""])


def _first_comment(path: Path) -> str:
    comments = (line.removeprefix("#").strip() for line in path.read_text().splitlines() if line.startswith("# "))
    return next((line for line in comments if not line.startswith("@")), "")
