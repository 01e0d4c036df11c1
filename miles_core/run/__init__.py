"""What a run is made of: its parts, its log, its checkpoints.

Everything between an accepted plan and the loop: the run and its log are made, the parts of every policy built by the
runtime (``inline`` is the one within one process) and released, completed steps saved and resumed.
"""
