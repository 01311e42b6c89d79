"""`piper-sim export --to FRAMEWORK`: a job as the files that start it; what they cannot say is refused or listed."""

import json
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ir.core.errors import PiperError, job_error, nearest, usage_error
from ir.core.files import named_path
from ir.graph.recompute import RecomputedLayers
from ir.job.build import PreparedJob, precision_of, prepare
from ir.job.load import job_from
from ir.job.schema import Job
from ir.job.table import keys_of, table_of, toml_sections
from ir.workload.config.load import presets, raw_config
from ir.workload.config.spec import LayerForm, ModelConfig
from ir.workload.setting import shares_kv_heads
from piper_sim.frameworks.from_job import MEGATRON, facts_of, nodes_of
from piper_sim.frameworks.importing import UNKNOWN, ImportedJob, import_launch
from piper_sim.frameworks.table import chains, rows
from piper_sim.frameworks.table import facts as tables
from piper_sim.frameworks.to_job.draft import Facts
from piper_sim.frameworks.to_job.launch import SHARED, not_started
from piper_sim.frameworks.values import write_value

FRAMEWORKS = ("megatron", "megatron-bridge", "torchtitan", "deepspeed", "automodel", "accelerate", "primus")
LAUNCH = "launch.sh"
# Of a model: neither time nor bytes.
_MODEL = {"source", "max_positions", "init_std", "norm_eps", "rope_theta", "rope_scaling", "rope_share"}
_MODEL |= {"rope_pairs", "score_scale", "score_by_layer", "embed_dropout", "model_type", "stored", "act", "form"}


@dataclass(frozen=True)
class ExportedJob:
    """The files of a launch, read again, and the job's keys that they do not say: key -> what they say instead."""

    files: Mapping[str, str]
    left_out: Mapping[str, object]
    read: ImportedJob

    def changed(self, before: ImportedJob) -> list[dict[str, object]]:
        """The arguments that state something else than those of a launch imported before, by what they bear on.

        Of another framework, or where one of them says nothing, an argument is named as the other launch names it.
        """
        old, new = ({e.fact: e for e in x.entries if e.fact and e.list != UNKNOWN} for x in (before, self.read))
        out: list[dict[str, object]] = []
        for fact in dict.fromkeys((*new, *old)):
            was, now = old.get(fact), new.get(fact)
            section, _, key = (was or now or next(iter(new.values()))).key.partition(".")
            same = before.job.get(section, {}).get(key) == self.read.job.get(section, {}).get(key)
            same = same if key else now is None  # an argument of no key counts where the new launch asks for it
            if (was and was.said) == (now and now.said) or (same and not (was and now)):
                continue
            alone = was if now is None else now if was is None else None
            if alone is not None and alone.said == tables()["usual"].get(fact):
                continue
            name = (now or was or next(iter(new.values()))).argument.name
            row = {"was": was.argument.value if was else None, "now": now.argument.value if now else None}
            out.append({"argument": name, **row, "key": f"{section}.{key}" if key else ""})
        return out


def exported_to(word: str, others: tuple[str, ...] = ()) -> str:
    """What a user means by --to, a framework or one of others. Raises PiperError (usage): none is so called."""
    name, allowed = "megatron" if word == "megatron-lm" else word, (*others, *FRAMEWORKS)
    if name in allowed:
        return name
    raise usage_error("--to", f"no format {word!r}", nearest(name, allowed), allowed)


def export_launch(prepared: PreparedJob, framework: str, again: Callable[[Job], PreparedJob] = prepare) -> ExportedJob:
    """A job as a framework's launch, read back to see what it says. again: prepares what is read as the job was.

    Raises PiperError (job): the framework has no word for something that decides the plan.
    """
    for key, value, why in not_started(prepared) if framework in MEGATRON else ():
        raise _cannot(framework, key, value, why)
    if framework not in MEGATRON and prepared.job.optimizer.name == "muon":
        raise _cannot(framework, "optimizer.name", "muon", "only Megatron's launches have words for it")
    if framework not in MEGATRON and shares_kv_heads(prepared.config, prepared.mesh.sizes["tp"]):
        raise _cannot(framework, "parallel.tp", prepared.mesh.sizes["tp"], SHARED)
    found_facts = facts_of(prepared, framework)
    if framework == "torchtitan" and "flavor" not in found_facts:
        raise _cannot(framework, "model.config", prepared.job.model.name, "none of its flavors has these sizes")
    arguments = dict(_arguments(framework, found_facts))
    files = _files(prepared, framework, arguments)
    with tempfile.TemporaryDirectory() as folder:
        for name, text in files.items():
            (Path(folder) / name).write_text(text, encoding="utf-8")
        found = import_launch(str(Path(folder) / LAUNCH), framework)
        try:
            back = again(job_from(found.job))  # which may read the config.json there
        except PiperError as e:
            raise _cannot(framework, e.key or "model", None, e.message) from None
    wrong = dict(_different(prepared, back))
    if wrong:
        key, (mine, theirs) = next(iter(wrong.items()))
        raise _cannot(framework, key, mine, f"it would be read as {_shown(theirs)}")
    return ExportedJob(files, dict(_left_out(prepared, back)), found)


