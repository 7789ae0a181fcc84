"""All benchmarks, one after the other, or those named: ``python -m benchmarks [NAME ...]``."""

import sys

from benchmarks import coarsen, extraction, max_load, placement, profiling, search, simulator

ALL = {
    "extraction": extraction,
    "coarsen": coarsen,
    "profiling": profiling,
    "simulator": simulator,
    "search": search,
    "max_load": max_load,
    "placement": placement,
}


def main(names: list[str]) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in names or ALL:
        ALL[name].main()


if __name__ == "__main__":
    main(sys.argv[1:])
