"""A plugin that is on every hook and does nothing: what ``hook_overhead.py`` measures."""

from __future__ import annotations

from miles_core.plugin.marker import hookimpl


def _around(inner):
    def outer(*args, **kwargs):
        return inner(*args, **kwargs)

    return outer


class EveryHook:
    """Wrappers add one plain call, events one call that returns."""

    @hookimpl
    def on_start(self, run): ...

    @hookimpl
    def on_model(self, run, policy, model, role): ...

    @hookimpl
    def on_request(self, run, request): ...

    @hookimpl
    def on_sample(self, run, sample): ...

    @hookimpl
    def on_batch(self, run, policy, batch): ...

    @hookimpl
    def wrap_forward(self, run, policy):
        return _around

    @hookimpl
    def wrap_correction(self, run):
        return _around

    @hookimpl
    def wrap_loss(self, run):
        return _around

    @hookimpl
    def wrap_weights(self, run, policy):
        return _around

    @hookimpl
    def wrap_export(self, run, policy):
        return _around

    @hookimpl
    def wrap_optimizer_step(self, run, policy):
        return _around

    @hookimpl
    def on_step(self, run, metrics): ...

    @hookimpl
    def on_save(self, run, policy, store): ...

    @hookimpl
    def on_load(self, run, policy, store): ...

    @hookimpl
    def on_stop(self, run, error): ...
