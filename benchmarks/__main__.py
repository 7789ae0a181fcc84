"""All benchmarks, one after the other, or those named.

    python -m benchmarks [--quick] [NAME ...]

All of them take about 45 minutes; with ``--quick``, which makes the longest one short, 15.
"""

import sys

from benchmarks import (
    coarsen,
    extraction,
    max_load,
    placement,
    profiling,
    scaling,
    search,
    simulator,
)

QUICK = "--quick"
ALL = {
    "extraction": extraction,
    "coarsen": coarsen,
    "profiling": profiling,
    "simulator": simulator,
    "search": search,
    "max_load": max_load,
    "scaling": scaling,
    "placement": placement,
}


def main(names: list[str], quick: bool = False) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in names or ALL:
        if name == "search":
            search.main(quick)
        else:
            ALL[name].main()


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != QUICK], QUICK in sys.argv[1:])
