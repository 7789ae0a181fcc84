"""``placer show``: prints a placement file, or writes it as an HTML report."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from placer.cli.arguments import (
    add_devices,
    add_model,
    check_model_options,
    model_options,
    option,
    take_mode,
    target_file,
    target_of,
)
from placer.cli.errors import UsageError, usage_errors
from placer.cli.output import check_outputs, print_result, progress_of, say, writing
from placer.sources.names import is_graph_file

if TYPE_CHECKING:
    from envs.placement import Placement
    from placer.costed_step import CostedStep
    from placer.progress import Progress
    from placer.result import Result
    from placer.search.candidate import Candidate

HELP: Final = "show a placement file, in the terminal or as an HTML report"
EPILOG: Final = """\
examples:
  placer show placement.json
  placer show placement.json encoder.layers.3
  placer show placement.json --html report.html --target graph.json --cluster cluster.toml
  placer show placement.json --html report.html --target model.py:build
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("placement", type=Path, help="placement.json")
    parser.add_argument(
        "name", nargs="?", help="op or module to locate; (model) for ops in no module"
    )
    group = parser.add_argument_group("report")
    option(
        group,
        "--html",
        "HTML report to write: gain, graph, timeline, memory; needs --target",
        type=Path,
    )
    option(group, "--target", "placed model or graph file, as for placer optimize")
    add_devices(group, "those of the placement", cluster=True)
    add_model(parser.add_argument_group("model"))


def run(args: argparse.Namespace) -> int:
    """Print the placement by module, or the device of one op or module, or write the report."""
    from envs.placement import Placement
    from placer.report.table import origin, placement_to_dict, print_placement

    if args.html is not None:
        _check_report(args)
    elif of_report := _options_of_report(args):
        what = "is an option" if len(of_report) == 1 else "are options"
        raise UsageError(f"{' and '.join(of_report)} {what} of a report: give --html, too")
    with usage_errors():
        placement = Placement.load(args.placement)
    if args.html is not None:
        if not is_graph_file(args.target):
            take_mode(args, placement)
            check_model_options(args, args.target)
        _report(placement, args)
    elif args.name is not None:
        data, line = _location(placement, args.name)
        print_result(args, lambda: data, lambda _: print(line))
    else:
        print_result(
            args,
            lambda: placement_to_dict(placement),
            lambda console: print_placement(placement, console),
            origin(placement),
        )
    return 0


def _location(placement: Placement, name: str) -> tuple[dict[str, Any], str]:
    """Return where an op or module is; ``device`` is that of a module's parameters."""
    from envs.placement import phase_of
    from placer.report.table import device_text

    try:
        device = placement.device_of(name)
    except KeyError as error:
        raise UsageError(error.args[0]) from error
    if name in placement.ops:
        return {"name": name, "device": device, "devices": {device: {phase_of(name): 1}}}, device
    data = {"name": name, "device": device, "devices": placement.phases_of(name)}
    return data, f"{name}: {device_text(placement, name)}"


def _options_of_report(args: argparse.Namespace) -> list[str]:
    names = ("target", "devices", "memory", "cluster")
    of_model = [word for word in model_options(args) if word.startswith("--")]
    return [f"--{name}" for name in names if getattr(args, name)] + of_model


def _check_report(args: argparse.Namespace) -> None:
    if args.target is None:
        raise UsageError(
            "a placement file does not hold its graph: give what was placed, as in placer show "
            f"{args.placement} --html {args.html} --target graph.json --cluster cluster.toml"
        )
    if args.name is not None:
        raise UsageError("an op or module is printed, not reported: leave out its name or --html")
    inputs = {"--target": target_file(args.target), "--cluster": args.cluster}
    check_outputs({"--html": args.html}, {"placement": args.placement, **inputs})
    check_model_options(args, args.target)


def _report(placement: Placement, args: argparse.Namespace) -> None:
    """Simulate the placement and the heuristics, and write the page."""
    with progress_of(args) as progress:
        result = _reviewed(placement, args, progress)
        write_report(result, args, args.placement, args.html)
    say(args, f"report: {args.html}")
    if args.json:
        print_result(args, lambda: {**result.to_dict(), "out": str(args.html)}, lambda _: None)


