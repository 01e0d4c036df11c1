"""The model definition that engine and trainer share: loading, attention, experts, export.

Both run the same Transformers modules with a ``Call`` per forward pass, compute log-probabilities the same way, and address tensors by
their checkpoint names. ``operations`` lets a plugin replace individual steps of a layer.
"""

from miles_core.data.transformers_import import import_transformers

import_transformers()
