"""Schedules that generate while they train: one step ahead, or all the time."""
