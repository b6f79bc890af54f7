"""A node that runs pods, and the pods that controllers make of Kubernetes' manifests.

The node is podman in namespaces of this machine, which end with the process that made
them, however that ends. It does what a kubelet does, where podman does not. The pods
have this machine's programs: the image is nearly empty. Their names are known once they
are published.
"""

from __future__ import annotations

import copy
import io
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

_PROGRAMS = "podman", "runc", "catatonit", "iptables", "dnsmasq"
# The folder of the pods' own programs, which all of them share.
_SHARED = "/train"
# What they have of this machine, under the same names.
_CHECKOUT = Path(__file__).resolve().parents[1]
_MOUNTED = {"/usr", sys.prefix, sys.base_prefix, str(_CHECKOUT)}
VARIABLES = {
    # The system's `mpirun`, before that of a package of Python's.
    "PATH": f"/usr/sbin:/usr/bin:{Path(sys.executable).parent}",
    "PYTHONPATH": f"{_CHECKOUT}/tests/imports",
}
"""The pods' own variables."""
_OF_ETC = "alternatives", "group", "ld.so.cache", "nsswitch.conf"
_USERS = """root:x:0:0::/root:/bin/sh
sshd:x:100:65534::/run/sshd:/usr/sbin/nologin
trainer:x:1000:1000::/tmp:/bin/sh
"""
# Without it, root's account counts as locked.
_PASSWORDS = "root:none:1::::::\n"
_IMAGE = "localhost/image"
_SUBNET, _GATEWAY, _ADDRESS = "10.89.7.0/24", "10.89.7.1", "10.89.7.{}"
_DOMAIN = "default.svc.cluster.local"
_SETTINGS = """
[containers]
# Not above this process' own.
default_ulimits = ["nofile=1024:1024", "nproc=32768:32768"]
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "file"
tmp_dir = "/run/containers/tmp"
[network]
network_backend = "netavark"
network_config_dir = "/run/containers/networks"
"""
# All files of podman's are there: its list of addresses is, whatever its settings say,
# and where a path is longer, it waits for the ends of containers for 20 s each.
_KEEP = (
    "mkdir -p /run/containers && mount -t tmpfs none /run/containers && "
    "ip link set lo up && echo && exec cat"
)
_STORAGE = """
[storage]
driver = "vfs"
graphroot = "/run/containers/graph"
runroot = "/run/containers/run"
"""


def unavailable() -> str:
    """Why there can be no pods here; "" if there can."""
    if os.geteuid() != 0:
        return "only root can have them"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