def _reviewed(placement: Placement, args: argparse.Namespace, progress: Progress) -> Result:
    from placer.costed_step import costed_step
    from placer.evaluation import reviewed
    from placer.job import Constraints, Job, SearchConfig

    with usage_errors():
        job = Job.of(
            target_of(args),
            args.cluster or args.devices or ",".join(placement.device_names),
            search=SearchConfig(policy=None),
            constraints=Constraints(memory=args.memory),
            extractor=args.extractor,
        )
    step = costed_step(job.loaded(progress), progress)
    with usage_errors():
        placed = placement.aligned(step.problem.graph, step.cluster)
        result = reviewed(step.problem, placed, step.graph.graph["cost_source"])
    candidates = [_with_worker_memory(each, step) for each in result.candidates]
    best = candidates[[each is result.best for each in result.candidates].index(True)]
    return replace(result, candidates=tuple(candidates), best=best, extraction=step.extraction)


def _with_worker_memory(candidate: Candidate, step: CostedStep) -> Candidate:
    """Return a candidate with the memory of its workers, if there is a model that they can run."""
    from envs.runtime import worker_memory

    prediction = candidate.prediction
    if prediction is None or not candidate.can_run:
        return candidate
    peaks = worker_memory(step.runtime, step.problem, candidate.placement)
    peaks = peaks or prediction.peak_memory_bytes
    return replace(candidate, prediction=replace(prediction, peak_memory_bytes=peaks))


def write_report(result: Result, args: argparse.Namespace, placement: Path, path: Path) -> None:
    """Write the report of a result whose placement is in a file."""
    from graphs.files import write_whole
    from placer.replicate.result import ReplicatedResult
    from placer.report.html import Source, next_commands, page, report_data

    names = result.problem.cluster.names
    place: list[str] = []
    if args.cluster:
        place = ["--cluster", str(args.cluster)]
    elif not is_graph_file(args.target):
        place = ["--devices", ",".join(names)]
    # Replicas and the unplaced model are of other devices than those that were searched.
    is_part = result.placement.unplaced or result.placement.replicas is not None
    searched = [] if is_part and not args.cluster else place
    searched = ["--devices", args.devices] if args.devices else searched
    on_names = {name: size for name, size in args.memory.items() if name in names}
    source = Source(
        placement=placement,
        target=args.target,
        devices=names,
        place=[*place, *_memory_words(on_names)],
        model=model_options(args),
        search=[
            *searched,
            *_memory_words(args.memory),
            *_search_words(result.placement, args),
        ],
        launch=launch_command_of(result, args, placement),
        is_of_part=isinstance(result, ReplicatedResult) and result.replication.is_of_part,
    )
    with writing(path):
        write_whole(path, page(report_data(result, next_commands(source))))


def _memory_words(memory: Mapping[str, int]) -> list[str]:
    limits = [f"{name}={size}" for name, size in memory.items()]
    return ["--memory", ",".join(limits)] if limits else []


def launch_command_of(result: Result, args: argparse.Namespace, path: Path) -> str:
    """Return the command that trains with a placement file, "" if placer cannot run it."""
    from envs.replication import Replication
    from envs.runtime import has_runtime
    from placer.parallel.plan import launch_command
    from placer.replicate.messages import run_obstacle

    placement, extraction = result.placement, result.extraction
    if extraction is None or not extraction.step.training or placement.micro_batches > 1:
        return ""
    plan = placement.replicas
    if plan is None:
        if not all(map(has_runtime, placement.device_names)):
            return ""
        plan = Replication(groups=(placement.device_names,))
    options = model_options(args, inference=False)
    return "" if run_obstacle(plan) else launch_command(plan, args.target, path, *options)


def _search_words(placement: Placement, args: argparse.Namespace) -> list[str]:
    """Return the options of a further search, besides the model and its devices."""
    words = [] if placement.objective == "latency" else ["--objective", placement.objective]
    if placement.micro_batches > 1:
        words += ["--micro-batches", str(placement.micro_batches)]
    for name, device in getattr(args, "pin", []):
        words += ["--pin", f"{name}={device}"]
    for name in getattr(args, "keep_together", []):
        words += ["--keep-together", name]
    return words
