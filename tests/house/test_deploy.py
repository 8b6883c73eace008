"""Checks the files for clusters: Ray takes those of `ray up` and of Serve, and the Kubernetes ones hold together.

KubeRay's own fields, their types and which must be there are those of its API reference, v1 (docs/reference/api.md of
ray-project/kuberay), as a schema; the pods are checked against the schemas of Kubernetes.
"""

import copy
import importlib.metadata
import inspect
import json
import re
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve import Application
from ray.serve.schema import ServeDeploySchema

from mvr_ray.capacity import plan
from mvr_ray.config import load_run
from mvr_ray.distributed.cluster import job_metrics
from mvr_ray.distributed.refinement.report import RoundReport
from mvr_ray.errors import ConfigError
from mvr_ray.serving import proxy_limit
from mvr_ray.serving.metrics import Metrics
from mvr_ray.serving.replica import AppArgs, app
from mvr_ray.serving.schemas import Freshness
from mvr_ray.types import FleetCounts, no_progress

ROOT = Path(__file__).resolve().parent.parent.parent
CLOUDS = {"aws": ROOT / "cluster.yaml", "gcp": ROOT / "deploy" / "gcp.yaml"}
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
TEXTS = {"type": "object", "additionalProperties": TEXT}
KUBERNETES_OWN, KUBERNETES_LIST = {"type": "object"}, {"type": "array", "items": {"type": "object"}}


def fields(names: str, **properties: object) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": names.split(), "additionalProperties": False}


GROUP = {"rayStartParams": TEXTS, "template": KUBERNETES_OWN, "resources": TEXTS, "labels": TEXTS}
CLUSTER = fields(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=fields("", mode={"enum": ["disabled", "token"]}),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=fields(
        "",
        resources=KUBERNETES_OWN,
        image=TEXT,
        imagePullPolicy=TEXT,
        securityContext=KUBERNETES_OWN,
        idleTimeoutSeconds=COUNT,
        upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        version={"enum": ["v1", "v2"]},
        env=KUBERNETES_LIST,
        envFrom=KUBERNETES_LIST,
        volumeMounts=KUBERNETES_LIST,
    ),
    headGroupSpec=fields("template", **GROUP, headService=KUBERNETES_OWN, enableIngress=FLAG, serviceType=TEXT),
    workerGroupSpecs={
        "type": "array",
        "items": fields(
            "groupName minReplicas maxReplicas template",
            **GROUP,
            groupName={"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"},
            replicas=COUNT,
            minReplicas=COUNT,
            maxReplicas=COUNT,
            idleTimeoutSeconds=COUNT,
            numOfHosts=COUNT,
            scaleStrategy=fields("", workersToDelete={"type": "array", "items": TEXT}),
            suspend=FLAG,
        ),
    },
    gcsFaultToleranceOptions=KUBERNETES_OWN,
    headServiceAnnotations=TEXTS,
    suspend=FLAG,
    managedBy=TEXT,
)
SERVICE = fields(
    "",
    serveService=KUBERNETES_OWN,
    upgradeStrategy=fields("", type={"enum": ["NewCluster", "NewClusterWithIncrementalUpgrade", "None"]}),
    serveConfigV2=TEXT,
    rayClusterConfig=CLUSTER,
    excludeHeadPodFromServeSvc=FLAG,
)
KUBERAY = {
    kind: fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": "ray.io/v1"},
        kind={"const": kind},
        metadata={"type": "object", "required": ["name"]},
        spec=spec,
    )
    for kind, spec in {"RayCluster": CLUSTER, "RayService": SERVICE}.items()
}
WIKIPEDIA_PASSAGES = 21_015_324
KUBERNETES = ("1.30", "1.34")
"""The pods are checked against the schemas of these."""
CPU, MEMORY = re.compile(r"\d+m?|\d+\.\d+"), re.compile(r"[1-9]\d*(Ki|Mi|Gi|Ti)")
NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(params=["raycluster", "rayservice"])
def manifest(request: pytest.FixtureRequest) -> dict[str, Any]:
    return load(ROOT / "deploy" / "kuberay" / f"{request.param}.yaml")


