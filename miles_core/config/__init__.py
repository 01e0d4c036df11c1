"""Options: dataclass fields that define flags, configuration keys and facts.

Core's options are the fields of the dataclasses in ``groups``; a plugin's options are the fields of its own dataclass. Each
field defines a flag (``flags``), a key of a configuration file (``file``) and a fact that rules can read. ``load`` combines all
sources into a ``Config``, which holds the checked values and their origins. Does not import torch.
"""
