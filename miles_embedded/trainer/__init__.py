"""The embedded trainer: packed micro-batches, an optimizer with FP32 masters, checkpoints.

``trainer`` implements the trainer contract; ``packing`` lays out samples in one row with shared prompts, ``attention`` computes over
that row, ``optimizer`` steps, ``balance`` adds the load-balancing loss, and ``emulate`` scores like the engine. With several ranks,
``data_parallel`` replicates the model and ``fully_shard`` shards it.
"""
