"""Reinforcement learning: rollouts, samples, the RL step, advantages, policy losses, the module."""
