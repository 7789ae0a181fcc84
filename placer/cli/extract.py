"""``placer extract``: the graph of a model's step as a file, and what it holds."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written

if TYPE_CHECKING:
    import networkx as nx

    from envs.cluster import Cluster
    from placer.report.progress import Progress

EPILOG = """\
examples:
  placer extract examples/inception.py:build --out graph.json --summary
  placer extract model.py:build --inference --costs none --summary
  placer extract graph.json --summary
"""


def add_to(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "extract",
        help="write the graph of a model, with measured costs, and say what it holds",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("target", help="path/to/model.py:function, or a graph.json to summarize")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the graph goes (JSON)")
    parser.add_argument(
        "--summary",
        action="store_true",
        help="print ops, FLOPs, sizes, critical path, headroom and the dearest ops",
    )
    parser.add_argument("--inference", action="store_true", help="of inference, not training")
    parser.add_argument(
        "--costs", choices=["measured", "none"], help="of the ops (default: measured)"
    )
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="measure on one of each kind of these (default: core:0); on cpu or cuda:N the ops are "
        "the calls of the exported model",
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON to stdout")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extract, measure, write, summarize."""
    why = _why_not(args) or why_not_outputs({"--out": args.out}, {"target": _file(args.target)})
    if why is not None:
        return fail(BAD_USAGE, why)
    from envs.discover import discover
    from graphs.extract import ExtractionError
    from graphs.files import save_graph
    from graphs.graph import GraphArrays
    from graphs.summary import GraphSummary
    from placer.report.console import stdout_console
    from placer.report.progress import progress_for
    from placer.report.summary import print_summary, summary_to_dict
    from placer.target import TargetError

    try:
        cluster = None if args.costs == "none" else discover(args.devices or "core:0")
    except ValueError as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_for(sys.stderr.isatty()) as progress:
            graph = _graph(args, cluster, progress)
        summary = GraphSummary.of(GraphArrays.from_graph(graph))
    except TargetError as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    if args.out is not None:
        try:
            save_graph(graph, args.out)
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
    if args.json:
        out = None if args.out is None else str(args.out)
        print(json.dumps({**summary_to_dict(summary), "out": out}, allow_nan=False))
    elif args.summary:
        print_summary(summary, stdout_console())
    if args.out is not None:
        print(f"graph: {args.out}, {sum(summary.ops.values())} ops", file=sys.stderr)
    return 0


def _why_not(args: argparse.Namespace) -> str | None:
    """Why these options make no sense together, None if they do."""
    if args.out is None and not args.summary and not args.json:
        return "nothing to do: give --out graph.json, --summary or --json"
    is_graph = args.target.endswith(".json") and not args.target.startswith("hf:")
    if is_graph and (args.costs or args.devices or args.inference):
        return (
            "a graph file is extracted already and keeps its costs: --costs, --devices and "
            "--inference are for models"
        )
    if args.costs == "none" and args.devices is not None:
        return "--devices says where to measure costs, but --costs none asks for none"
    return None


def _file(target: str) -> Path:
    """The file that the target is in."""
    path, colon, _ = target.rpartition(":")
    return Path(path if colon else target)


def _graph(
    args: argparse.Namespace, cluster: Cluster | None, progress: Progress
) -> nx.DiGraph[str]:
    from graphs.extract import extract
    from placer.rigs import rig_for
    from placer.target import is_graph_file, load_graph_target, load_step

    if is_graph_file(args.target):
        return load_graph_target(args.target)
    progress.stage("Loading the model")
    step = load_step(args.target, training=not args.inference)
    progress.stage("Extracting the graph")
    extraction = extract(step)
    if cluster is None:
        return extraction.graph
    progress.stage("Measuring op costs")
    rig = rig_for(extraction, cluster)
    return rig.costed(rig.graph, cluster, progress)
