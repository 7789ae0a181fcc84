"""All benchmarks, one after the other: ``python -m benchmarks``."""

from benchmarks import placement, search, simulator


def main() -> None:
    simulator.main()
    search.main()
    placement.main()


if __name__ == "__main__":
    main()
