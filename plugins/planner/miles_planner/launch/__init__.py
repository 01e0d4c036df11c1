"""Files that start a run on a cluster: a Slurm script. Written from an accepted plan."""
