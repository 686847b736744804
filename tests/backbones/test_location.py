"""Names, folders and hub ids; no test here touches a network."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from lit_dlm.backbones import location
from lit_dlm.backbones.location import locate


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, object]]:
    """Records hub downloads instead of running them."""
    calls: list[dict[str, object]] = []

    def download(repo: str, **options: object) -> str:
        calls.append({"repo": repo, **options})
        return str(tmp_path / "downloaded")

    monkeypatch.setattr(location, "snapshot_download", download)
    return calls


def test_an_embedded_name_wins_over_a_folder_of_that_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    assets = tmp_path / "assets"
    (assets / "small").mkdir(parents=True)
    (assets / "small" / "config.json").write_text("{}")
    (assets / "other").mkdir()  # no model
    (tmp_path / "small").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(location, "ASSETS", assets)
    assert location.embedded_names() == ["small"]
    assert locate("small") == assets / "small"


def test_an_existing_folder_needs_no_hub(
    hub: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert locate("owner/name") == Path("owner/name")
    assert hub == []


@pytest.mark.parametrize("path", ["absent", "./absent", "/absent/model", "a/b/c", "runs/absent"])
def test_a_wrong_path_is_an_error_and_no_download(
    hub: list[dict[str, object]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: str
):
    (tmp_path / "runs").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=f"'{path}' is neither an existing folder"):
        locate(path)
    assert hub == []


def test_a_file_and_an_empty_name_are_refused(tmp_path: Path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(ValueError, match="is a file"):
        locate(str(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="got ''"):
        locate("")


def test_a_hub_id_is_downloaded_without_code_or_pickles(hub: list[dict[str, object]]):
    locate("Dream-org/Dream-v0-Instruct-7B@abc123")
    locate("owner/name", weights=False)
    assert hub[0]["repo"] == "Dream-org/Dream-v0-Instruct-7B"
    assert hub[0]["revision"] == "abc123"
    assert "*.safetensors" in hub[0]["allow_patterns"]  # type: ignore[operator]
    assert hub[1]["revision"] is None
    for call in hub:
        assert not {"*.py", "*.bin"} & set(call["allow_patterns"])  # type: ignore[call-overload]
    assert "*.safetensors" not in hub[1]["allow_patterns"]  # type: ignore[operator]


def test_a_failed_download_says_that_no_folder_exists_either(monkeypatch: pytest.MonkeyPatch):
    def offline(*_args: object, **_options: object) -> str:
        raise LocalEntryNotFoundError("no connection")

    monkeypatch.setattr(location, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'owner/name' is no existing folder.*no connection"):
        locate("owner/name")
