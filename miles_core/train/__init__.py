"""The learner: from samples to optimiser steps.

Composes the functions of ``algorithm`` with the plugins' wrappers and hands them to a trainer, which it knows by its
contract only: log-probabilities, advantages, corrections, the loss of a micro-batch.
"""
