"""``placer extract``: writes and summarizes the graph of a model's step."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from placer.cli.arguments import (
    add_devices,
    add_model,
    check_model_options,
    flag,
    option,
    output_group,
    target_file,
    target_of,
)
from placer.cli.errors import UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, progress_of, say, writing
from placer.sources.names import is_graph_file

HELP: Final = "write the graph of a model with measured op costs, or summarize it"
EPILOG: Final = """\
examples:
  placer extract graphs/models/inception.py:build --out graph.json --summary
  placer extract model.py:build --inference --costs none --summary
  placer extract model.py:build --cluster cluster.toml --out graph.json
  placer extract hf:llama-3-8b --costs none --summary       # takes no memory for its weights
  placer extract graph.json --summary
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("target", help="model, as for placer optimize, or graph.json to summarize")
    group = parser.add_argument_group("devices")
    option(group, "--costs", "source of op costs", shown="measured", choices=["measured", "none"])
    add_devices(group, "core:0", cluster=True)
    add_model(parser.add_argument_group("model"))
    group = output_group(parser)
    option(group, "--out", "graph file (JSON) to write", type=Path)
    flag(group, "--summary", "ops, FLOPs, sizes, critical path, headroom and costliest ops")


def run(args: argparse.Namespace) -> int:
    """Extract the graph, measure costs, write and summarize it."""
    _check(args)
    check_outputs(
        {"--out": args.out}, {"target": target_file(args.target), "--cluster": args.cluster}
    )
    from envs.costs.roofline import cluster_of
    from graphs.costs import GraphSummary
    from graphs.graph_file import save_graph
    from placer.api import extract_source
    from placer.messages.remarks import extraction_remarks
    from placer.report.summary import print_summary, summary_to_dict
    from placer.result import extraction_to_dict
    from placer.sources.target import load_graph_target

    cluster = None
    if args.costs != "none" and not is_graph_file(args.target):
        with usage_errors():
            cluster = cluster_of(args.cluster or args.devices or "core:0", args.memory)
    with progress_of(args) as progress:
        if is_graph_file(args.target):
            graph, extraction = load_graph_target(args.target), None
        else:
            graph, extraction = extract_source(
                target_of(args), cluster, progress, extractor=args.extractor
            )
    summary = GraphSummary.of(graph)
    if extraction is not None:
        for remark in extraction_remarks(extraction):
            say(args, remark)
    out = None if args.out is None else str(args.out)
    if args.out is not None:
        with writing(args.out):
            save_graph(graph, args.out)
    if args.json or args.summary:
        print_result(
            args,
            lambda: {**summary_to_dict(summary), **extraction_to_dict(extraction), "out": out},
            lambda console: print_summary(summary, console),
        )
    if args.out is not None:
        say(args, f"graph: {args.out}, {sum(summary.ops.values())} ops")
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.out is None and not args.summary and not args.json:
        raise UsageError("nothing to do: give --out graph.json, --summary or --json")
    check_model_options(args, args.target, needs_cluster=False)
    for_costs = args.devices or args.cluster or args.memory
    if is_graph_file(args.target) and (args.costs or for_costs):
        raise UsageError(
            "a graph file is extracted already and keeps its costs: --costs, --devices, --memory "
            "and --cluster are for models"
        )
    if args.costs == "none" and for_costs:
        raise UsageError(
            "--costs none contradicts --devices, --memory and --cluster, which say where costs are "
            "measured"
        )