def _cannot(framework: str, key: str, value: object, why: str) -> PiperError:
    said = f" = {_shown(value)}" if value is not None else ""
    message, allowed = f"{framework} cannot say {key}{said}: {why}", f"what a launch of {framework} says"
    return job_error(key, message, "another --to, or --set this key", allowed)


def _shown(value: object) -> str:
    """A value as a job would have it, or a layout string.

    >>> _shown(("Et", "tL")), _shown(RecomputedLayers(frozenset({"norm", "mlp"}), frozenset({3, 1})))
    ("'Et|tL'", "['mlp', 'norm'] in layers [1, 3]")
    """
    if isinstance(value, RecomputedLayers):
        where = "" if value.layers is None else f" in layers {sorted(value.layers)}"
        return f"{sorted(value.options)}{where}" if value.options else repr("none")
    if isinstance(value, tuple) and value and all(isinstance(v, str) for v in value):
        return repr("|".join(value))
    return repr(value)


def _arguments(framework: str, f: Facts) -> Iterator[tuple[str, object]]:
    """(argument, value) of each fact, in the order of the table; each fact by the first row that can say it."""
    said: set[str] = {k for k, v in f.items() if v is None}
    for own in chains()[framework][: 9 if framework in MEGATRON else 1]:
        for row in rows(own):
            if row.fact in f and row.fact not in said and (value := write_value(row.how, f[row.fact])) is not None:
                said.add(row.fact)
                yield row.names[0], value


def _files(prepared: PreparedJob, framework: str, arguments: Mapping[str, object]) -> dict[str, str]:
    nodes, per = nodes_of(prepared)
    where = f"--nnodes {nodes} --nproc_per_node {per}"
    if framework == "megatron":
        words = [f"--{k.replace('_', '-')}{_word(v)}" for k, v in arguments.items() if v is not False]
        hybrid = "hybrid_layer_pattern" in arguments
        words += [f"--spec {' '.join(tables()['hybrid_spec'])}"] if hybrid else []
        program = "pretrain_hybrid.py" if hybrid else "pretrain_gpt.py"
        sizes, fsdp = prepared.mesh.sizes, "use_megatron_fsdp" in arguments
        ordered = max(sizes["tp"], sizes["cp"]) > 1 and not fsdp and "overlap_moe_expert_parallel_comm" not in arguments
        env = "export CUDA_DEVICE_MAX_CONNECTIONS=1\n" if ordered else ""
        return {LAUNCH: _script([f"{env}torchrun {where} {program}", *words])}
    name, line = tables()["files"][framework].values()
    own = dict(arguments)
    files: dict[str, str] = {}
    if framework in ("deepspeed", "accelerate"):
        where = f"--num_nodes {nodes} --num_gpus {per}"
        line += f" --max_seq_len {prepared.job.model.seq_len}"
        line += " --gradient_checkpointing" if own.pop("gradient_checkpointing", None) else ""
        own.pop("max_seq_len", None)
        line += " --gradient_checkpointing" if own.pop("fsdp_config.fsdp_activation_checkpointing", None) else ""
        if framework == "accelerate":
            line += f" --per_device_train_batch_size {prepared.job.schedule.microbatch_size}"
            line += f" --gradient_accumulation_steps {prepared.mbs}"
    if framework in ("deepspeed", "accelerate") or own.get("model.pretrained_model_name_or_path") == "config.json":
        files["config.json"] = json.dumps(hugging_face(prepared.job), indent=1) + "\n"
    tree = _tree(framework, own)
    if framework == "torchtitan":
        files[name] = toml_sections(tree)
    elif name.endswith(".json"):
        files[name] = json.dumps(tree, indent=1) + "\n"
    else:
        import yaml

        files[name] = yaml.safe_dump(tree, sort_keys=False)
    return {LAUNCH: _script([line.format(where)]), **files}


def _word(value: object) -> str:
    if value is True:
        return ""
    words = value if isinstance(value, list) else [value]
    return "".join(" " + shlex.quote(str(w)) for w in words)


def _script(lines: list[str]) -> str:
    return "#!/bin/bash\n" + " \\\n    ".join(lines) + "\n"


def _tree(framework: str, arguments: Mapping[str, object]) -> dict[str, Any]:
    """Dotted arguments as sections; those of Megatron's configs where they belong."""
    sections: Mapping[str, str] = tables()["sections"].get(framework, {})
    tree: dict[str, Any] = {}
    for name, value in arguments.items():
        if name.startswith("megatron_lm_config"):  # of another kind of launch
            continue
        prefix = sections.get(name, sections.get("", ""))
        *path, last = [x for x in f"{prefix}.{name}".split(".") if x]
        at = tree
        for part in path:
            if isinstance(word := at.get(part), str):  # bf16_mixed, and keys of its own beside it
                at[part] = {word.partition("_")[0]: True}
            at = at.setdefault(part, {})
        at[last] = value
    if framework == "primus":
        first = {"framework": "megatron", "config": "pre_trainer.yaml"}
        tree["modules"]["pre_trainer"] = first | tree["modules"]["pre_trainer"]
    if framework == "accelerate":
        tree = {"compute_environment": "LOCAL_MACHINE", **tree}
    return tree


