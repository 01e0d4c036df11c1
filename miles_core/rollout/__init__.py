"""From prompts to groups of rewarded samples.

Prompts leave a queue, requests go to an engine, what it reports is laid over the tokens of a sample, and groups are
collected, filtered and counted. Knows the engine by its contract only.
"""
