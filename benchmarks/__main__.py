"""All benchmarks, one after the other: ``python -m benchmarks``."""

from benchmarks import placement, simulator


def main() -> None:
    simulator.main()
    placement.main()


if __name__ == "__main__":
    main()
