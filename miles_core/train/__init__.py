"""The learner: turns samples into optimiser steps.

Composes the functions of ``algorithm`` with the plugins' wrappers and passes them to a trainer: log-probabilities, advantages,
corrections, the loss of a micro-batch. This package uses trainers only through their contract.
"""
