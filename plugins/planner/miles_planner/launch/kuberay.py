"""A RayJob of KubeRay (``ray.io/v1``): the operator starts a Ray cluster, runs the driver in it, and removes it at the end.

Fields as in the API reference of KubeRay. Every pod takes the GPUs of a whole machine, the head too.
"""

from __future__ import annotations

import shlex
from typing import Any

import yaml

from miles_core.plugin import ConfigError
from miles_planner.launch.job import Job

SUFFIX = ".yaml"
#: Name of the claim of the shared directory's volume.
CLAIM = "miles-shared"


def write(job: Job) -> str:
    """Return the manifest.

    Raises:
        ConfigError: the job names no image.
    """
    if not job.image:
        raise ConfigError(
            "miles launch kuberay: pods run an image; give one with --image (docker/Dockerfile builds it)"
        )
    cluster: dict[str, Any] = {
        "headGroupSpec": {
            "rayStartParams": {"dashboard-host": "0.0.0.0", "num-gpus": str(job.gpus)},
            "template": _pod(job, "ray-head"),
        }
    }
    if job.machines > 1:
        count = job.machines - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "gpu",
                "replicas": count,
                "minReplicas": count,
                "maxReplicas": count,
                "rayStartParams": {"num-gpus": str(job.gpus)},
                "template": _pod(job, "ray-worker"),
            }
        ]
    entrypoint = f"bash -c {shlex.quote(f'{job.wait_for_machines()} && {job.command_line}')}"
    manifest = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": job.name, "annotations": {"miles/plan": job.header}},
        "spec": {
            "entrypoint": entrypoint,
            "shutdownAfterJobFinishes": True,
            "ttlSecondsAfterFinished": 600,
            "activeDeadlineSeconds": job.hours * 3600,
            "rayClusterSpec": cluster,
        },
    }
    return yaml.safe_dump(manifest, sort_keys=False, width=200)


def _pod(job: Job, container: str) -> dict[str, Any]:
    """Return the pod template of one machine."""
    volumes = [
        {"name": "shared", "persistentVolumeClaim": {"claimName": CLAIM}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": job.image,
                    "resources": {"limits": {"nvidia.com/gpu": job.gpus}, "requests": {"nvidia.com/gpu": job.gpus}},
                    "volumeMounts": [
                        {"name": "shared", "mountPath": job.shared},
                        {"name": "memory", "mountPath": "/dev/shm"},
                    ],
                }
            ],
            "volumes": volumes,
        }
    }


def submit(path: str) -> str:
    """Return the command that starts the job."""
    return f"kubectl apply -f {shlex.quote(path)}"
