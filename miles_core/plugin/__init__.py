"""The plugin host: manifests, facts, rules, plans and hook registration.

A manifest declares as data what a plugin provides, requires and excludes. The checker compares every manifest with the facts
of host, model and options. The resulting plan lists the plugins of a run, and ``load`` imports and registers their hook
classes. ``contracts.hooks`` documents the hooks. The decorator ``hookimpl`` is defined here, in ``marker``, so that plugin
modules can import it without further dependencies. Does not import torch.
"""
