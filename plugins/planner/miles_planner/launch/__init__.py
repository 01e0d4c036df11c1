"""Files that start a run on a cluster: a Slurm script, a KubeRay manifest, a SkyPilot task. Written from an accepted plan."""
