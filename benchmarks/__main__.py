"""All benchmarks, one after the other: ``python -m benchmarks``."""

from benchmarks import coarsen, extraction, placement, search, simulator


def main() -> None:
    extraction.main()
    coarsen.main()
    simulator.main()
    search.main()
    placement.main()


if __name__ == "__main__":
    main()