def spec_of(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"] if manifest["kind"] == "RayCluster" else manifest["spec"]["rayClusterConfig"]


def pods(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [group["template"]["spec"] for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"])]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_up_takes_the_file_and_refuses_it_with_a_word_misspelt(cloud: str) -> None:
    whole = load(CLOUDS[cloud])
    validate_config(prepare_config(copy.deepcopy(whole)))
    assert whole["provider"]["type"] == cloud
    for misspelt in ({**whole, "max_worker": 3}, {**whole, "idle_timeout_minutes": "ten"}):
        with pytest.raises(Exception, match=r"max_worker|ten"):
            validate_config(prepare_config(copy.deepcopy(misspelt)))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_head_has_no_gpu_and_only_encoders_come_and_go_as_spot(cloud: str) -> None:
    manifest = load(CLOUDS[cloud])
    nodes = manifest["available_node_types"]
    assert set(nodes) == {"head", "encoder", "searcher"} and manifest["head_node_type"] == "head"
    assert [name for name, node in nodes.items() if node["resources"].get("GPU")] == ["encoder"]
    assert [name for name, node in nodes.items() if "spot" in str(node["node_config"]).lower()] == ["encoder"]
    assert nodes["encoder"]["min_workers"] == 0 < nodes["encoder"]["max_workers"]
    assert manifest["max_workers"] >= nodes["encoder"]["max_workers"] + nodes["searcher"]["max_workers"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_the_wikipedia_run_asks_for_fits(cloud: str) -> None:
    nodes = load(CLOUDS[cloud])["available_node_types"]
    check_fits(
        nodes["encoder"]["max_workers"] * nodes["encoder"]["resources"]["GPU"],
        nodes["searcher"]["max_workers"] * nodes["searcher"]["resources"]["CPU"],
    )


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_get_the_whole_package_and_bounded_logs(cloud: str) -> None:
    """rsync leaves out what matches a pattern of `**` anywhere, as a folder `store` of the package would."""
    manifest = load(CLOUDS[cloud])
    names = {part for path in (ROOT / "mvr_ray").rglob("*") for part in path.relative_to(ROOT).parts}
    made_there = ("__pycache__/", "*.so")
    lines = (line for line in (ROOT / ".gitignore").read_text().splitlines() if line not in made_there)
    patterns = [pattern.removeprefix("**/") for pattern in manifest["rsync_exclude"]]
    patterns += [line.rstrip("/") for line in lines if not line.startswith("/")]
    assert patterns and not [name for name in names for pattern in patterns if fnmatch(name, pattern)]
    for commands in ("head_start_ray_commands", "worker_start_ray_commands"):
        [start] = [line for line in manifest[commands] if "ray start" in line]
        assert "RAY_ROTATION_MAX_BYTES=100000000" in start


def test_machines_of_google_have_disks_that_they_take_and_memory_to_ask_for() -> None:
    """The default type of a disk is none that G2 takes, and Ray asks Google for no machine's memory."""
    manifest = load(CLOUDS["gcp"])
    zone = manifest["provider"]["availability_zone"]
    for name, node in manifest["available_node_types"].items():
        disks = [disk["initializeParams"]["diskType"] for disk in node["node_config"]["disks"]]
        assert disks == [f"zones/{zone}/diskTypes/pd-balanced"]
        assert name == "head" or node["resources"]["memory"] >= 20_000_000_000


def test_secrets_that_the_documents_put_into_a_clone_are_neither_committed_nor_sent() -> None:
    assert {"/tokens", "*.key"} <= {*(ROOT / ".gitignore").read_text().splitlines()}
    assert {"tokens", "**/*.key"} <= {*(ROOT / ".dockerignore").read_text().splitlines()}


def test_spot_machines_of_google_are_scheduled_by_one_object() -> None:
    """As its API has `scheduling` of an instance; Ray passes it on as it is (ray-project/ray issue 46248)."""
    node = load(CLOUDS["gcp"])["available_node_types"]["encoder"]["node_config"]
    assert node["scheduling"].keys() == {"provisioningModel", "instanceTerminationAction", "onHostMaintenance"}


def check_fits(gpus: int, cpus: int) -> None:
    resources = load_run(ROOT / "configs" / "wikipedia.yaml").resources
    assert (
        max(resources.encoders_max * resources.gpus_per_encoder, resources.train_workers * resources.gpus_per_trainer)
        <= gpus
    )
    assert resources.searchers * resources.cpus_per_searcher <= cpus


@pytest.mark.parametrize("cloud", CLOUDS)
def test_a_machine_with_the_cpus_of_a_searcher_has_its_memory(cloud: str) -> None:
    nodes = load(CLOUDS[cloud])["available_node_types"]
    config = nodes["searcher"]["node_config"]
    memory = {"r6i.2xlarge": 64 << 30, "n2-highmem-8": 64 << 30}[config.get("InstanceType") or config["machineType"]]
    check_memory({name: node["resources"]["CPU"] for name, node in nodes.items()}, memory)


def check_memory(cpus_of: dict[str, int], memory: int) -> None:
    run = load_run(ROOT / "configs" / "wikipedia.yaml")
    cpus = run.resources.cpus_per_searcher
    assert [name for name in cpus_of if cpus_of[name] >= cpus] == ["searcher"]
    of = {line.what: line.bytes_each for line in plan(run, WIKIPEDIA_PASSAGES).lines if line.kind == "memory"}
    largest = max(of["searcher"] + of["searcher, one more version"], of["refiner"])
    assert cpus_of["searcher"] // cpus * largest <= memory


def test_ports_of_ray_are_open_to_no_client_without_a_token() -> None:
    for path in CLOUDS.values():
        manifest = load(path)
        starts = [*manifest["head_start_ray_commands"], *manifest["worker_start_ray_commands"]]
        for command in starts:
            assert "ray start" not in command or "RAY_AUTH_MODE=token" in command
        assert any("--dashboard-host=127.0.0.1" in command for command in starts)
        assert "~/.ray/auth_token" in manifest["file_mounts"]
        assert "chmod 600 ~/.ray/auth_token" in manifest["setup_commands"]


def test_the_kubernetes_files_are_what_kuberay_takes_and_a_word_misspelt_is_not(manifest: dict[str, Any]) -> None:
    takes = jsonschema.Draft202012Validator(KUBERAY[manifest["kind"]])
    takes.validate(manifest)
    spec = spec_of(manifest)
    assert NAME.fullmatch(manifest["metadata"]["name"]) and spec["authOptions"] == {"mode": "token"}
    for group in spec["workerGroupSpecs"]:
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for mutate in (
        lambda spec: spec.update(enableInTreeAutoscalin=True),
        lambda spec: spec["authOptions"].update(mode="tokens"),
        lambda spec: spec["autoscalerOptions"].update(upscalingMode="default"),
        lambda spec: spec["headGroupSpec"]["rayStartParams"].update({"num-cpus": 0}),
        lambda spec: spec["workerGroupSpecs"][0].update(maxReplicas="3"),
        lambda spec: spec["workerGroupSpecs"][0].pop("groupName"),
    ):
        wrong = copy.deepcopy(manifest)
        mutate(spec_of(wrong))
        assert not takes.is_valid(wrong)


@pytest.mark.parametrize("version", KUBERNETES)
def test_pods_are_what_kubernetes_takes_and_a_word_misspelt_is_not(manifest: dict[str, Any], version: str) -> None:
    spec = spec_of(manifest)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        template = {"metadata": {}, **group["template"]}
        assert set(template) == {"metadata", "spec"}
        pod = {"apiVersion": "v1", "kind": "Pod", **template}
        kubernetes_validate.validate(pod, version, strict=True)
        [container] = pod["spec"]["containers"]
        for wrong in ({"imagePullPolice": "Always"}, {"ports": [{"containerPort": "http"}]}, {"env": {"A": "b"}}):
            broken_pod = {**pod, "spec": {**pod["spec"], "containers": [{**container, **wrong}]}}
            with pytest.raises(kubernetes_validate.ValidationError):
                kubernetes_validate.validate(broken_pod, version, strict=True)


def test_pods_ask_for_what_they_may_use_and_mount_what_they_declare(manifest: dict[str, Any]) -> None:
    for pod in pods(spec_of(manifest)):
        [container] = pod["containers"]
        assert NAME.fullmatch(container["name"])
        limits, requests = container["resources"]["limits"], container["resources"]["requests"]
        assert limits == requests, "a pod that may use more than it asks for is the first to be killed"
        assert CPU.fullmatch(limits["cpu"]) and MEMORY.fullmatch(limits["memory"])
        assert set(limits) <= {"cpu", "memory", "nvidia.com/gpu"}
        mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounts == {volume["name"] for volume in pod.get("volumes", [])}
        ports = [port["containerPort"] for port in container.get("ports", [])]
        names = [port["name"] for port in container.get("ports", [])]
        assert len(set(ports)) == len(ports) and len(set(names)) == len(names)
        assert all(NAME.fullmatch(name) and len(name) <= 15 for name in names)
        for toleration in pod.get("tolerations", []):
            assert toleration["operator"] == "Exists" or "value" in toleration


def test_copies_of_shards_fill_a_file_system_of_their_own_and_no_quota(manifest: dict[str, Any]) -> None:
    """Copies give way where their file system is full; of an emptyDir that is the node's, and its limit evicts the
    pod."""
    caches = []
    for pod in pods(spec_of(manifest)):
        for volume in pod.get("volumes", []):
            assert set(volume) == {"name", "ephemeral"} and pod["securityContext"]["fsGroup"]
            mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
            environment = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
            caches.append(mounts[volume["name"]] == environment["MVR_RAY_CACHE"])
    assert caches == [True]


def test_images_and_versions_are_those_of_the_ray_that_is_pinned(manifest: dict[str, Any]) -> None:
    version, spec = importlib.metadata.version("ray"), spec_of(manifest)
    assert spec["rayVersion"] == version
    for pod in pods(spec):
        image = pod["containers"][0]["image"]
        gpu = "nvidia.com/gpu" in pod["containers"][0]["resources"]["limits"]
        assert image.endswith(f":{version}-{'gpu' if gpu else 'cpu'}")
        assert f"-t {image} ." in (ROOT / "deploy" / "Dockerfile").read_text()


def test_gpus_of_the_kubernetes_cluster_are_spot_encoders_from_none_up() -> None:
    spec = load(ROOT / "deploy" / "kuberay" / "raycluster.yaml")["spec"]
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    spot = [name for name, group in groups.items() if "spot" in str(group["template"]["spec"].get("nodeSelector"))]
    assert [name for name in groups if "nvidia.com/gpu" in limits[name]] == spot == ["encoder"]
    assert groups["encoder"]["minReplicas"] == 0
    encoders = groups["encoder"]["maxReplicas"] * int(limits["encoder"]["nvidia.com/gpu"])
    check_fits(encoders, groups["searcher"]["maxReplicas"] * int(limits["searcher"]["cpu"]))


def test_a_pod_with_the_cpus_of_a_searcher_has_its_memory(manifest: dict[str, Any]) -> None:
    spec = spec_of(manifest)
    groups = {"head": spec["headGroupSpec"], **{group["groupName"]: group for group in spec["workerGroupSpecs"]}}
    limits = {name: group["template"]["spec"]["containers"][0]["resources"]["limits"] for name, group in groups.items()}
    cpus = {name: int(group["rayStartParams"].get("num-cpus", limits[name]["cpu"])) for name, group in groups.items()}
    check_memory(cpus, int(limits["searcher"]["memory"].removesuffix("Gi")) << 30)


def test_the_service_has_a_searcher_pod_for_every_searcher() -> None:
    [group] = load(ROOT / "deploy" / "kuberay" / "rayservice.yaml")["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert group["minReplicas"] >= load_run(ROOT / "configs" / "wikipedia.yaml").resources.searchers


def test_the_kubernetes_files_take_no_service_of_each_other() -> None:
    """KubeRay names the Service of a head after the RayCluster or the RayService."""
    names = [load(path)["metadata"]["name"] for path in sorted((ROOT / "deploy" / "kuberay").iterdir())]
    assert len(names) == len(set(names)) == 2


def test_the_service_names_an_application_that_serve_can_build(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = load(ROOT / "deploy" / "kuberay" / "rayservice.yaml")["spec"]
    serve_config = ServeDeploySchema.model_validate(yaml.safe_load(spec["serveConfigV2"]))
    [application] = serve_config.applications
    assert application.import_path == f"{inspect.getmodule(app).__name__}:{app.__name__}"  # type: ignore[union-attr]
    monkeypatch.chdir(ROOT)
    args = AppArgs.model_validate(application.args)
    for name in ("MVR_RAY_READ_TOKEN", "MVR_RAY_ADMIN_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="no token to ask for"):
        app(args)
    monkeypatch.setenv("MVR_RAY_READ_TOKEN", "read-" + "r" * 20)
    assert isinstance(app(args), Application)
    assert load_run(args.config, args.overrides).serve.host == "0.0.0.0"
    with pytest.raises(ConfigError, match=r"serve\.hosts"):
        app(args.model_copy(update={"overrides": ["serve.hosts=x"]}))
    for pod in pods(spec["rayClusterConfig"]):
        env = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in pod["containers"][0]["env"]}
        assert env["MVR_RAY_READ_TOKEN"] and env["MVR_RAY_ADMIN_TOKEN"]
        assert serve_config.http_options.port in [port["containerPort"] for port in pod["containers"][0]["ports"]]


class CountingRouter:
    """In the place of a router whose searchers count."""

    index = "squad"
    manifest = SimpleNamespace(dirty_share=0.25)

    @property
    def searchers(self) -> "CountingRouter":
        return self

    def counts(self) -> FleetCounts:
        return FleetCounts(5, 4, 3, 2, 1)


class LateServer:
    """Stands for a monitor that has looked."""

    def measure(self) -> Freshness:
        return Freshness(oldest_change_s=60, newest_passage_s=90, waiting_files=2)


def test_metrics_report_calls_of_searchers_as_the_router_counts_them() -> None:
    metrics = Metrics()
    metrics.add_router(CountingRouter())
    metrics.note_recall(0.5)
    metrics.note_recall(1.0)
    samples = dict(line.split(" ") for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    expected = {
        "mvr_ray_hedged_calls_total": 5,
        "mvr_ray_hedge_wins_total": 4,
        "mvr_ray_refused_searches_total": 3,
        "mvr_ray_calls_waiting": 2,
        "mvr_ray_most_calls_waiting": 1,
        'mvr_ray_dirty_share{index="squad"}': 0.25,
        "mvr_ray_sampled_queries_total": 2,
        "mvr_ray_sampled_recall_total": 1.5,
    }
    assert {name: float(samples[name]) for name in expected} == expected


def test_the_dashboard_asks_for_what_a_server_counts() -> None:
    """Names and labels of every query; a series without labels of its own needs none."""
    metrics = Metrics("r1")
    metrics.note_request("/v1/search", "POST", 200, 0.1)
    metrics.note_stage("merge", 0.1)
    metrics.note_served("squad", 1, 1.0)
    metrics.add_router(CountingRouter())
    metrics.add_freshness(LateServer())
    lines = [line.partition(" ")[0] for line in metrics.text().decode().splitlines() if not line.startswith("#")]
    metric_labels: dict[str, set[str]] = {}
    for line in lines:
        name, _, labels = line.partition("{")
        metric_labels.setdefault(name, set()).update(re.findall(r'(\w+)="', labels))
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    expressions = {target["expr"] for panel in panels for target in panel["targets"]}
    expressions = {expression for expression in expressions if "ray_mvr_ray" not in expression}  # those are jobs'
    queried_names: set[str] = set()
    for expression in expressions:
        names = re.findall(r"mvr_ray_\w+", expression)
        assert names and set(names) <= metric_labels.keys(), expression
        queried_names.update(names)
        group_labels = {one for group in re.findall(r"by \(([^)]*)\)", expression) for one in re.split(r",\s*", group)}
        matcher_labels = {
            one for group in re.findall(r"\{([^}]*)\}", expression) for one in re.findall(r"(\w+)=", group)
        }
        assert group_labels | matcher_labels <= set.union(*(metric_labels[name] for name in names)), expression
    assert all("replica" in labels for labels in metric_labels.values())
    metric_names = {name for name in metric_labels if not re.search(r"_(created|count|sum)$", name)}
    assert queried_names == metric_names


def test_the_dashboard_asks_for_what_jobs_and_proxies_note(monkeypatch) -> None:
    metric_tags: dict[str, tuple[str, ...]] = {}

    class NoteTaker:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...] = ()) -> None:
            metric_tags[f"ray_{name}"] = tag_keys

        def set(self, *_: object) -> None: ...

    monkeypatch.setattr("ray.util.metrics.Gauge", NoteTaker)
    monkeypatch.setattr(job_metrics, "_gauge", job_metrics._gauge.__wrapped__)
    monkeypatch.setattr(job_metrics.session, "in_ray", lambda: True)
    monkeypatch.setattr(proxy_limit, "Counter", NoteTaker)
    job_metrics.with_metrics("index", "squad", no_progress)("encode", 1, 2)
    job_metrics.record_round("squad", dict.fromkeys(RoundReport._fields, 0.5))
    proxy_limit.ProxyLimiter(None, max_waiting=1, timeout_s=1.0)
    panels = json.loads((ROOT / "deploy" / "grafana.json").read_text())["panels"]
    expressions = {target["expr"] for panel in panels for target in panel["targets"] if "ray_mvr_ray" in target["expr"]}
    assert len(expressions) >= 4
    for expression in expressions:
        names = re.findall(r"ray_mvr_ray_\w+", expression)
        group_labels = {one for group in re.findall(r"by \(([^)]*)\)", expression) for one in re.split(r",\s*", group)}
        assert set(names) <= metric_tags.keys() and group_labels <= set(metric_tags[names[0]]), expression
