"""The plugin host: manifests, facts, rules, the plan, hooks.

A manifest declares in data what a plugin provides, needs and excludes. The checker holds every manifest against the facts
of host, model and options; the plan says what takes part, and ``load`` brings its hook classes to life. What a hook is for
is said in ``contracts.hooks``; the mark that plugins put on an implementation (``hookimpl``) is here, in ``marker``, because
a plugin's module needs it before anything else. Imports no torch.
"""
