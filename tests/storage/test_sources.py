"""What is in S3 is downloaded once, and is nothing else than its digest says."""

from pathlib import Path

import pytest

from grpo.__main__ import main
from grpo.errors import StorageError
from grpo.params.parameters import read_params
from grpo.params.yaml import dump_yaml, parse_yaml
from grpo.runtime.sources import find_source
from grpo.runtime.storage.upload import upload_directory
from grpo.schema import S3Base
from grpo.wiring.tasks import build_prompts
from tests.files import contents
from tests.storage.proxy import Proxy
from tests.storage.transfers import write_directory

ROOT = Path(__file__).parents[2]
LINE = '{"prompt": "3+4", "answer": "7", "family": "pairs"}'


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
    base = S3Base(**parse_yaml(capsys.readouterr().out))
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


def test_prompts_in_s3_are_those_of_their_digest(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    written, uri = tmp_path / "written", f"s3://{bucket}/sums/"
    written.mkdir()
    for part, line in [("train", '{"prompt": "1+2", "answer": "3"}'), ("eval", LINE)]:
        (written / f"{part}.jsonl").write_text(line)
    params = parse_yaml((ROOT / "recipes" / "reasoning-qwen.yaml").read_text())
    stored = {"source": "s3", "uri": uri, "sha256": upload_directory(written, uri)}
    params["task"] |= {"directory": stored, "train": "train.jsonl", "eval": "eval.jsonl"}
    (tmp_path / "params.yaml").write_text(dump_yaml(params))
    tables = build_prompts(read_params(tmp_path / "params.yaml"), tmp_path / "data")
    assert tables.train[["family", "answer"]].values.tolist() == [["sums", "3"]]
    assert tables.eval[["family", "answer"]].values.tolist() == [["pairs", "7"]]
