"""``miles simulate``: one run as a discrete-event simulation, with core's loop, schedules, collector and engine pool on a virtual clock.

Only the engines, the trainer and the transfer of weights are models: ``speed`` computes their durations. All scheduling and waiting uses
the code of a real run.
"""
