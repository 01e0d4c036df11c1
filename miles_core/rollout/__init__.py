"""Rollout: the engine contract and how groups of samples are collected."""
