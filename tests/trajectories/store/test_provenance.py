import hashlib
import json

import pytest

from lit_dlm.trajectories.store.provenance import RunRecord, canonical_json
from tests.trajectories.samples import run_record


def test_canonical_json_sorts_keys():
    value = {"b": [1, 2.5, None, True], "a": 1e-7, "ü": 1e22, "c": 0.1}
    assert canonical_json(value) == '{"a":1e-07,"b":[1,2.5,null,true],"c":0.1,"ü":1e+22}'
    assert json.loads(canonical_json(value)) == value


def test_a_run_is_stored_with_its_surroundings_and_named_by_the_hash_of_its_file(tmp_path):
    run = RunRecord(model={}, tokenizer={}, decode={}, randomness={}, data={})
    assert {"python", "torch", "commit", "lit_dlm", "variables"} <= run.software.keys()
    assert {"machine", "devices"} <= run.hardware.keys()
    path = run.save(tmp_path)
    assert path.name == "run.json"
    assert hashlib.sha256(path.read_bytes()).digest()[:16] == run.digest()
    assert RunRecord.parse(path.read_text()).digest() == run.digest()


def test_a_folder_refuses_other_settings_and_names_the_keys(tmp_path):
    assert run_record().save(tmp_path).name == "run.json"
    beside = run_record(hardware={"devices": ["x"]})  # decides nothing
    for _ in range(2):
        assert beside.save(tmp_path).name == f"run-{beside.digest().hex()[:16]}.json"
    assert run_record().save(tmp_path).name == "run.json"
    other = run_record(decode={"temperature": 0.5, "policy": {"name": "entropy"}, "top_p": 1.0})
    with pytest.raises(ValueError, match=r"decode\.temperature: 0\.0 in the folder, 0\.5 now") as e:
        other.save(tmp_path)
    assert "decode.top_p: absent in the folder, 1.0 now" in str(e.value)
    assert "decode.policy" not in str(e.value)


def test_methods_may_be_added_and_left_out_but_not_changed(tmp_path):
    """Three runs of one folder: method a; methods a and b-0.9; b-0.9 with another setting."""

    def run(**methods):
        return run_record(decode={"methods": methods}, data={"tasks": {"t": {"split": "test"}}})

    second = run(**{"a": {"k": 1}, "b-0.9": {"k": 2}})
    assert run(a={"k": 1}).save(tmp_path).name == "run.json"
    assert second.save(tmp_path).name == f"run-{second.digest().hex()[:16]}.json"
    run(**{"b-0.9": {"k": 2}}).save(tmp_path)
    with pytest.raises(ValueError, match=r"decode\.methods\.b-0\.9\.k: 2 in the folder, 3 now"):
        run(**{"b-0.9": {"k": 3}}).save(tmp_path)
    with pytest.raises(ValueError, match=r"decode\.methods\.a\.j: absent in the folder, 0 now"):
        run(a={"k": 1, "j": 0}).save(tmp_path)


def test_a_damaged_run_file_is_one_clear_error(tmp_path):
    for text in ("{", "{}", "[]", '{"model": []}'):
        (tmp_path / "run.json").write_text(text)
        with pytest.raises(ValueError, match=r"run\.json: not a run record"):
            run_record().save(tmp_path)
