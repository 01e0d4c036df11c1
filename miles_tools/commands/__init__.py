"""Commands of ``miles`` beyond ``train`` and ``plan``. Each module has ``run(argv) -> exit code``."""
