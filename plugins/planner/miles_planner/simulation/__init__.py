"""``miles simulate``: one run as a discrete-event simulation, with core's loop, schedules, collector and engine pool on a virtual clock.

Only the engines, the trainer and the transfer of weights are models: they take as long as ``speed`` says. Everything that decides
what waits for what is the code of a real run.
"""
