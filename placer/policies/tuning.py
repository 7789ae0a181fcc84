"""Fine-tuning on measured step time: a policy for one model on this machine's devices.

The reward is the measured step time relative to the choice of the simulated search, run in the same
rounds. Measurements are few, so in between the policy learns from the simulator, fitted to all
measurements. At the end the fastest candidates are run once more, together; a candidate within
noise of the simulated choice is not preferred to it.
"""

from __future__ import annotations

from envs.cluster import Cluster
from envs.compiled import loading_stage
from envs.discover import check_devices
from envs.problem import Problem
from envs.runtime import calibrated, runtime_for
from graphs.extract import ExtractionError, Step, extract
from graphs.extract.fake import check_has_memory
from graphs.graph import GraphArrays
from placer.policies.network import Policy
from placer.policies.threads import one_thread
from placer.policies.tuned import Tuned, Tuning
from placer.policies.tuner import Tuner
from placer.report.progress import Progress, Silent
from placer.search.compiling import load_compiled_code


@one_thread()
def tune(
    step: Step,
    cluster: Cluster,
    policy: Policy,
    name: str,
    tuning: Tuning | None = None,
    progress: Progress | None = None,
) -> Tuned:
    """Tune a policy to one step on devices of this machine.

    If it is stopped by Ctrl-C after the first runs, it returns the result so far.

    Args:
        step: the model and its example inputs.
        cluster: devices of this machine; speeds are calibrated if there are no links.
        policy: initial policy.
        name: of the tuned policy.
        tuning: settings.
        progress: receives stages and progress.

    Raises:
        ExtractionError: the model cannot be extracted, or its extraction cannot be run.
        ValueError: a device is not on this machine, or there is only one.
        WorkerError: the workers do not start.
        KeyboardInterrupt: stopped before anything was run.
    """
    tuning, hear = tuning or Tuning(), progress or Silent()
    check_devices(cluster.names)
    if len(cluster) < 2:
        raise ValueError("on one device there is nothing to learn: name two or more")
    check_has_memory(step)
    hear.stage("Extracting the graph")
    extraction = extract(step)
    rig = runtime_for(extraction, cluster)
    if not rig.runs:
        raise ExtractionError(
            "only the modules of this model were extracted: cuda:N and cpu can run them, core:N "
            "cannot"
        )
    if not cluster.links:
        hear.stage("Calibrating devices")
        cluster = calibrated(cluster)
    hear.stage("Measuring op costs")
    graph = rig.costed(rig.graph, cluster, progress=lambda done, total: hear.advance(done / total))
    problem = Problem.of(GraphArrays.from_graph(graph), rig.planned(cluster))
    hear.stage(loading_stage())
    load_compiled_code()
    return Tuner(problem, rig, policy, name, tuning, hear).tuned()
