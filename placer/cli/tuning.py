"""``placer train --reward measured``: tunes a policy to one model by measured step times."""

from __future__ import annotations

import argparse
import json

from placer.cli.failures import BAD_USAGE, JOB_FAILED, fail, why_not_outputs
from placer.cli.talk import progress_of, say
from placer.milliseconds import milliseconds


def run_tuning(args: argparse.Namespace) -> int:
    """Tune the policy, write it with its card and the best placement, print the gain."""
    if args.target is None:
        return fail(BAD_USAGE, "--reward measured is for one model: give --target, as to optimize")
    endings = {"weights": "safetensors", "card": "json", "placement": "placement.json"}
    files = {key: args.out.with_name(f"{args.out.name}.{end}") for key, end in endings.items()}
    if (why := why_not_outputs(files, {})) is not None:
        return fail(BAD_USAGE, why)
    from envs.discover import discover
    from graphs.extract import ExtractionError
    from placer.policies.network import GENERALIST, load
    from placer.policies.tuned import Tuning
    from placer.policies.tuning import tune
    from placer.search.budget import Budget
    from placer.target import TargetError, is_graph_file, load_step

    try:
        if is_graph_file(args.target):
            raise ValueError("a graph file cannot be run: give the function that makes the model")
        budget = None if args.budget is None else Budget.parse(args.budget)
        given = {"rounds": args.rounds, "plans": args.plans, "budget": budget}
        given["seed"] = args.first_seed
        tuning = Tuning(**{key: value for key, value in given.items() if value is not None})
        policy = load(args.from_policy or GENERALIST)
        cluster = discover(args.devices or "auto", args.memory)
        step = load_step(args.target, training=True)
    except (TargetError, ValueError) as error:
        return fail(BAD_USAGE, error)
    try:
        with progress_of(args) as progress:
            found = tune(step, cluster, policy, args.out.name, tuning, progress)
        placement = found.save(args.out)
    except (ExtractionError, ValueError, OSError, ArithmeticError, RuntimeError) as error:
        return fail(JOB_FAILED, error)
    if args.json:
        told = {
            "step_s": found.best.step_s,
            "simulated_choice_step_s": found.simulated.step_s,
            "policy": str(files["weights"]),
            "placement": str(placement),
        }
        print(json.dumps(told, allow_nan=False))
        return 0
    best_ms = milliseconds(found.best.step_s)
    simulated_ms = milliseconds(found.simulated.step_s)
    if found.best is found.simulated:
        print(f"nothing measured is faster than what simulated reward chooses: {best_ms} ms")
    else:
        print(f"{best_ms} ms, where simulated reward chooses {simulated_ms} ms")
    say(args, f"policy: {files['weights']}; placement: {placement}")
    return 0
