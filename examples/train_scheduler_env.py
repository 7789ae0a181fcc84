"""Train PPO to set the list scheduler's weights: ``python examples/train_scheduler_env.py``."""

import gymnasium
from stable_baselines3 import PPO

import placer  # noqa: F401 - registers the environments

# Two towers on three devices; give graph= or workload=, and cluster=, for your own.
env = gymnasium.make("placer/Scheduler-v0", render_mode="ansi")
model = PPO("MlpPolicy", env, n_steps=128, batch_size=64, seed=0, device="cpu")
model.learn(2_000)

observation = env.reset(seed=0)[0]
action = model.predict(observation, deterministic=True)[0]
info = env.step(action)[4]
print(env.render())
print(f"step: {info['step_ns'] / 1e6:.2f} ms, HEFT or ETF: {info['reference_ns'] / 1e6:.2f} ms")
