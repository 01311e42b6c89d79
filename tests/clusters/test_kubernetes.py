"""docs/kubernetes.yaml is what Kubernetes takes, and its command what torchrun and `-m executor` take."""

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from torch.distributed.run import get_args_parser

from executor.launch.torchrun import flags

FILE = Path(__file__).parents[2] / "docs" / "kubernetes.yaml"
RELEASE = "1.31"


def _documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(FILE.read_text("utf-8")))


def test_the_manifest_is_valid() -> None:
    service, job = _documents()
    for document in (service, job):
        kubernetes_validate.validate(document, RELEASE, strict=True)
    del job["spec"]["template"]["spec"]["restartPolicy"], job["spec"]["template"]["spec"]["containers"][0]["name"]
    with pytest.raises(kubernetes_validate.ValidationError, match="name"):
        kubernetes_validate.validate(job, RELEASE, strict=True)


def test_its_words_fit_together() -> None:
    service, job = _documents()
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (ranks,) = pod["containers"]
    args = get_args_parser().parse_args([a.replace("$(JOB_COMPLETION_INDEX)", "1") for a in ranks["args"]])
    assert args.nnodes == str(spec["completions"]) == str(spec["parallelism"])
    assert args.nproc_per_node == str(ranks["resources"]["limits"]["nvidia.com/gpu"])
    assert args.master_addr == f"{job['metadata']['name']}-0.{service['metadata']['name']}" and args.node_rank == 1
    assert pod["subdomain"] == service["metadata"]["name"] and args.training_script == "executor" and args.module
    own = flags().parse_args(args.training_script_args)
    assert own.save in ranks["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert {m["name"] for m in ranks["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    assert own.save.startswith(ranks["volumeMounts"][0]["mountPath"])
