"""The learner: turns samples into optimiser steps.

Composes the functions of ``algorithm`` with the plugins' wrappers and passes them to a trainer: log-probabilities, advantages,
corrections, the loss of a micro-batch. This package uses trainers only through their contract. ``rank``
adds the transport of the weights, and ``local_learner`` is the driver's handle to a rank in its own process.
"""
