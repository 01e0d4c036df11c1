"""Packed micro-batches, AdamW, save and load.

``trainer`` implements the trainer contract; ``packing`` lays samples into one row with their prompts shared, ``attention``
computes over it, ``optimizer`` steps, ``balance`` keeps routers balanced, ``emulate`` scores as the engine would. With other
ranks it trains as ``data_parallel`` or ``fully_shard`` say.
"""
