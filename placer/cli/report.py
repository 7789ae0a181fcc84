"""``placer report``: writes a placement as an HTML page; ``--report`` of ``placer optimize``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placer.cli.arguments import add_devices, add_extractor, add_step, run_options, why_no_step
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import progress_of, say

if TYPE_CHECKING:
    from envs.placement import Placement
    from graphs.extract import Extraction
    from placer.progress import Progress
    from placer.report.html import Source
    from placer.result import Result

EPILOG = """\
examples:
  placer report placement.json graph.json --cluster cluster.toml
  placer report placement.json model.py:build --out report.html
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "report",
        help="write a placement as a page: gain, graph, timeline, memory",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("placement", type=Path, help="placement.json")
    parser.add_argument(
        "target",
        nargs="?",
        help="what was placed, as given to placer optimize: model or graph.json",
    )
    parser.add_argument(
        "--cluster", type=Path, metavar="FILE", help="devices and links from a file (TOML)"
    )
    add_devices(parser, "those of the placement")
    parser.add_argument("--inference", action="store_true", help="of inference, not training")
    add_step(parser)
    add_extractor(parser)
    parser.add_argument(
        "--fresh", action="store_true", help="measure devices and ops anew (see placer cache)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        metavar="FILE",
        help="where the page goes (default: report.html)",
    )
    parser.set_defaults(run=run)


def add_report(parser: argparse.ArgumentParser) -> None:
    """Add ``--report``."""
    parser.add_argument(
        "--report",
        type=Path,
        metavar="FILE",
        help="write a page to look at: gain, graph, timeline, memory and search in one HTML file",
    )


def run(args: argparse.Namespace) -> int:
    """Simulate the placement and the heuristics, and write the page."""
    inputs = {"placement": args.placement, "--cluster": args.cluster}
    if (why := why_not_outputs({"--out": args.out}, inputs)) is not None:
        return fail(BAD_USAGE, why)
    if args.target is None:
        return fail(
            BAD_USAGE,
            "a placement file does not hold its graph: give what was placed, as in placer report "
            f"{args.placement} graph.json --cluster cluster.toml",
        )
    if (why := why_no_step(args, is_graph=args.target.endswith(".json"))) is not None:
        return fail(BAD_USAGE, why)
    from envs.placement import Placement
    from graphs.extract import ExtractionError
    from placer.sources.target import TargetError

    try:
        placement = Placement.load(args.placement)
        with progress_of(args) as progress:
            found, extraction = _reviewed(placement, args, progress)
            page = _page(found, _source(found, args, args.placement, extraction))
    except (TargetError, ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    if (why := _why_not_left(page, args.out)) is not None:
        return fail(JOB_FAILED, why)
    say(args, f"report: {args.out}")
    if args.json:
        print(json.dumps(_told(found, args.out), allow_nan=False))
    return 0


def _told(found: Result, out: Path) -> dict[str, Any]:
    return {
        "candidates": [
            {
                "name": row.name,
                "predicted_s": row.predicted_s if row.can_run else None,
                "peak_memory_bytes": dict(row.peak_memory_bytes),
                "why": row.why,
                "placement": row is found.best,
            }
            for row in found.candidates
        ],
        "lower_bound_s": found.lower_bound_s,
        "verdict": found.verdict,
        "out": str(out),
    }


def why_no_report(found: Result, args: argparse.Namespace) -> str | None:
    """Write the page for ``placer optimize --report``; return why that failed, or None."""
    source = _source(found, args, args.out, found.extraction)
    return _why_not_left(_page(found, source), args.report)


def _page(found: Result, source: Source) -> str:
    from placer.report.html import next_commands, page, report_data

    return page(report_data(found, next_commands(source)))


def _why_not_left(page: str, path: Path) -> str | None:
    from graphs.files import write_whole

    try:
        write_whole(path, page)
    except OSError as error:
        return why_not_written(path, error)
    return None


def _source(
    found: Result, args: argparse.Namespace, placement: Path, extraction: Extraction | None
) -> Source:
    from graphs.optimizer import NONE
    from graphs.precision import FULL
    from placer.report.html import Source

    place = ["--cluster", str(args.cluster)] if args.cluster else []
    model = []
    if not args.target.endswith(".json"):
        place = place or ["--devices", ",".join(found.problem.cluster.names)]
        model = ["--inference"] if args.inference else []
        for name, plain in (("optimizer", NONE), ("dtype", FULL), ("extractor", "auto")):
            if (value := getattr(args, name)) != plain:
                model += [f"--{name}", value]
    if args.memory:
        place += ["--memory", ",".join(f"{name}={size}" for name, size in args.memory.items())]
    return Source(
        placement=placement,
        target=args.target,
        devices=found.problem.cluster.names,
        place=place,
        model=model,
        search=_search_words(found.placement, args),
        launch=_launch(found.placement, args, placement, extraction),
    )


def _launch(
    placement: Placement, args: argparse.Namespace, path: Path, extraction: Extraction | None
) -> str:
    """Return the command that trains with the placement, "" if placer cannot run it."""
    from envs.replication import Replication
    from envs.runtime import has_runtime
    from placer.parallel.plan import launch_command, why_not_run

    if extraction is None or not extraction.step.training or placement.micro_batches > 1:
        return ""
    known = all(map(has_runtime, placement.device_names))
    if placement.replicas is None and not known:
        return ""
    plan = placement.replicas or Replication(groups=(placement.device_names,))
    return "" if why_not_run(plan) else launch_command(plan, args.target, path, *run_options(args))


def _search_words(placement: Placement, args: argparse.Namespace) -> list[str]:
    """Return the options of a further search, besides the model and its devices."""
    words = [] if placement.objective == "latency" else ["--objective", placement.objective]
    if placement.micro_batches > 1:
        words += ["--micro-batches", str(placement.micro_batches)]
    if placement.in_flight is not None:
        words += ["--in-flight", str(placement.in_flight)]
    if getattr(args, "groups", None) is not None:
        words += ["--groups", str(args.groups)]
    for name, device in getattr(args, "pin", []):
        words += ["--pin", f"{name}={device}"]
    for name in getattr(args, "keep_together", []):
        words += ["--keep-together", name]
    return words


def _reviewed(
    placement: Placement, args: argparse.Namespace, progress: Progress
) -> tuple[Result, Extraction | None]:
    import networkx as nx

    from envs.problem import Problem
    from graphs.graph import GraphArrays
    from placer.cli.arguments import target_of
    from placer.costed_step import costed_step
    from placer.job import Constraints, Job, SearchConfig
    from placer.report.html import reviewed

    if args.cluster is not None and (args.devices is not None or args.memory):
        raise ValueError("give --devices and --memory, or --cluster, not both")
    target = target_of(args)
    if target.is_graph and args.cluster is None:
        raise ValueError("a graph file has no devices of its own: give --cluster cluster.toml")
    job = Job.of(
        target,
        args.cluster or args.devices or ",".join(placement.device_names),
        search=SearchConfig(policy=None),
        constraints=Constraints(memory=args.memory),
        extractor=args.extractor,
        fresh=args.fresh,
    ).loaded(progress)
    extraction: Extraction | None = None
    if isinstance(job.source, nx.DiGraph):
        graph, cluster = job.source, job.cluster
    else:
        known = costed_step(job, progress)
        graph, cluster, extraction = known.graph, known.cluster, known.extraction
    problem = Problem.of(GraphArrays.from_graph(graph), cluster)
    fitting = placement.aligned(problem.graph, cluster)
    return reviewed(problem, fitting, graph.graph["cost_source"]), extraction
