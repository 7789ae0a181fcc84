"""Train MaskablePPO to place ops one by one: ``python examples/train_placement_env.py``."""

import gymnasium
from sb3_contrib import MaskablePPO

import placer  # noqa: F401 - registers the environments

# Two towers on three devices; give graph= or workload=, and cluster=, for your own.
env = gymnasium.make("placer/Placement-v0", render_mode="ansi")
model = MaskablePPO("MlpPolicy", env, n_steps=256, gamma=1.0, seed=0, device="cpu")
model.learn(3_000)

observation, info = env.reset(seed=0)
while "step_s" not in info:
    masks = env.get_wrapper_attr("action_masks")()
    action = model.predict(observation, action_masks=masks, deterministic=True)[0]
    observation, _, _, _, info = env.step(action)
print(env.render())
print(f"step: {info['step_s'] * 1e3:.2f} ms, best single device: {info['baseline_s'] * 1e3:.2f} ms")
