"""All benchmarks, one after the other, or those named.

    python -m benchmarks [--quick] [NAME ...]

All of them take about an hour; with ``--quick``, which makes the longest ones short, 20 minutes.
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
    slow_network,
    sync_quality,
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
    "sync_quality": sync_quality,
    "slow_network": slow_network,
}


def main(names: list[str], quick: bool = False) -> None:
    if unknown := [name for name in names if name not in ALL]:
        sys.exit(f"there is no benchmark {unknown[0]!r}; there are {', '.join(ALL)}")
    for name in names or ALL:
        if name in ("search", "sync_quality"):
            ALL[name].main(quick)
        else:
            ALL[name].main()


if __name__ == "__main__":
    main([name for name in sys.argv[1:] if name != QUICK], QUICK in sys.argv[1:])
