"""What is refused before ranks start, by its key, and what is known of the model then."""

from __future__ import annotations

import pytest

from parallel3d.config import load_config, locate
from parallel3d.config.errors import Place
from parallel3d.planning.preflight import check_before_start, flops_per_token
from runtime.errors import ConfigError

SMALL = {"model.args.layers": 2, "model.args.width": 16, "model.args.heads": 2, "model.args.sequence": 8}


def config_of(**overrides):
    return load_config(None, overrides={**SMALL, **overrides}, environ={})


def refusal(**overrides) -> str:
    with pytest.raises(ConfigError) as error:
        check_before_start(config_of(**overrides), lambda key: Place("run.yaml"))
    return str(error.value)


def test_what_is_known_of_a_model():
    facts = check_before_start(config_of())
    block = 4 * (16 * 16 + 16) + (16 * 64 + 64) + (64 * 16 + 16) + 4 * 16
    assert facts.parameters == (256 + 8) * 16 + 2 * block + 2 * 16 + 256 * 16
    assert facts.flops_per_token == 6 * facts.parameters + 12 * 2 * 16 * 8


def test_only_our_own_models_tell_of_attention():
    own = load_config(None, overrides={"model.factory": "collections:OrderedDict"}, environ={})
    assert flops_per_token(own, 100) == 600


def test_devices_that_are_not_there(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert refusal(**{"comm.backend": "nccl"}).startswith(
        'run.yaml  comm.backend = "nccl": each rank needs a CUDA device, 1 of them on this host: there is none'
    )
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.distributed.is_nccl_available", lambda: True)
    assert "2 of them on this host: there is 1." in refusal(**{"comm.backend": "nccl", "parallel.dp": 2})
    check_before_start(config_of(**{"comm.backend": "nccl", "parallel.dp": 2}), num_local=1)


def test_a_table_that_would_wait_for_ever(tmp_path):
    (tmp_path / "table.csv").write_text("0F0,0B0\n1B0,1F0\n")
    text = refusal(**{"pipeline.schedule": f"csv:{tmp_path}/table.csv", "parallel.pp": 2})
    assert text.startswith("run.yaml  pipeline.schedule = ")


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ((1, 2), "parallel.pp = 1: {0}: 1 ranks were asked for, but the file has 2."),
        ((2, 4), "pipeline.microbatches = 4: {0}: 4 microbatches were asked for, but the file has 2."),
    ],
)
def test_a_table_of_another_size_names_the_key(tmp_path, sizes, words):
    path = tmp_path / "table.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    given = dict(zip(("parallel.pp", "pipeline.microbatches"), sizes, strict=True))
    text = refusal(**{"pipeline.schedule": f"csv:{path}", "train.batch_size": 4, **given})
    remedy = "          Set it to 2, or name another table."
    assert text == f"run.yaml  {words.format(path)}\n{remedy}"


def test_a_plan_and_a_path_that_lead_nowhere():
    assert refusal(**{"parallel.tensor_plan": {"nothing.*": "column"}, "parallel.tp": 2}).startswith(
        'run.yaml  parallel.tensor_plan["nothing.*"]'
    )
    assert refusal(**{"data.path": "/nowhere"}).startswith('run.yaml  data.path = "/nowhere"')


def test_a_refusal_says_where_its_value_stands(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("data: {path: nowhere}\nparallel:\n  tp: 2\n  tensor_plan: {no.*: column}\n")

    def place(key, **overrides):
        return str(locate("run.yaml", overrides, key, environ={}))

    assert place("data.path") == "run.yaml:1:14"
    assert place("data.path", **{"data.path": "gone"}) == "--set data.path"
    assert place('parallel.tensor_plan["no.*"]') == "run.yaml:4:23"
    assert place("model.factory") == place("") == "run.yaml"
