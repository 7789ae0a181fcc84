"""``placer extract``: writes and summarizes the graph of a model's step."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from placer.cli.arguments import add_extractor, add_step, target_of, why_no_step
from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs, why_not_written
from placer.cli.talk import progress_of, say

if TYPE_CHECKING:
    import networkx as nx

    from envs.hardware.cluster import Cluster
    from graphs.extract import Extraction
    from placer.progress import Progress

EPILOG = """\
examples:
  placer extract graphs/models/inception.py:build --out graph.json --summary
  placer extract model.py:build --inference --costs none --summary
  placer extract model.py:build --cluster cluster.toml --out graph.json
  placer extract hf:llama-3-8b --costs none --summary       # takes no memory for its weights
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
    parser.add_argument(
        "target",
        help="path/to/model.py:function, hf:NAME, model.pt2, model.onnx, or a graph.json to "
        "summarize",
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="where the graph goes (JSON)")
    parser.add_argument(
        "--summary",
        action="store_true",
        help="print ops, FLOPs, sizes, critical path, headroom and the dearest ops",
    )
    parser.add_argument("--inference", action="store_true", help="of inference, not training")
    add_step(parser)
    parser.add_argument(
        "--costs", choices=["measured", "none"], help="of the ops (default: measured)"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="measure anew, whatever is known (see placer cache)"
    )
    parser.add_argument(
        "--devices",
        metavar="NAMES",
        help="measure on one of each kind of these (default: core:0); on cpu or cuda:N the ops are "
        "the calls of the exported model",
    )
    parser.add_argument(
        "--cluster",
        type=Path,
        metavar="FILE",
        help="costs on the devices of a cluster file: measured on those that are here, of the "
        "others a roofline of their rates",
    )
    add_extractor(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Extract the graph, measure costs, write and summarize it."""
    inputs = {"target": _file(args.target), "--cluster": args.cluster}
    why = _why_not(args) or why_not_outputs({"--out": args.out}, inputs)
    if why is not None:
        return fail(BAD_USAGE, why)
    from graphs.costs import GraphSummary
    from graphs.extract import ExtractionError
    from graphs.graph_file import save_graph
    from placer.messages import extraction_remarks
    from placer.report.console import stdout_console
    from placer.report.summary import print_summary, summary_to_dict
    from placer.result import extraction_to_dict
    from placer.sources.target import TargetError

    try:
        cluster = None if args.costs == "none" else _cluster(args)
    except (ValueError, OSError) as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            graph, extraction = _graph(args, cluster, progress)
        summary = GraphSummary.of(graph)
    except TargetError as error:
        return fail(BAD_USAGE, error)
    except (ExtractionError, ValueError, OSError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    if extraction is not None:
        for remark in extraction_remarks(extraction):
            say(args, remark)
    if args.out is not None:
        try:
            save_graph(graph, args.out)
        except OSError as error:
            return fail(JOB_FAILED, why_not_written(args.out, error))
    if args.json:
        out = None if args.out is None else str(args.out)
        told = {**summary_to_dict(summary), **extraction_to_dict(extraction), "out": out}
        print(json.dumps(told, allow_nan=False))
    elif args.summary:
        print_summary(summary, stdout_console())
    if args.out is not None:
        say(args, f"graph: {args.out}, {sum(summary.ops.values())} ops")
    return 0


def _why_not(args: argparse.Namespace) -> str | None:
    if args.out is None and not args.summary and not args.json:
        return "nothing to do: give --out graph.json, --summary or --json"
    is_graph = args.target.endswith(".json") and not args.target.startswith("hf:")
    of_models = (args.costs, args.devices, args.cluster, args.inference, args.fresh)
    if is_graph and (any(of_models) or args.extractor != "auto"):
        return (
            "a graph file is extracted already and keeps its costs: --costs, --devices, --cluster, "
            "--fresh, --inference and --extractor are for models"
        )
    if (why := why_no_step(args, is_graph=is_graph)) is not None:
        return why
    if args.costs == "none" and (args.devices or args.cluster or args.fresh):
        return (
            "--devices, --cluster and --fresh say how to find costs, but --costs none asks for none"
        )
    if args.devices and args.cluster:
        return "give --devices or --cluster, not both"
    return None


def _cluster(args: argparse.Namespace) -> Cluster:
    from envs.costs.roofline import cluster_of

    return cluster_of(args.cluster or args.devices or "core:0")


def _file(target: str) -> Path:
    path, colon, _ = target.rpartition(":")
    return Path(path if colon else target)


def _graph(
    args: argparse.Namespace, cluster: Cluster | None, progress: Progress
) -> tuple[nx.DiGraph[str], Extraction | None]:
    from envs.hardware.discover import is_here
    from envs.runtime import costed, runtime_for
    from graphs.extract import extract
    from graphs.extract.eager import check_has_memory
    from placer.sources.target import is_graph_file, load_graph_target

    if is_graph_file(args.target):
        return load_graph_target(args.target), None
    measures = cluster is not None and any(map(is_here, cluster.names))
    progress.stage("Loading the model")
    step = target_of(args).load(weights=measures)
    if measures:
        check_has_memory(step)
    progress.stage("Extracting the graph")
    extraction = extract(step, args.extractor)
    if cluster is None:
        return extraction.graph, extraction
    progress.stage("Measuring op costs")
    runtime = runtime_for(extraction, cluster)
    graph = costed(
        runtime,
        runtime.graph,
        cluster,
        fresh=args.fresh,
        progress=lambda done, total: progress.advance(done / total),
    )
    return graph, extraction
