"""Options: dataclasses that become flags and facts.

A flag of core is a field of a dataclass in ``groups``; a plugin's flags are the fields of its own dataclass. From each field
come the flag (``flags``), the key of a YAML file (``file``), the argument of a call from Python (``load``) and the fact that
rules ask for. ``Config`` holds the checked values and where each came from. Imports no torch.
"""
