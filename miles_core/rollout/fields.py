"""The declared fields that core itself fills."""

from miles_core.data.field import Field

#: Token ids the engine could have sampled at each response position (top-k, top-p); always contains the sampled one.
SAMPLING_SUPPORT = Field("sampling_support", "int32", "response", ragged=True)