class Node:
    """Runs pods.

    Args:
        folder: for its files.
        shared: what the pods have as the folder that they start in.
        files: what their image has of its own, by path.
    """

    def __init__(self, folder: Path, shared: Path, files: Mapping[str, str]):
        self._folder = folder
        self._shared = shared
        self._addresses: dict[str, str] = {}
        self._started = 0
        # Its end is the end of all processes of the node.
        self._keeper = subprocess.Popen(
            ["unshare", "--net", "--mount", "--pid", "--fork", "--kill-child"]
            + ["--mount-proc", "sh", "-c", _KEEP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._keeper.stdout.readline() == b"\n"
        keeper = self._keeper.pid
        children = Path(f"/proc/{keeper}/task/{keeper}/children").read_text()
        self._enter = ["nsenter", "--net", "--mount", "--pid", "-t", children.strip()]
        for name, settings in ("containers", _SETTINGS), ("storage", _STORAGE):
            (folder / f"{name}.conf").write_text(settings)
        self._environment = {
            **os.environ,
            "CONTAINERS_CONF": f"{folder}/containers.conf",
            "CONTAINERS_STORAGE_CONF": f"{folder}/storage.conf",
        }
        self._make_image(files)
        self.podman("network", "create", "--disable-dns", "--subnet", _SUBNET, "pods")
        (folder / "names").mkdir()
        self._names = subprocess.Popen(
            [*self._enter, "dnsmasq", "--keep-in-foreground", "--user=root"]
            + ["--no-resolv", "--no-hosts", "--local=/local/", "--pid-file"]
            + [f"--hostsdir={folder}/names"]
        )

    def _make_image(self, files: Mapping[str, str]) -> None:
        packed = self._folder / "image.tar"
        with tarfile.open(packed, "w") as image:
            for name in "bin", "sbin", "lib", "lib64":
                _add(image, name, tarfile.SYMTYPE, linkname=f"usr/{name}")
            for name in "usr", "root", "run/sshd", "var/empty":
                _add(image, name, tarfile.DIRTYPE)
            for name in "tmp", "var/tmp":
                _add(image, name, tarfile.DIRTYPE, mode=0o1777)
            for name in _OF_ETC:
                image.add(f"/etc/{name}", f"etc/{name}")
            of_users = {"etc/passwd": _USERS, "etc/shadow": _PASSWORDS}
            for name, content in {**of_users, **files}.items():
                _add(image, name, tarfile.REGTYPE, content.encode(), mode=0o644)
        variables = [f"ENV {name}={value}" for name, value in VARIABLES.items()]
        changes = [f"--change={each}" for each in [*variables, f"WORKDIR {_SHARED}"]]
        self.podman("import", *changes, packed, _IMAGE)

    def podman(self, *words: object) -> str:
        """What a command of podman's prints. It must succeed."""
        ended = subprocess.run(
            [*self._enter, "podman", *map(str, words)],
            env=self._environment,
            capture_output=True,
            text=True,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def start(self, pod: Mapping[str, Any]) -> None:
        """Starts a pod, with an address that none had before.

        Its name leads to the address before, if it had one, until `publish`.
        """
        self._started += 1
        address = _ADDRESS.format(self._started + 1)
        pod = self._fitted(pod)
        name = pod["metadata"]["name"]
        self._addresses[f"{name}.{pod['spec']['subdomain']}"] = address
        self.podman("tag", _IMAGE, pod["spec"]["containers"][0]["image"])
        manifest = self._folder / f"{name}.yaml"
        manifest.write_text(yaml.safe_dump(pod))
        self.podman("kube", "play", "--network=pods", f"--ip={address}", manifest)

    def _fitted(self, pod: Mapping[str, Any]) -> dict[str, Any]:
        """The pod for podman, which leaves out much of what a kubelet does."""
        pod = copy.deepcopy(pod)
        spec = pod["spec"]
        spec["dnsPolicy"] = "None"
        spec["dnsConfig"] = {
            "nameservers": [_GATEWAY],
            "searches": [_DOMAIN, "svc.cluster.local", "cluster.local"],
            "options": [{"name": "ndots", "value": "5"}],
        }
        security = spec.get("securityContext", {})
        if "fsGroup" in security:
            security["runAsGroup"] = security.pop("fsGroup")
        volumes = spec.setdefault("volumes", [])
        for volume in volumes:
            for kind in {"secret", "configMap"} & volume.keys():
                name = volume.pop(kind)[{"secret": "secretName"}.get(kind, "name")]
                volume["hostPath"] = {"path": f"{self._folder}/{name}"}
        (container,) = spec["containers"]
        mounts = container.setdefault("volumeMounts", [])
        mounted = {_SHARED: str(self._shared), **{path: path for path in _MOUNTED}}
        for number, (there, here) in enumerate(mounted.items()):
            volumes.append({"name": f"own-{number}", "hostPath": {"path": here}})
            mounts.append({"name": f"own-{number}", "mountPath": there})
        return pod

    def add_files(
        self, name: str, files: Mapping[str, bytes], mode: int, group: int = 0
    ) -> None:
        """A Secret or ConfigMap, as a kubelet lays it out for an `fsGroup`."""
        folder = self._folder / name
        version = folder / "..2026_01_01_00_00_00.000000001"
        version.mkdir(parents=True)
        (folder / "..data").symlink_to(version.name)
        for each, content in files.items():
            (version / each).write_bytes(content)
            (version / each).chmod(mode)
            os.chown(version / each, 0, group)
            (folder / each).symlink_to(f"..data/{each}")

    def publish(self) -> None:
        """Makes the pods' names known."""
        lines = [f"{at} {name}.{_DOMAIN}\n" for name, at in self._addresses.items()]
        (self._folder / "names" / "pods").write_text("".join(lines))

    def output(self, container: str) -> str:
        """What a container has printed so far."""
        ended = subprocess.run(
            [*self._enter, "podman", "logs", container],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return ended.stdout

    def wait_for(self, text: str, container: str) -> None:
        """Returns when a container has printed a text."""
        follow = subprocess.Popen(
            [*self._enter, "podman", "logs", "--follow", container],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        with follow:
            printed = []
            for line in follow.stdout:
                printed.append(line)
                if text in line:
                    follow.kill()
                    return
        raise AssertionError(f"{container} ended without {text!r}:\n{''.join(printed)}")

    def exit_codes(self, containers: Iterable[str]) -> list[int]:
        """Waits for containers to end."""
        return [*map(int, self.podman("wait", *containers).split())]

    def remove(self) -> None:
        """Removes all pods."""
        self.podman("pod", "rm", "--all", "--force", "--time=0")

    def close(self) -> None:
        """Ends it with all that runs."""
        try:
            self.remove()
        finally:
            self._keeper.kill()
            self._keeper.wait()
            self._names.wait()
            self._keeper.stdin.close()
            self._keeper.stdout.close()
            # Those of processes that run stay.
            old = ["-depth", "-type", "d", "-path", "*/libpod_parent*", "-delete"]
            subprocess.run(["find", "/sys/fs/cgroup", *old], stderr=subprocess.DEVNULL)


def _add(
    archive: tarfile.TarFile, name: str, kind: bytes, content: bytes = b"", **settings
) -> None:
    entry = tarfile.TarInfo(name)
    entry.type, entry.size, entry.mode = kind, len(content), 0o755
    for attribute, value in settings.items():
        setattr(entry, attribute, value)
    archive.addfile(entry, io.BytesIO(content))


def of_indexed_job(job: Mapping[str, Any], uid: str) -> list[dict[str, Any]]:
    """The pods that the Job controller makes of an Indexed Job.

    Args:
        job: the manifest.
        uid: of this Job, which another one of that name does not have.
    """
    name = job["metadata"]["name"]
    made = []
    for index in range(job["spec"]["completions"]):
        pod = _pod(f"{name}-{index}", job["spec"]["template"])
        pod["metadata"] |= {
            "annotations": {"batch.kubernetes.io/job-completion-index": f"{index}"},
            "labels": {
                "batch.kubernetes.io/job-name": name,
                "batch.kubernetes.io/controller-uid": uid,
            },
        }
        (container,) = pod["spec"]["containers"]
        variable = {"name": "JOB_COMPLETION_INDEX", "value": f"{index}"}
        container.setdefault("env", []).append(variable)
        made.append(pod)
    return made


def of_mpi_job(job: Mapping[str, Any]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The launcher and the workers that the MPI operator makes of an MPIJob.

    They have the ConfigMap NAME-config and the Secret NAME-ssh.
    """
    name = job["metadata"]["name"]
    replicas = job["spec"]["mpiReplicaSpecs"]
    launcher = _pod(f"{name}-launcher", replicas["Launcher"]["template"])
    workers = [
        _pod(f"{name}-worker-{index}", replicas["Worker"]["template"])
        for index in range(replicas["Worker"]["replicas"])
    ]
    variables = {
        "K_MPI_JOB_ROLE": "launcher",
        "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
        "OMPI_MCA_plm_rsh_args": "-o ConnectionAttempts=10",
        "NVIDIA_VISIBLE_DEVICES": "",
        "NVIDIA_DRIVER_CAPABILITIES": "",
    }
    for pod in launcher, *workers:
        spec = pod["spec"]
        spec["subdomain"] = name
        (container,) = spec["containers"]
        own = variables if pod is launcher else {"K_MPI_JOB_ROLE": "worker"}
        container["env"] = [{"name": n, "value": value} for n, value in own.items()]
        volumes = {"/root/.ssh": {"secret": {"secretName": f"{name}-ssh"}}}
        if pod is launcher:
            volumes["/etc/mpi"] = {"configMap": {"name": f"{name}-config"}}
        spec["volumes"] = [
            {"name": f"job-{number}", **volume}
            for number, volume in enumerate(volumes.values())
        ]
        container["volumeMounts"] = [
            {"name": f"job-{number}", "mountPath": path}
            for number, path in enumerate(volumes)
        ]
    return launcher, workers


def hostfile_of(job: Mapping[str, Any]) -> str:
    """The hostfile that the MPI operator makes of an MPIJob."""
    name, spec = job["metadata"]["name"], job["spec"]
    return "".join(
        f"{name}-worker-{index}.{name}.default.svc slots={spec['slotsPerWorker']}\n"
        for index in range(spec["mpiReplicaSpecs"]["Worker"]["replicas"])
    )


def _pod(name: str, template: Mapping[str, Any]) -> dict[str, Any]:
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
    pod["spec"] = copy.deepcopy(template["spec"])
    pod["spec"]["hostname"] = name
    return pod
