"""Files of weights and state, complete or absent.

Checkpoints of a run: the directories (``directory``), what plugins and core put into them (``store``), random-number states
(``rng``). Checkpoints in the Hugging Face layout are read tensor by tensor here too (``hf_files``); ``convert`` writes them.
"""