def hugging_face(job: Job) -> dict[str, object]:
    """The model as a config.json: the preset's or file's keys with those set inline.

    Raises PiperError (job): a captured model has none, and no class of transformers has Megatron's type.
    """
    if job.model.graph is not None:
        message = "a captured model has no config.json"
        raise job_error("model.graph", message, allowed="model.config", file=job.file)
    name = job.model.config
    found = (raw_config(named_path(job.file, name, presets())) if name else {}) | dict(job.model.overrides)
    found |= {"q_lora_rank": None} if found.get("q_lora_rank") == 0 else {}  # as transformers' class has it
    if found.get("model_type") == "megatron":
        message = "no class of transformers is called megatron, and no other has just its layers"
        raise job_error("model.model_type", message, "--to megatron, megatron-bridge or primus", file=job.file)
    return found


def _different(mine: PreparedJob, theirs: PreparedJob) -> Iterator[tuple[str, tuple[object, object]]]:
    """Keys that decide the plan, and are read back as something else."""

    def plan(p: PreparedJob) -> dict[str, object]:
        j, s = p.job, p.job.schedule
        sizes = {f"parallel.{k}": p.mesh.sizes[k] for k in ("tp", "cp", "pp", "dp", "ep", "etp")}
        tp = j.parallel.tp > 1
        return {
            **{f"model.{f.name}": getattr(p.config, f.name) for f in fields(ModelConfig) if f.name not in _MODEL},
            **{f"model.{f.name}": getattr(p.config.form, f.name) for f in fields(LayerForm)},
            "model.moe": p.config.moe and replace(p.config.moe, scale=1.0, normalised=True, scoring="", balance=0.0),
            **sizes,
            "parallel.zero": j.parallel.zero if _sharded(p) else 0,
            "parallel.dp_replicate": j.parallel.dp_replicate,
            "parallel.order": j.parallel.order,
            "parallel.sequence_parallel": j.parallel.sequence_parallel and tp,
            "parallel.cp_comm": j.parallel.cp_comm if j.parallel.cp > 1 else "",
            "schedule.name": p.schedule if p.mesh.sizes["pp"] > 1 else "",
            "schedule.stages_per_rank": p.stages // p.mesh.sizes["pp"],
            "parallel.layers": p.layout,
            "schedule.microbatches": p.mbs,
            "schedule.microbatch_size": s.microbatch_size,
            "schedule.flushes": s.flushes,
            "schedule.recompute": p.base.recompute,
            "model.seq_len": j.model.seq_len,
            "precision.compute": j.precision.compute,
        }

    a, b = plan(mine), plan(theirs)
    yield from ((k, (v, b[k])) for k, v in a.items() if v != b[k])


def _sharded(p: PreparedJob) -> bool:
    """Whether a level of ZeRO says anything that counts: of replicas, or of experts that tp ranks hold copies of."""
    copies = ("dp", "cp", *(("edp",) if p.config.moe is not None else ()))
    return any(p.mesh.size((axis,)) > 1 for axis in copies)


def _formats(job: Job) -> dict[str, object]:
    """The number formats by key, those that the job leaves out too."""
    found, whole = precision_of(job), job.parallel.zero in (1, 2)
    gather = found.updated if whole and found.updated else found.gather  # one key says both
    own = {"gather": str(gather), "residual": str(found.stream)}
    own |= {key: str(getattr(found, key) or found.activations) for key in ("attention", "head")}
    return {k: own.get(k) or str(getattr(found, k)) for k in keys_of("precision")}


def _left_out(mine: PreparedJob, back: PreparedJob) -> Iterator[tuple[str, object]]:
    """Keys of the job that the launch does not say, beside those that decide the plan."""
    own, said = ({**table_of(j), "precision": _formats(j)} for j in (mine.job, back.job))
    keys = {"model": ("attention",), "parallel": ("bucket_MiB", "prefetch", "reshard", "overlap_grad_reduce")}
    keys["schedule"] = ("merge", "delay_wgrad", "p2p")
    for section, names in keys.items():
        for key in names:
            if own[section].get(key) != said[section].get(key):
                yield f"{section}.{key}", said[section].get(key)
    if mine.job.parallel.ep > 1 and own["schedule"].get("expert_all_to_all") == "overlapped":  # no framework's autograd
        yield "schedule.expert_all_to_all", "serial"
    if mine.schedule != back.schedule:  # of one stage, where a launch names none
        yield "schedule.name", back.schedule
    for section in ("cluster", "routing", "costs", "data", "optimizer", "precision", "gate", "history"):
        for key in (*own[section], *(k for k in said[section] if k not in own[section])):
            if said[section].get(key) != own[section].get(key):
                yield f"{section}.{key}", said[section].get(key)
