"""A base in S3 is downloaded once, and is nothing else than its digest says."""

from pathlib import Path

import pytest
import yaml

from grpo.__main__ import main
from grpo.build.sources import find_source
from grpo.errors import StorageError
from grpo.policy_params import S3Base
from tests.storage.proxy import Proxy
from tests.storage.transfers import contents, write_directory


def test_a_base_is_what_upload_prints_and_downloaded_once(
    bucket: str,
    tmp_path: Path,
    proxy: Proxy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    model = write_directory(tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["grpo", "upload", str(model), f"s3://{bucket}/model"])
    with pytest.raises(SystemExit, match=r"^0$"):
        main()
    base = S3Base(**yaml.safe_load(capsys.readouterr().out))
    source = find_source(base, tmp_path, parameter="policy.base")
    assert source == (f".work/s3/{base.sha256}", None, True, "policy.base")
    assert contents(Path(source.name)) == contents(model)
    proxy.clear()
    assert find_source(base, tmp_path, parameter="policy.base") == source
    assert proxy.seen == []


def test_a_base_that_is_not_there_names_its_parameter(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    base = S3Base(source="s3", uri=f"s3://{bucket}/model", sha256="0" * 64)
    message = rf"^params\.yaml: policy\.base: s3://{bucket}/model/manifest\.json: no such object; "
    with pytest.raises(StorageError, match=message):
        find_source(base, tmp_path, parameter="policy.base")
